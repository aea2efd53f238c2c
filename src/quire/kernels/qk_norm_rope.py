"""Queries and keys normalised per head and rotated, and keys and values appended to pages: one operation of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.pages import as_int32
from quire.kernels.append import append, check_slots, write
from quire.kernels.norm import normalized, rounded
from quire.kernels.ops import on_triton, operation
from quire.kernels.rope import check_positions, cos_sin, rotate_pairs


@operation("norm_rotate_append", "q_out", "k_cache", "v_cache")
def norm_rotate_append(
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    slots: Tensor | None,
    requests: Tensor | None,
    positions: Tensor | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_factor: float,
    v_factor: float,
    eps: float,
    weight_bias: float,
    interleave: bool,
) -> None:
    """Normalise and rotate q into q_out, and k into the cache of keys; copy v into the cache of values.

    q_out, q, k, v: [tokens, heads, head_dim], any strides with the last one 1; if q is None, it is in q_out. Weights:
    [head_dim], plus weight_bias; None: no norm. k_cache, v_cache: [pages, page_size, heads, head_dim], any strides, of
    k's dtype or of fp8, for which keys and values are scaled and rounded as in `quire.kernels.norm.norm`.
    cos_sin_cache, pos_ids: as in `quire.kernels.rope.rotate`. Token i goes to slot slots[i], page * page_size + the
    index in the page, or, if slots is None, to position positions[i] of request requests[i]; tokens with a negative
    slot or request are not appended. All is computed in float32 and rounded once.
    """
    q = q_out if q is None else q
    table = None
    if requests is not None and positions is not None and kv_indptr is not None and kv_indices is not None:
        table = (requests, positions, kv_indptr, kv_indices)
    if pos_ids.is_cpu:
        check_positions(pos_ids, None, cos_sin_cache, len(q))
    if slots is not None:
        check_slots(slots, k_cache)
    if on_triton(q.device):
        from quire.kernels.triton.qk_norm_rope import norm_rotate_append_on_gpu

        norm_rotate_append_on_gpu(
            (q_out, k_cache, v_cache, q, k, v), (q_weight, k_weight), (cos_sin_cache, pos_ids), slots, table,
            (k_scale, v_scale), (eps, k_factor, v_factor), interleave, weight_bias,
        )  # fmt: skip
        return
    cos, sin = cos_sin(pos_ids, None, cos_sin_cache)
    heads = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x.float() if weight is None else normalized(x.float(), weight, eps, weight_bias)
        heads.append(rotate_pairs(y, y.clone(), cos, sin, cos_sin_cache.shape[1], interleave))
    key = rounded(heads[1], k_scale, k_factor, k_cache.dtype)
    value = rounded(v.float(), v_scale, v_factor, v_cache.dtype)
    if slots is not None:
        write(k_cache, v_cache, key, value, slots)
    elif table is not None:
        requests, positions, kv_indptr, kv_indices = map(as_int32, table)
        append(k_cache, v_cache, key, value, requests, positions, kv_indptr, kv_indices, torch.ones_like(kv_indptr[1:]))
    q_out.copy_(heads[0])
