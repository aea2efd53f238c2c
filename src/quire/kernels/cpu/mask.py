"""Which keys a query sees: the only file of the CPU family that knows causal masks, windows and custom masks.

A new edge of the visible keys is added to `row_range`, and a new kind of mask inside these edges to `apply_mask` and
`visible_to_all`. The functions are not decorated: kernels compile them, and the host calls them uncompiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from quire.kernels.call import Call

# The fields of MaskSpec that this file computes. `Call.expanded` has turned items into a custom mask before.
MASKS = frozenset({"causal", "window_left", "window_right", "custom_mask", "items"})


class MaskArguments(NamedTuple):
    """The arguments of masks, which are fields of `Params`, since Numba takes no tuples within tuples.

    A new kind of mask is a field here, and a bound in `row_range` or a condition in `visible_to_all` and `apply_mask`.
    """

    # The number of keys to the left of its position that a query sees; -1: all.
    window_left: int
    # The number of keys to the right of its position that it sees: 0 for causal attention; -1: all.
    window_right: int
    # The bits of all custom masks, packed in uint8. The array is empty without custom masks.
    mask: np.ndarray
    # The bits of a request begin at this byte: int64 [batch].
    mask_start: np.ndarray


_NO_BITS = np.zeros(0, np.uint8), np.zeros(0, np.int64)


def mask_of(call: Call) -> MaskArguments:
    """The masks of a call without items."""
    spec, packed = call.spec.mask, call.mask
    bits, starts = _NO_BITS
    if packed is not None:
        bits, starts = packed.bits.contiguous().numpy(), np.maximum(packed.indptr.numpy().astype(np.int64), 0)
    return MaskArguments(spec.window_left, 0 if spec.causal else spec.window_right, bits, starts)


@register_jitable
def position(p, b, i):
    """The position of query i of request b among the request's keys; negative if there are more queries than keys."""
    return p.kv_len[b] - p.q_len[b] + i


@register_jitable
def row_range(p, b, i):
    """(start, end) of the keys that query i of request b sees, apart from a custom mask.

    Both grow with i; start is at least 0 and end at most kv_len. There are no such keys if end <= start. Kernels also
    ask for rows past the request's queries, whose results they drop.
    """
    here = position(p, b, i)
    start = max(here - p.window_left, 0) if p.window_left >= 0 else 0
    end = min(here + p.window_right + 1, p.kv_len[b]) if p.window_right >= 0 else p.kv_len[b]
    return start, end


@register_jitable
def key_range(p, b, i0, i1):
    """(start, end) of the keys that some of queries i0 to i1 of request b see, i1 not included."""
    return row_range(p, b, i0)[0], row_range(p, b, i1 - 1)[1]


@register_jitable
def visible_to_all(p, b, i0, i1, j0, j1):
    """Whether each of queries i0 to i1 of request b sees each of keys j0 to j1, i1 and j1 not included."""
    return len(p.mask) == 0 and row_range(p, b, i1 - 1)[0] <= j0 and j1 <= row_range(p, b, i0)[1]


@register_jitable
def custom_mask_bit(p, b, i, j):
    """Whether the custom mask of request b lets query i see key j; the read is clamped to the mask's bytes."""
    bit = i * p.kv_len[b] + j
    byte = min(p.mask_start[b] + (bit >> 3), len(p.mask) - 1)
    return (p.mask[byte] >> np.uint8(bit & 7)) & 1 != 0


@register_jitable
def apply_mask(p, b, i, j0, n, s, s0, step):
    """Set logits of keys that query i of request b does not see to -inf. Key j0 + t, t < n, is at s[s0 + t * step]."""
    start, end = row_range(p, b, i)
    start, end = min(max(start - j0, 0), n), min(max(end - j0, 0), n)
    for t in range(start):
        s[s0 + t * step] = -np.inf
    for t in range(end, n):
        s[s0 + t * step] = -np.inf
    if len(p.mask) and i < p.q_len[b]:
        for t in range(start, end):
            if not custom_mask_bit(p, b, i, j0 + t):
                s[s0 + t * step] = -np.inf
