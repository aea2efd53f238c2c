"""One tile over its keys, `block_n` at a time, with an online softmax in base 2. A state is (acc, m, l): weighted
values, the largest logit and the sum of weights, the last two per row.

Sums of two products are written as `fma`: which of them is rounded would be the compiler's choice, another one in each
kernel, and a row's bits would depend on the kernel that it meets.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from quire.kernels.triton.rope import cos_sin

LOG2E = tl.constexpr(1.4426950408889634)


class Cache(NamedTuple):
    """Keys and values, with strides in elements. `pe`: the second part of keys where it is stored apart."""

    k: tl.tensor
    v: tl.tensor
    pe: tl.tensor
    indices: tl.tensor
    pages: tl.tensor
    k_page: tl.tensor
    k_token: tl.tensor
    k_head: tl.tensor
    v_page: tl.tensor
    v_token: tl.tensor
    v_head: tl.tensor
    pe_page: tl.tensor
    pe_token: tl.tensor


class Layer(NamedTuple):
    """What logits and sums meet; `scale` and `cap` in base 2. `pe_gain`: a factor of what the second parts of queries
    and keys multiply to. `turns`: see `quire.kernels.rope.rope_frequencies`.
    """

    scale: tl.tensor
    v_gain: tl.tensor
    pe_gain: tl.tensor
    cap: tl.tensor
    turns: tl.tensor
    sinks: tl.tensor
    slopes: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor
    v_scale: tl.tensor


class Masks(NamedTuple):
    """Packed masks, and the items of several-item prompts: see `quire.definition.masks`."""

    bits: tl.tensor
    indptr: tl.tensor
    size: tl.tensor
    prefix_lens: tl.tensor
    item_positions: tl.tensor
    items_len: tl.tensor


class Rows(NamedTuple):
    """A tile's rows: query token, head, position, whether they exist, factor of logits, ALiBi's slope, the position in
    their item; then the request's mask and prefix.
    """

    i: tl.tensor
    head: tl.tensor
    position: tl.tensor
    real: tl.tensor
    scale: tl.tensor
    slope: tl.tensor
    item: tl.tensor
    mask_begin: tl.tensor
    prefix: tl.tensor


@triton.jit
def widen(x, to: tl.constexpr, c: tl.constexpr):
    """Stored numbers as `to`. Bytes become halves by moving their bits (see quire.kernels.cpu.simd)."""
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
def turn(x, other, d, position, turns, c: tl.constexpr):
    """Elements d of heads, and those half a head away, turned by ROPE_LLAMA's angle at a position."""
    half: tl.constexpr = c.dim_qk // 2
    cos, sin = cos_sin(position.to(tl.int64) * tl.load(turns + d % half))
    return tl.fma(x, cos, tl.where(d < half, -other, other) * sin)


@triton.jit
def load_queries(start, d0, width: tl.constexpr, rows, turns, c: tl.constexpr):
    """Elements d0 to d0 + width of queries, [block_m, width]; their heads begin at `start`."""
    d = d0 + tl.arange(0, width)[None, :]
    inside = rows.real[:, None] & (d < c.dim_qk)
    x = tl.load(start[:, None] + d, inside, 0.0)
    if c.rope:
        half: tl.constexpr = c.dim_qk // 2
        other = tl.load(start[:, None] + tl.where(d < half, d + half, d - half), inside, 0.0)
        x = turn(x.to(tl.float32), other.to(tl.float32), d, rows.position[:, None], turns, c)
    return x


@triton.jit
def load_keys(start, d0, width: tl.constexpr, seen, j, turns, guarded: tl.constexpr, c: tl.constexpr):
    """Elements d0 to d0 + width of keys, [block_n, width]; their heads begin at `start`, `seen` are read."""
    d = d0 + tl.arange(0, width)[None, :]
    inside = seen[:, None] & (d < c.dim_qk)
    if guarded or d0 + width > c.dim_qk:
        x = tl.load(start[:, None] + d, inside, 0.0)
    else:
        x = tl.load(start[:, None] + d)
    if c.rope:
        half: tl.constexpr = c.dim_qk // 2
        other = tl.load(start[:, None] + tl.where(d < half, d + half, d - half), inside, 0.0)
        x = turn(widen(x, tl.float32, c), widen(other, tl.float32, c), d, j[:, None], turns, c)
        return x
    return widen(x, c.qk_type, c)


@triton.jit
def load_values(start, keys, seen, guarded: tl.constexpr, c: tl.constexpr):
    """Values, [block_n, dv], whose heads begin at `start`; those of a latent cache are its keys' first part."""
    dv = tl.arange(0, c.dv)[None, :]
    if c.latent and not c.reload:
        return keys.to(c.pv_type)
    if guarded or c.dv > c.dim_vo:
        x = tl.load(start[:, None] + dv, seen[:, None] & (dv < c.dim_vo), 0.0)
    else:
        x = tl.load(start[:, None] + dv)
    return widen(x, c.pv_type, c)


