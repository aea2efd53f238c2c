"""What the CPU's kernels see of a call, and what they compute alike.

A row is a (query token, head): row r of a request's KV head h is query r // group and head h * group + r % group. Its
state is a running maximum m and sum l of base-2 logits, and an output acc that is not yet divided by l (the online
softmax of Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.kernels.cpu.jit import function
from quire.kernels.cpu.simd import f32


class Problem(NamedTuple):
    """A call as arrays: each flat, over all that a tensor's strides reach, in a storage type of `simd`.

    Strides count elements; logits are in base 2, so what they are made of comes multiplied by log2(e).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray  # float32 [tokens * heads]
    q_strides: np.ndarray  # int64 [2]: token, head
    k_strides: np.ndarray  # int64 [3]: page, token, head
    v_strides: np.ndarray  # int64 [3]
    out_strides: np.ndarray  # int64 [2]
    q_start: np.ndarray  # int64 [batch]: first row of q
    q_len: np.ndarray  # int64 [batch]
    kv_start: np.ndarray  # int64 [batch]: first entry of kv_indices
    kv_len: np.ndarray  # int64 [batch]
    kv_indices: np.ndarray  # int32
    page_size: int
    num_pages: int
    num_kv_heads: int
    group: int  # query heads per KV head
    dim_qk: int
    dim_vo: int
    scale: np.ndarray  # float32 [heads]: sm_scale and the scales of q and k
    v_scale: np.ndarray  # float32 [heads]
    slopes: np.ndarray  # float32 [heads]; empty without ALiBi
    sinks: np.ndarray  # float32 [heads]; empty without sinks
    mask: np.ndarray  # uint8; empty without a custom mask
    mask_start: np.ndarray  # int64 [batch]: first byte
    cap: float  # 0 for none
    causal: bool
    window: int  # -1 for none
    rope: np.ndarray  # float32 [positions * dim_qk]: cosines, then sines, of a position; empty without ROPE_LLAMA


@function
def first_key(p, b, i):
    """The first key that query i of a request, or a later one, sees."""
    return max(p.kv_len[b] - p.q_len[b] + i - p.window, 0) if p.window >= 0 else 0


@function
def key_offset(p, strides, b, j):
    """Where key j of a request begins; page ids are clamped, so that no table leads outside the cache."""
    page = min(max(p.kv_indices[p.kv_start[b] + j // p.page_size], 0), p.num_pages - 1)
    return np.int64(page) * strides[0] + (j % p.page_size) * strides[1]


@function
def sees(p, b, i, j):
    """Whether query i of a request sees key j."""
    position = i + p.kv_len[b] - p.q_len[b]
    if (p.causal and j > position) or (p.window >= 0 and j < position - p.window) or j >= p.kv_len[b]:
        return False
    if len(p.mask) == 0 or i >= p.q_len[b]:
        return True
    bit = i * p.kv_len[b] + j
    byte = min(p.mask_start[b] + (bit >> 3), len(p.mask) - 1)
    return (p.mask[byte] >> np.uint8(bit & 7)) & 1 != 0


@function
def all_seen(p, b, i, count, t0, n):
    """Whether each of `count` queries from i sees each of n keys from t0."""
    past = p.kv_len[b] - p.q_len[b]
    inside = (not p.causal or t0 + n <= past + i + 1) and t0 + n <= p.kv_len[b]
    return inside and (p.window < 0 or t0 >= past + i + count - 1 - p.window) and len(p.mask) == 0


@function
def close(p, head, m, l):
    """A row's factor from acc to output, and its lse, with its sink joined in; (0, -inf) if it saw nothing."""
    top, weight, factor = m, l, f32(1)
    if len(p.sinks):
        top = max(m, p.sinks[head])
        factor = np.exp2(m - top)
        weight = l * factor + np.exp2(p.sinks[head] - top)
    if weight == 0:
        return f32(0), f32(-np.inf)
    return factor / weight * p.v_scale[head], top + np.log2(weight)
