"""Custom masks, made on the device that holds the lengths, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.definition.masks import byte_indptr, pack_segments


def pack_mask(mask: Tensor, q_lens: Tensor, kv_lens: Tensor) -> Tensor:
    """Pack custom masks for a wrapper's `packed_custom_mask`.

    Args:
        mask: bool [sum of q_len * kv_len], the requests' masks one after another, row by row. Entries missing at the
            end are False.
        q_lens, kv_lens: int32 [batch_size], on the mask's device.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"custom_mask is {mask.dtype}: it must be bool")
    areas = q_lens.long() * kv_lens
    # The mask of each request starts at a byte.
    num_bytes = mask.numel() // 8 + len(areas)
    return pack_segments(mask.flatten(), pad(areas.cumsum(0), (1, 0)), byte_indptr(areas), num_bytes)


def prefix_window_mask(q_lens: Tensor, tails: Tensor, window_left: int, num_queries: int, area: int) -> Tensor:
    """A custom mask, bool [area], of new tokens over the last keys before them: True within the sliding window.

    Args:
        q_lens: int32 [batch_size], new tokens of each request; num_queries: their sum.
        tails: int32 [batch_size], the number of keys before each request's new tokens that the mask covers: those next
            to the new tokens, at most window_left.
        area: the sum of q_len * tail.
    """
    index = torch.arange(num_queries, device=q_lens.device)
    request = torch.repeat_interleave(q_lens, output_size=num_queries).long()
    index -= (q_lens.cumsum(0) - q_lens)[request]
    ends = tails[request].cumsum(0)
    # A row sees its last keys.
    visible = (window_left - index).clamp(min=0).minimum(tails[request])
    deltas = torch.zeros(area + 1, dtype=torch.int8, device=q_lens.device)
    one = torch.ones_like(index, dtype=torch.int8)
    deltas.index_add_(0, ends - visible, one).index_add_(0, ends, -one)
    return deltas[:-1].cumsum(0, dtype=torch.int8).bool()
