"""RMS and layer norms, with a residual added before, and fp8 outputs: torch on the CPU, Triton on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.ops import on_triton, operation


@operation("norm", "out", "residual")
def norm(
    out: Tensor,
    x: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    beta: Tensor | None,
    scale: Tensor | None,
    factor: float,
    eps: float,
    weight_bias: float,
    center: bool,
) -> None:
    """Add x to the residual, if there is one, and write the normalised sum to `out`. If x is None, it is in `out`.

    x, residual, out: [tokens, dim] or [tokens, heads, dim], any strides with the last one 1; weight, beta: [dim]. With
    `center` the mean is subtracted (layer norm), and otherwise it counts as 0 (RMS norm). All is computed in float32,
    also from the sum that the residual holds rounded, and rounded once. An `out` of fp8 gets results times `factor`,
    over the element of `scale` if it is not None; values beyond the range of fp8 become its largest finite value.
    """
    x = out if x is None else x
    if on_triton(x.device):
        from quire.kernels.triton.norm import norm as norm_on_gpu

        norm_on_gpu(out, x, residual, weight, beta, scale, factor, eps, weight_bias, center)
        return
    y = x.float()
    if residual is not None:
        y = y + residual
        residual.copy_(y)
    y = normalized(y, weight, eps, weight_bias, center)
    out.copy_(rounded(y if beta is None else y + beta, scale, factor, out.dtype))


def normalized(x: Tensor, weight: Tensor, eps: float, weight_bias: float, center: bool = False) -> Tensor:
    """float32 rows over their root mean square, or with `center` their deviations from the mean, times weights."""
    if center:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + weight_bias)


def rounded(x: Tensor, scale: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    """float32 results as `dtype`: as they are or, for fp8, times factor, over the scale, and saturated."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    x = x * factor if scale is None else x * (factor / scale.float())
    return x.clamp(-largest, largest).to(dtype)
