"""One tile: loading its queries and rows, and the loop over its keys, `block_n` at a time."""

from __future__ import annotations

from collections import namedtuple

import triton
from triton import language as tl

from quire.kernels.triton.mask import load_row_mask, visible
from quire.kernels.triton.rope import cos_sin
from quire.kernels.triton.softmax import LOG2E, update_state

# Queries, with strides in elements. `pe`: their second part, where it is stored apart (latent layers).
Queries = namedtuple("Queries", "q pe stride_token stride_head stride_pe_token stride_pe_head")

# Keys and values, with strides in elements. `pe`: the keys' second part, where it is stored apart.
Cache = namedtuple(
    "Cache",
    "k v pe indices num_pages stride_k_page stride_k_token stride_k_head stride_v_page stride_v_token stride_v_head"
    " stride_pe_page stride_pe_token",
)

# A layer's numbers, and tensors per head. `sm_scale` and `soft_cap` are in base 2. `pe_scale`: a factor of the product
# of the second parts. `inv_freq`: see `quire.kernels.rope.rope_frequencies`.
LayerValues = namedtuple(
    "LayerValues", "sm_scale v_scale pe_scale soft_cap inv_freq sinks slopes q_scales k_scales v_scales"
)

# A tile's rows: their query token in the request, query head, position, whether they exist, factor of logits, ALiBi
# slope, and TileMask.
Rows = namedtuple("Rows", "i head position valid scale slope mask")


@triton.jit
def load_rows(tile, h, request, layer, mask, c: tl.constexpr):
    """The rows of a tile."""
    r = tile * c.block_m + tl.arange(0, c.block_m)
    valid = r < request.q_len * c.group
    i, head = r // c.group, h * c.group + r % c.group
    position = request.kv_len - request.q_len + i
    scale = tl.full([c.block_m, 1], 1.0, tl.float32) * layer.sm_scale
    if c.q_scales:
        scale *= tl.load(layer.q_scales + head, valid, 1.0)[:, None]
    if c.k_scales:
        scale *= tl.load(layer.k_scales + h)
    slope = position
    if c.alibi:
        slope = tl.load(layer.slopes + head, valid, 0.0)
    return Rows(i, head, position, valid, scale, slope, load_row_mask(mask, request, position, valid, c))


@triton.jit
def load_queries(queries, rows, request, layer, c: tl.constexpr):
    """Both blocks of a tile's queries, and its rows, whose scale takes over what queries were divided by."""
    token, head = (request.q_start + rows.i).to(tl.int64), rows.head.to(tl.int64)
    start = queries.q + token * queries.stride_token + head * queries.stride_head
    q1 = load_query_block(start, 0, c.block_d1, rows, layer.inv_freq, c)
    q2 = q1
    if c.latent:
        start = queries.pe + token * queries.stride_pe_token + head * queries.stride_pe_head - c.block_d1
    if c.block_d2 > 0:
        q2 = load_query_block(start, c.block_d1, c.block_d2, rows, layer.inv_freq, c)
    if c.latent:
        q2 = q2.to(tl.float32) * layer.pe_scale
    scale = rows.scale
    if c.normalize_q:
        top = tl.max(tl.abs(q1.to(tl.float32)), 1)
        if c.block_d2 > 0:
            top = tl.maximum(top, tl.max(tl.abs(q2.to(tl.float32)), 1))
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(top, 1e-30))))[:, None]
        q1, scale = q1 / power, scale * power
        if c.block_d2 > 0:
            q2 = q2 / power
    rows = Rows(rows.i, rows.head, rows.position, rows.valid, scale, rows.slope, rows.mask)
    return q1.to(c.qk_type), q2.to(c.qk_type), rows


@triton.jit
def widen(x, to: tl.constexpr, c: tl.constexpr):
    """Stored elements as `to`. Bytes become float16 by moving their bits (see quire.kernels.cpu.simd)."""
    if c.e4m3:
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    elif c.e5m2:
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    elif x.dtype.is_fp8():
        x = x.to(tl.float16)
    if x.dtype == tl.float16 and to == tl.bfloat16:
        x = x.to(tl.float32)
    return x.to(to)


@triton.jit
def rotate(x, other, d, position, inv_freq, c: tl.constexpr):
    """Elements d of heads at a position after ROPE_LLAMA; `other` are the elements half a head away."""
    half: tl.constexpr = c.head_dim_qk // 2
    cos, sin = cos_sin(position.to(tl.int64) * tl.load(inv_freq + d % half))
    return tl.fma(x, cos, tl.where(d < half, -other, other) * sin)


@triton.jit
def load_query_block(start, d0, width: tl.constexpr, rows, inv_freq, c: tl.constexpr):
    """Elements d0 to d0 + width of queries, [block_m, width]; their heads start at `start`."""
    d = d0 + tl.arange(0, width)[None, :]
    inside = rows.valid[:, None] & (d < c.head_dim_qk)
    x = tl.load(start[:, None] + d, inside, 0.0)
    if c.rope:
        half: tl.constexpr = c.head_dim_qk // 2
        other = tl.load(start[:, None] + tl.where(d < half, d + half, d - half), inside, 0.0)
        x = rotate(x.to(tl.float32), other.to(tl.float32), d, rows.position[:, None], inv_freq, c)
    return x


