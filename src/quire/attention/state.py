"""Partial results of attention and how they merge.

Attention over a set of keys is a state (v, s): the output, and the base-2 logarithm of the softmax's denominator. The
states of two disjoint sets of keys determine the state of their union; the state of no key is (0, -inf). (Section
2.2 of the FlashInfer paper, Ye et al., 2025.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the union. v: [tokens, heads, head_dim], s: float32 [tokens, heads]; v keeps v_a's dtype."""
    wide = torch.promote_types(s_a.dtype, torch.float32)
    s_a, s_b = s_a.to(wide), s_b.to(wide)
    top = torch.maximum(s_a, s_b)
    safe = torch.where(torch.isinf(top), 0.0, top)  # -inf - -inf is no number; neither is inf - inf
    w_a, w_b = torch.exp2(s_a - safe)[..., None], torch.exp2(s_b - safe)[..., None]
    total = w_a + w_b
    v = (v_a.to(wide) * w_a + v_b.to(wide) * w_b) / torch.where(total > 0, total, 1.0)
    return v.to(v_a.dtype), safe + torch.log2(total[..., 0])


def merge_many(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the union of n sets. v: [tokens, n, heads, head_dim], s: float32 [tokens, n, heads]."""
    top = s.amax(1)
    safe = torch.where(torch.isinf(top), 0.0, top)
    weight = torch.exp2(s - safe[:, None])[..., None]
    total = weight.sum(1)
    out = (v.to(weight.dtype) * weight).sum(1) / torch.where(total > 0, total, 1.0)
    return out.to(v.dtype), safe + torch.log2(total[..., 0])
