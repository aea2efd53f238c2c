"""The product of one or a few rows and a matrix: torch on the CPU, Triton on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import on_triton

# The most rows, which tensor cores multiply at a time.
MAX_SKINNY_ROWS = 8


def max_skinny_rows(dtype: torch.dtype) -> int:
    """The most rows of a dtype that `skinny_gemm` multiplies, in float32. Tensor cores would round those of float32."""
    return {torch.float16: MAX_SKINNY_ROWS, torch.bfloat16: MAX_SKINNY_ROWS, torch.float32: 1}.get(dtype, 0)


def is_skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `skinny_gemm` computes a product: its tensors are contiguous and of one dtype, and x has few rows."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not all(t.dtype == x.dtype and t.is_contiguous() for t in tensors):
        return False
    return 0 < x.numel() <= max_skinny_rows(x.dtype) * x.shape[-1]


@torch.library.custom_op("quire::skinny_gemm", mutates_args=())
def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` of a few rows: x [..., in_features], weight [out_features, in_features], bias
    [out_features]; see `is_skinny`. Returns [..., out_features].
    """
    if not on_triton(x.device):
        return F.linear(x, weight, bias)
    from quire.kernels.triton.skinny_gemm import skinny_gemm as on_gpu

    out = x.new_empty(*x.shape[:-1], len(weight))
    on_gpu(out, x, weight, bias)
    return out


@skinny_gemm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