@triton.jit
def load_keys(start, d0, width: tl.constexpr, inside_range, j, inv_freq, masked: tl.constexpr, c: tl.constexpr):
    """Elements d0 to d0 + width of keys j, [block_n, width]; their heads start at `start`."""
    d = d0 + tl.arange(0, width)[None, :]
    inside = inside_range[:, None] & (d < c.head_dim_qk)
    if masked or d0 + width > c.head_dim_qk:
        x = tl.load(start[:, None] + d, inside, 0.0)
    else:
        x = tl.load(start[:, None] + d)
    if c.rope:
        half: tl.constexpr = c.head_dim_qk // 2
        other = tl.load(start[:, None] + tl.where(d < half, d + half, d - half), inside, 0.0)
        x = rotate(widen(x, tl.float32, c), widen(other, tl.float32, c), d, j[:, None], inv_freq, c)
        return x
    return widen(x, c.qk_type, c)


@triton.jit
def load_values(start, keys, inside_range, masked: tl.constexpr, c: tl.constexpr):
    """Values, [block_n, block_dv], whose heads start at `start`; of a latent cache, the first block of its keys."""
    dv = tl.arange(0, c.block_dv)[None, :]
    if c.latent and not c.reload_values:
        return keys.to(c.pv_type)
    if masked or c.block_dv > c.head_dim_vo:
        x = tl.load(start[:, None] + dv, inside_range[:, None] & (dv < c.head_dim_vo), 0.0)
    else:
        x = tl.load(start[:, None] + dv)
    return widen(x, c.pv_type, c)


@triton.jit
def load_page(cache, request, j, c: tl.constexpr):
    """The page of key j (its row, if there are no pages), clamped to the cache, whatever the table says."""
    if c.page_size > 0:
        page = tl.load(cache.indices + request.kv_start + j // c.page_size, j < request.kv_len, 0)
    else:
        page = request.kv_start + j
    page = tl.minimum(tl.maximum(page, 0), cache.num_pages - 1)
    return page.to(tl.int64) if c.int64_offsets else page


@triton.jit
def transform_logits(s, rows, j, soft_cap, c: tl.constexpr):
    """Scaled logits in base 2, with ALiBi, then the soft cap."""
    s = s * rows.scale
    if c.alibi:
        s = tl.fma(rows.slope[:, None], (j[None, :] - rows.position[:, None]).to(tl.float32), s)
    if c.soft_cap:
        s = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(s * (2.0 * LOG2E / soft_cap)))
    return s


@triton.jit
def attend_keys(
    acc, m, l, q1, q2, rows, request, h, cache, layer, mask, start, end, first, stop,
    masked: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Add keys start to end to the state of a tile's rows. Masked: only keys first to stop are read, and each row takes
    those that it sees. Otherwise all rows see all of these keys.
    """
    scale = 1.0 if c.transform_logits else layer.sm_scale
    if c.int64_offsets:
        h = h.to(tl.int64)
    page = load_page(cache, request, start + tl.arange(0, c.block_n), c)
    for j0 in range(start, end, c.block_n):
        j = j0 + tl.arange(0, c.block_n)
        inside = (j < stop) & (j >= first)
        slot = j % c.page_size if c.page_size > 0 else j * 0
        if c.int64_offsets:
            slot = slot.to(tl.int64)
        k_start = cache.k + page * cache.stride_k_page + slot * cache.stride_k_token + h * cache.stride_k_head
        v_start = cache.v + page * cache.stride_v_page + slot * cache.stride_v_token + h * cache.stride_v_head
        k2_start = k_start
        if c.latent:
            k2_start = cache.pe + page * cache.stride_pe_page + slot * cache.stride_pe_token - c.block_d1
        # The next block's pages are loaded before this block's keys, so that no load waits for another in one step.
        page = load_page(cache, request, j + c.block_n, c)
        k1 = load_keys(k_start, 0, c.block_d1, inside, j, layer.inv_freq, masked, c)
        # A latent key is an operand of both products, and transposed in one of them. Triton pipelines its loads only if
        # the first product is K Q' in small tiles, and Q K' in large ones. An fp8 key is widened between its load and
        # the products: Triton then pipelines it only if each product has a load of its own; the second hits the cache.
        if c.swap_qk:
            s = tl.trans(tl.dot(k1, tl.trans(q1), input_precision=c.precision))
        else:
            s = tl.dot(q1, tl.trans(k1), input_precision=c.precision)
        if c.block_d2 > 0:
            k2 = load_keys(k2_start, c.block_d1, c.block_d2, inside, j, layer.inv_freq, masked, c)
            s = tl.dot(q2, tl.trans(k2), s, input_precision=c.precision)
        if c.transform_logits:
            s = transform_logits(s, rows, j, layer.soft_cap, c)
        if masked:
            s = tl.where(visible(rows, request, j, mask, c), s, float("-inf"))
        p, alpha, m, l = update_state(m, l, s, scale, masked)
        value = load_values(v_start, k1, inside, masked, c)
        acc = tl.dot(p.to(c.pv_type), value, acc * alpha[:, None], input_precision=c.precision)
    return acc, m, l
