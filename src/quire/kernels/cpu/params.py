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
    """One call of attention, except for its `MaskArguments`. q, k, v and out are flat: an array has the bytes of all
    elements that the tensor's strides reach, and strides count elements. Storage types are indices in
    `simd.STORAGE_TYPES`.

    Logits are in base 2, so that scale, slopes, sinks and cap come multiplied by log2(e).
    """

    # q, k, v and out are uint8, whatever the tensors' dtypes.
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    q_storage: int
    kv_storage: int
    out_storage: int
    # This is float32 [tokens * heads].
    lse: np.ndarray
    # Strides are int64: [2] for token and head of q and out, [3] for page, token and head of k and v.
    q_strides: np.ndarray
    k_strides: np.ndarray
    v_strides: np.ndarray
    out_strides: np.ndarray
    # The queries of a request are q_len tokens of q from q_start on: int64 [batch].
    q_start: np.ndarray
    q_len: np.ndarray
    # The page ids of a request begin at entry kv_start of kv_indices, and hold kv_len keys: int64 [batch].
    kv_start: np.ndarray
    kv_len: np.ndarray
    # Page ids are int32.
    kv_indices: np.ndarray
    page_size: int
    num_pages: int
    num_kv_heads: int
    # The number of query heads of a KV head.
    group: int
    dim_qk: int
    dim_vo: int
    # scale is sm_scale times the scales of q and k. It and the next three are float32 [heads].
    scale: np.ndarray
    v_scale: np.ndarray
    # There are no slopes without ALiBi, and no sinks in a layer that has none: the arrays are empty.
    slopes: np.ndarray
    sinks: np.ndarray
    # At 0, logits have no soft cap.
    cap: float
    # Each position has its cosines, then its sines: float32 [positions * dim_qk], empty without ROPE_LLAMA.
    rope: np.ndarray


Params = cast("Any", namedtuple("Params", (*_Params._fields, *MaskArguments._fields)))


@register_jitable
def key_offset(p, strides, b, j):
    """The offset of key or value j of request b; page ids are clamped, so that no table leads outside the cache."""
    page = min(max(p.kv_indices[p.kv_start[b] + j // p.page_size], 0), p.num_pages - 1)
    return np.int64(page) * strides[0] + (j % p.page_size) * strides[1]