@triton.jit
def place(cache, request, j, c: tl.constexpr):
    """The page of key j (its row, if there are no pages), clamped, so that no table leads outside the cache."""
    if c.page_size > 0:
        page = tl.load(cache.indices + request.kv_begin + j // c.page_size, j < request.kv_len, 0)
    else:
        page = request.kv_begin + j
    page = tl.minimum(tl.maximum(page, 0), cache.pages - 1)
    return page.to(tl.int64) if c.far else page


@triton.jit
def shape(s, rows, j, cap, c: tl.constexpr):
    """Scaled logits in base 2, with ALiBi, then the soft cap."""
    s = s * rows.scale
    if c.alibi:
        s = tl.fma(rows.slope[:, None], (j[None, :] - rows.position[:, None]).to(tl.float32), s)
    if c.cap:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s * (2.0 * LOG2E / cap)))
    return s


@triton.jit
def visible(rows, request, j, window, masks, c: tl.constexpr):
    """Which keys j each row sees."""
    seen = (j < request.kv_len)[None, :] & rows.real[:, None]
    key, position = j[None, :], rows.position[:, None]
    if c.causal:
        seen &= key <= position
    if c.window:
        seen &= key >= position - window
    if c.items:
        seen &= (position < rows.prefix) | (key < rows.prefix) | (key > position - rows.item[:, None])
    if c.mask:
        bit = rows.i[:, None].to(tl.int64) * request.kv_len + key
        byte = tl.minimum(rows.mask_begin + (bit >> 3), masks.size - 1)
        seen &= ((tl.load(masks.bits + byte, seen, 0) >> (bit & 7).to(tl.uint8)) & 1) != 0
    return seen


@triton.jit
def nothing(c: tl.constexpr):
    """The state of no key."""
    m = tl.full([c.block_m], float("-inf"), tl.float32)
    l = tl.full([c.block_m], 0.0, tl.float32)
    return tl.full([c.block_m, c.dv], 0.0, tl.float32), m, l


@triton.jit
def fold(acc, m, l, acc_2, m_2, l_2):
    """The state of two runs of keys."""
    top = tl.maximum(m, m_2)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight, weight_2 = tl.exp2(m - base), tl.exp2(m_2 - base)
    acc = tl.fma(acc, weight[:, None], acc_2 * weight_2[:, None])
    return acc, top, tl.fma(l, weight, l_2 * weight_2)


@triton.jit
def walk(
    acc, m, l, q1, q2, rows, request, h, cache, layer, masks, window, begin, end, lowest, high,
    guarded: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Keys begin to end into the state of a tile's rows. Guarded: only keys lowest to high are read, and each row
    takes those that it sees; otherwise all rows see all of them.
    """
    gain = 1.0 if c.shaped else layer.scale  # what is left to multiply logits with
    if c.far:
        h = h.to(tl.int64)
    page = place(cache, request, begin + tl.arange(0, c.block_n), c)
    for t0 in range(begin, end, c.block_n):
        j = t0 + tl.arange(0, c.block_n)
        seen = (j < high) & (j >= lowest)
        within = j % c.page_size if c.page_size > 0 else j * 0
        if c.far:
            within = within.to(tl.int64)
        k_start = cache.k + page * cache.k_page + within * cache.k_token + h * cache.k_head
        v_start = cache.v + page * cache.v_page + within * cache.v_token + h * cache.v_head
        rest_start = k_start
        if c.latent:
            rest_start = cache.pe + page * cache.pe_page + within * cache.pe_token - c.d1
        # The next block's pages are asked for before this one's keys: no load waits for another in the same step.
        page = place(cache, request, j + c.block_n, c)
        k1 = load_keys(k_start, 0, c.d1, seen, j, layer.turns, guarded, c)
        # A latent key serves as key and as value, of which one is turned round. Triton lets loads run ahead of what
        # is computed if it likes the form of both products: this one for small tiles, the other for large ones, and
        # for bytes, which are widened between, only loads of their own for each (the second finds the cache's lines).
        if c.keys_first:
            s = tl.trans(tl.dot(k1, tl.trans(q1), input_precision=c.precision))
        else:
            s = tl.dot(q1, tl.trans(k1), input_precision=c.precision)
        if c.d2 > 0:
            k2 = load_keys(rest_start, c.d1, c.d2, seen, j, layer.turns, guarded, c)
            s = tl.dot(q2, tl.trans(k2), s, input_precision=c.precision)
        if c.shaped:
            s = shape(s, rows, j, layer.cap, c)
        if guarded:
            s = tl.where(visible(rows, request, j, window, masks, c), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * gain)
        base = tl.where(m_new == float("-inf"), 0.0, m_new) if guarded else m_new
        p = tl.exp2(s * gain - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        m = m_new
        value = load_values(v_start, k1, seen, guarded, c)
        acc = tl.dot(p.to(c.pv_type), value, acc * shrink[:, None], input_precision=c.precision)
    return acc, m, l
