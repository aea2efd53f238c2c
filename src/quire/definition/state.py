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
    v, s = merge_many(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    return v.to(v_a.dtype), s


def merge_ragged(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """For each i the state of the union of sets indptr[i] to indptr[i + 1]. v: [sets, heads, head_dim], s: float32
    [sets, heads].

    A set without keys adds nothing, whatever its v holds. Never waits for a device.
    """
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    begins = indptr.long().clamp(0, len(s))

    def reduce(x: Tensor, kind: str, nothing: float) -> Tensor:
        return torch.segment_reduce(x, kind, offsets=begins, axis=0, initial=nothing)

    top = reduce(s, "max", -torch.inf)
    safe = torch.where(torch.isinf(top), 0.0, top)  # as in `merge_many`
    owner = torch.searchsorted(begins, torch.arange(len(s), device=s.device), right=True) - 1
    weight = torch.exp2(s - safe[owner.clamp(0, len(top) - 1)]) if len(top) else s
    total = reduce(weight, "sum", 0.0)
    parts = torch.where(weight[..., None] == 0, 0.0, v.to(weight.dtype) * weight[..., None])
    out = reduce(parts, "sum", 0.0) / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(v.dtype), safe + torch.log2(total)


def merge_many(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the union of n sets, 0 or more. v: [tokens, n, heads, head_dim], s: float32 [tokens, n, heads].

    A set without keys adds nothing, whatever its v holds.
    """
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    top = torch.cat([s, s.new_full((len(s), 1, s.shape[2]), -torch.inf)], 1).amax(1)  # amax of nothing is no number
    safe = torch.where(torch.isinf(top), 0.0, top)  # -inf - -inf is no number; neither is inf - inf
    weight = torch.exp2(s - safe[:, None])[..., None]
    total = weight.sum(1)
    parts = torch.where(weight == 0, 0.0, v.to(weight.dtype) * weight)
    out = parts.sum(1) / torch.where(total == 0, 1.0, total)
    return out.to(v.dtype), safe + torch.log2(total[..., 0])
