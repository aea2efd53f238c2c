"""The product of one or a few rows and a matrix: torch on the CPU, Triton on a GPU, where torch is not faster."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import on_triton

# Matrices with more elements are multiplied by more than 8 rows by cuBLAS, which is faster. The operation decides this
# and not `is_skinny`, on which compiled code depends: layers with larger and smaller matrices would be compiled for one
# more range of rows.
_MAX_ELEMENTS = 1 << 25


def max_skinny_rows(dtype: torch.dtype) -> int:
    """The most rows of a dtype that `skinny_gemm` multiplies: as many of 16 bits as tensor cores take at a time, one of
    float32, whose products tensor cores would round, and 0 of other dtypes.
    """
    return {torch.float16: 16, torch.bfloat16: 16, torch.float32: 1}.get(dtype, 0)


def is_skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `skinny_gemm` computes a product: its tensors are contiguous and of one dtype, and x has few rows."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not all(t.dtype == x.dtype and t.is_contiguous() for t in tensors):
        return False
    return 0 < x.numel() <= max_skinny_rows(x.dtype) * x.shape[-1]


@torch.library.custom_op("quire::skinny_gemm", mutates_args=())
def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` of a few rows, added up in float32: x [..., in_features], weight [out_features,
    in_features], bias [out_features]; see `is_skinny`. Returns [..., out_features] of the dtype of x.
    """
    is_large = weight.numel() > _MAX_ELEMENTS and x.numel() > 8 * x.shape[-1]
    if is_large or not on_triton(x.device):
        return F.linear(x, weight, bias)
    from quire.kernels.triton.skinny_gemm import skinny_gemm as on_gpu

    out = x.new_empty(*x.shape[:-1], len(weight))
    on_gpu(out, x, weight, bias)
    return out


@skinny_gemm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
