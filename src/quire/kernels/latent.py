"""Dequantization of latent caches (MLA) whose scales attention kernels do not support."""

from __future__ import annotations

import torch
from torch import Tensor

# The number of consecutive elements of a token that share a scale.
GROUP = 128


def dequantize(cache: Tensor, scales: Tensor | float, dtype: torch.dtype) -> Tensor:
    """A copy of an fp8 cache [pages, page_size, head_dim] in `dtype`, multiplied by one scale, or by a scale per token
    and GROUP elements, float32 [pages, page_size, head_dim / GROUP]. Slow, since it reads and writes the whole pool.
    """
    scaled = cache.to(dtype, copy=True)
    if not isinstance(scales, Tensor):
        return scaled.mul_(scales)
    scaled.unflatten(-1, (-1, GROUP)).mul_(scales.detach().unsqueeze(-1))
    return scaled
