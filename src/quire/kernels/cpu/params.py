"""The arguments of the CPU kernels: the arrays and numbers of one call, and where a key lies in the cache.

A row is a (query token, query head) pair: row r of KV head h of a request has query token r // group and query head
h * group + r % group.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple, cast

import numpy as np
from numba.extending import register_jitable

from quire.kernels.cpu.mask import MaskArguments


class _Params(NamedTuple):
    """One call of attention, except for its `Mask`. q, k, v and out are flat: an array has the bytes of all elements
    that the tensor's strides reach, and strides count elements. Storage types are indices in `simd.STORAGE_TYPES`.

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
    cap: float  # 0: no soft cap
    rope: np.ndarray  # float32 [positions * dim_qk]: cosines, then sines, of each position; empty without ROPE_LLAMA


Params = cast("Any", namedtuple("Params", (*_Params._fields, *MaskArguments._fields)))


@register_jitable
def key_offset(p, strides, b, j):
    """The offset of key or value j of request b; page ids are clamped, so that no table leads outside the cache."""
    page = min(max(p.kv_indices[p.kv_start[b] + j // p.page_size], 0), p.num_pages - 1)
    return np.int64(page) * strides[0] + (j % p.page_size) * strides[1]
