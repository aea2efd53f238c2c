"""Partial states of attention, and how they are merged.

Attention over a set of keys has a state (v, s): the output v, and the LSE s, which is the base-2 logarithm of the
softmax's denominator. The states of two disjoint sets of keys determine the state of their union. The state of no keys
is (0, -inf), and merging it changes nothing, whatever its v holds. See section 2.2 of the FlashInfer paper.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the union of two sets, of v_a's dtype. v: [tokens, heads, head_dim], s: float32 [tokens, heads]."""
    v, s = merge_many(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    return v.to(v_a.dtype), s


def merge_ragged(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """For each row i, the state of the union of the sets indptr[i] to indptr[i + 1]. Never waits for a device.

    v: [sets, heads, head_dim], s: float32 [sets, heads], indptr: int [rows + 1].
    """
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    offsets = indptr.long().clamp(0, len(s))

    def reduce(x: Tensor, kind: str, initial: float) -> Tensor:
        return torch.segment_reduce(x, kind, offsets=offsets, axis=0, initial=initial)

    row_max = reduce(s, "max", -torch.inf)
    # The difference of infinities would be NaN.
    shift = torch.where(torch.isinf(row_max), 0.0, row_max)
    row = torch.searchsorted(offsets, torch.arange(len(s), device=s.device), right=True) - 1
    weight = torch.exp2(s - shift[row.clamp(0, len(row_max) - 1)]) if len(row_max) else s
    denominator = reduce(weight, "sum", 0.0)
    weighted = torch.where(weight[..., None] == 0, 0.0, v.to(weight.dtype) * weight[..., None])
    out = reduce(weighted, "sum", 0.0) / torch.where(denominator == 0, 1.0, denominator)[..., None]
    return out.to(v.dtype), shift + torch.log2(denominator)


def merge_many(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the union of n sets, n >= 0. v: [tokens, n, heads, head_dim], s: float32 [tokens, n, heads]."""
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    # amax refuses n = 0, so a row of -inf is added.
    row_max = torch.cat([s, s.new_full((len(s), 1, s.shape[2]), -torch.inf)], 1).amax(1)
    # The difference of equal infinities would be NaN.
    shift = torch.where(torch.isinf(row_max), 0.0, row_max)
    weight = torch.exp2(s - shift[:, None])[..., None]
    denominator = weight.sum(1)
    weighted = torch.where(weight == 0, 0.0, v.to(weight.dtype) * weight)
    out = weighted.sum(1) / torch.where(denominator == 0, 1.0, denominator)
    return out.to(v.dtype), shift + torch.log2(denominator[..., 0])
