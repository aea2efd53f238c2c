"""Matrix products of a step."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from quire.kernels.skinny_gemm import is_skinny, skinny_gemm


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by a kernel of its own where x is one token or a few on a GPU.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features].
    """
    if x.is_cuda and is_skinny(x, weight, bias):
        return skinny_gemm(x, weight, bias)
    return F.linear(x, weight, bias)
