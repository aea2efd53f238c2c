"""Latent caches (MLA) with scales that attention kernels do not know."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128  # elements of a token that share a scale


def widen(cache: Tensor, scales: Tensor | float, dtype: torch.dtype) -> Tensor:
    """A copy of an fp8 cache, [pages, page_size, head_dim], as `dtype`, multiplied by a number or by a scale for each
    token and 128 elements, float32 [pages, page_size, head_dim / 128]. Reads and writes the whole pool: slow.
    """
    wide = cache.to(dtype, copy=True)
    if isinstance(scales, Tensor):
        wide.unflatten(-1, (-1, GROUP)).mul_(scales.detach().unsqueeze(-1))
        return wide
    return wide.mul_(scales)
