"""The arguments of the CPU kernels: the arrays and numbers of one call, and where a key lies in the cache.

A row is a (query token, query head) pair: row r of KV head h of a request has query token r // group and query head
h * group + r % group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable


class Params(NamedTuple):
    """One call of attention. q, k, v and out are flat: an array has the bytes of all elements that the tensor's strides
    reach, and strides count elements. Storage types are indices in `simd.STORAGE_TYPES`.

    Logits are in base 2, so that scale, slopes, sinks and cap come multiplied by log2(e).
    """

    q: np.ndarray  # uint8
    k: np.ndarray  # uint8
    v: np.ndarray  # uint8
    out: np.ndarray  # uint8
    q_storage: int
    kv_storage: int
    out_storage: int
    lse: np.ndarray  # float32 [tokens * heads]
    q_strides: np.ndarray  # int64 [2]: token, head
    k_strides: np.ndarray  # int64 [3]: page, token, head
    v_strides: np.ndarray  # int64 [3]: page, token, head
    out_strides: np.ndarray  # int64 [2]: token, head
    q_start: np.ndarray  # int64 [batch]: first query token in q
    q_len: np.ndarray  # int64 [batch]
    kv_start: np.ndarray  # int64 [batch]: first entry of kv_indices
    kv_len: np.ndarray  # int64 [batch]
    kv_indices: np.ndarray  # int32: page ids
    page_size: int
    num_pages: int
    num_kv_heads: int
    group: int  # query heads per KV head
    dim_qk: int
    dim_vo: int
    scale: np.ndarray  # float32 [heads]: sm_scale times the scales of q and k
    v_scale: np.ndarray  # float32 [heads]
    slopes: np.ndarray  # float32 [heads]; empty without ALiBi
    sinks: np.ndarray  # float32 [heads]; empty without sinks
    mask: np.ndarray  # uint8: packed bits; empty without a custom mask
    mask_start: np.ndarray  # int64 [batch]: first byte of the request's mask
    cap: float  # 0: no soft cap
    window_left: int  # keys to the left of the query's position that it sees; -1: all
    window_right: int  # keys to the right of it, 0 for causal attention; -1: all
    rope: np.ndarray  # float32 [positions * dim_qk]: cosines, then sines, of each position; empty without ROPE_LLAMA


@register_jitable
def position(p, b, i):
    """The position of query i of request b among the request's keys; negative if there are more queries than keys."""
    return p.kv_len[b] - p.q_len[b] + i


@register_jitable
def key_offset(p, strides, b, j):
    """The offset of key or value j of request b; page ids are clamped, so that no table leads outside the cache."""
    page = min(max(p.kv_indices[p.kv_start[b] + j // p.page_size], 0), p.num_pages - 1)
    return np.int64(page) * strides[0] + (j % p.page_size) * strides[1]
