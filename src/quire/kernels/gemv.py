"""The product of one row and a matrix: torch on the CPU, Triton on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import on_triton

# Products of all dtypes are added up in float32.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `gemv` computes a product: its tensors are contiguous and of one dtype."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return all(t.dtype in DTYPES and t.dtype == x.dtype and t.is_contiguous() for t in tensors)


@torch.library.custom_op("quire::gemv", mutates_args=())
def gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` of a single row: x [..., size] with `size` elements, weight [rows, size], bias
    [rows]; see `fits`. Returns [..., rows].
    """
    if not on_triton(x.device):
        return F.linear(x, weight, bias)
    from quire.kernels.triton.gemv import gemv as gemv_on_gpu

    out = x.new_empty(*x.shape[:-1], len(weight))
    gemv_on_gpu(out, x, weight, bias)
    return out


@gemv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
