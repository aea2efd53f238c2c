"""The definition of attention in float64: slow, simple, and the reference of all tests.

`attend` is the formula for one request. `attend_batch` calls it with the queries, keys and mask of each request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.items import Items
from quire.definition.masks import PackedMask, unpack_bits
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import LOG2E, AttentionSpec

Scale = float | Tensor


def rotate(x: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Rotary position embedding of x, [tokens, heads, head_dim]; elements j and j + head_dim / 2 are a pair."""
    half = x.shape[-1] // 2
    pair = torch.arange(half, dtype=torch.float64, device=x.device)
    angles = positions.double()[:, None] / spec.rope_scale * spec.rope_theta ** (-pair / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def per_head(scale: Scale, heads: int) -> Tensor | float:
    """A scale as a factor of [tokens, heads, ...]: a number, or a tensor [kv_heads] repeated for the query heads."""
    if not isinstance(scale, Tensor) or scale.numel() == 1:
        return float(scale)
    return scale.double().repeat_interleave(heads // scale.numel())[:, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Scale = 1.0,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention of one request.

    Args:
        q: [q_len, num_qo_heads, head_dim_qk]; k, v: [kv_len, num_kv_heads, head_dim_qk or head_dim_vo].
        mask: bool [q_len, kv_len], an additional condition for a query to see a key.
        sinks: [num_qo_heads], a logit per head that is added to the softmax's denominator alone.
        q_scale, k_scale, v_scale: factors of q, k and v, each a number or one per head.

    Returns:
        out, float64 [q_len, num_qo_heads, head_dim_vo], and lse, float64 [q_len, num_qo_heads], in base 2. A query
        without visible keys has out 0 and lse -inf or, with a sink, the sink's.
    """
    q_len, kv_len = len(q), len(k)
    heads, group = spec.num_qo_heads, spec.group_size
    q, k, v = q.double(), k.double(), v.double()
    positions = torch.arange(kv_len, device=q.device)
    q_positions = torch.arange(q_len, device=q.device) + kv_len - q_len
    if spec.pos_encoding == "ROPE_LLAMA":
        q, k = rotate(q, q_positions, spec), rotate(k, positions, spec)
    q = q * per_head(q_scale, heads)
    k = k.repeat_interleave(group, 1) * per_head(k_scale, heads)
    v = v.repeat_interleave(group, 1) * per_head(v_scale, heads)

    logits = torch.einsum("ihd,jhd->hij", q, k) * spec.sm_scale
    if spec.pos_encoding == "ALIBI":
        distance = positions[None, :] - q_positions[:, None]
        logits = logits + spec.alibi_slopes().to(q)[:, None, None] * distance
    if spec.logits_soft_cap > 0:
        logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
    seen = spec.mask.visible(q_len, kv_len, q.device)
    if mask is not None:
        seen = seen & mask
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(heads, q_len, 1)
        lse = torch.logsumexp(torch.cat([logits, sink], -1), -1)
    else:
        lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    out = torch.einsum("hij,jhd->ihd", weights, v)
    return out, lse.T * LOG2E


def attend_batch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo: RaggedLayout,
    kv: PageTable,
    spec: AttentionSpec,
    *,
    mask: PackedMask | None = None,
    items: Items | None = None,
    **extras: Tensor | Scale | None,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch over pages, request by request.

    Args:
        q: [tokens, num_qo_heads, head_dim_qk]; request b has the rows qo.indptr[b] to qo.indptr[b + 1].
        k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim], any strides.
        mask: the packed custom masks of all requests.
        items: the items of all prompts.
        extras: sinks and scales, as in `attend`.

    Returns:
        out, float64 [tokens, num_qo_heads, head_dim_vo], and lse, float64 [tokens, num_qo_heads]; rows of no request
        are 0 and -inf.
    """
    out = q.new_zeros(len(q), spec.num_qo_heads, spec.head_dim_vo, dtype=torch.float64)
    lse = q.new_full((len(q), spec.num_qo_heads), -torch.inf, dtype=torch.float64)
    qo_indptr, kv_indptr = qo.indptr.tolist(), kv.indptr.tolist()
    lengths = kv.lengths().tolist()
    for b, length in enumerate(lengths):
        rows = slice(qo_indptr[b], qo_indptr[b + 1])
        pages = kv.indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        k, v = k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length]
        request_mask = None
        if mask is not None:
            q_len = rows.stop - rows.start
            bits = mask.bits[int(mask.indptr[b]) :]
            request_mask = unpack_bits(bits, q_len * length).view(q_len, length)
        if items is not None:
            allowed = items.mask(b, rows.stop - rows.start, length)
            request_mask = allowed if request_mask is None else request_mask & allowed
        out[rows], lse[rows] = attend(q[rows], k, v, spec, mask=request_mask, **extras)  # type: ignore[arg-type]
    return out, lse
