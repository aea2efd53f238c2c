"""Attention over pages or ragged rows, one kernel for every kind of layer.

A tile is `block_m` rows of one KV head of one request; a row is a (query token, head): row r is token r // group and
head h * group + r % group. A tile walks over its keys, `block_n` at a time, with an online softmax in base 2.

How tiles meet programs (`quire.plan.schedule` states the rule, and is what a test compares with): all tiles of all
requests lie on a line, request by request, tile by tile, head by head. With `split`, a tile is as long as its request
has blocks of keys and each program takes an equal share of the line; a program that holds only a part of a tile leaves
its state in one of its two slots, and `merge` puts the parts together in the order of their keys. Without, a program
takes one tile, the last ones first, since those see most. Programs find their tiles themselves, from the tables: what
runs later reads tables that have changed since.
"""

from __future__ import annotations

import triton
from triton import language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def bounds(indptr, b, total, inside):
    """First and end of request b (a number or a vector), inside [0, total] whatever the table says."""
    begin = tl.minimum(tl.maximum(tl.load(indptr + b, inside, 0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(indptr + b + 1, inside, 0), begin), total)
    return begin, end


@triton.jit
def extent(qo_indptr, kv_indptr, last_page_len, b, tokens, entries, inside, c: tl.constexpr):
    """Request b: first query token, number of them, first entry of its keys, number of keys."""
    q_begin, q_end = bounds(qo_indptr, b, tokens, inside)
    kv_begin, kv_end = bounds(kv_indptr, b, entries, inside)
    kv_len = kv_end - kv_begin
    if c.page_size > 0:
        last = tl.minimum(tl.maximum(tl.load(last_page_len + b, inside, 0), 0), c.page_size)
        kv_len = tl.where(kv_len > 0, (kv_len - 1) * c.page_size + last, 0)
    return q_begin, q_end - q_begin, kv_begin, kv_len


@triton.jit
def first_block(q_len, kv_len, window, i, c: tl.constexpr):
    """The block with the first key that query i, or a later one, sees."""
    block = kv_len * 0
    if c.window:
        block = tl.maximum(kv_len - q_len + i - window, 0) // c.block_n
    return block


@triton.jit
def cost_of(q_len, kv_len, window, c: tl.constexpr):
    """Tiles of a request per head, and the length of each on the line."""
    tiles = (q_len * c.group + c.block_m - 1) // c.block_m
    cost = tiles * 0 + 1
    if c.split:
        blocks = (kv_len + c.block_n - 1) // c.block_n - first_block(q_len, kv_len, window, 0, c)
        cost = tl.maximum(blocks, 1)
    return tiles, cost


@triton.jit
def line(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries, window, unit, c: tl.constexpr):
    """The line's length, the request that owns a unit of it, and where that request starts."""
    total = unit * 0
    owner = unit * 0
    start = unit * 0
    for b0 in range(0, batch, c.scan):
        b = b0 + tl.arange(0, c.scan)
        _q, q_len, _k, kv_len = extent(qo_indptr, kv_indptr, last_page_len, b, tokens, entries, b < batch, c)
        tiles, cost = cost_of(q_len, kv_len, window, c)
        ends = total + tl.cumsum(tiles * cost * c.heads)
        before = (ends <= unit) & (b < batch)
        owner += tl.sum(before.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(before, ends, 0)))
        total = tl.max(ends)
    return total, owner, start


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
    """Elements d of heads, and those half a head away, turned by ROPE_LLAMA's angle at a position. Whole turns are
    dropped in float64, or an angle would lose a digit for each digit of the position.
    """
    half: tl.constexpr = c.dim_qk // 2
    turned = position.to(tl.float64) * tl.load(turns + d % half)
    angle = (turned - tl.floor(turned)).to(tl.float32) * TWO_PI
    return x * tl.cos(angle) + tl.where(d < half, -1.0, 1.0) * other * tl.sin(angle)


@triton.jit
def load_queries(start, d0, width: tl.constexpr, rows, position, turns, c: tl.constexpr):
    """Elements d0 to d0 + width of queries, [block_m, width]; their heads begin at `start`, `rows` are real."""
    d = d0 + tl.arange(0, width)[None, :]
    inside = rows[:, None] & (d < c.dim_qk)
    x = tl.load(start[:, None] + d, inside, 0.0)
    if c.rope:
        half: tl.constexpr = c.dim_qk // 2
        other = tl.load(start[:, None] + tl.where(d < half, d + half, d - half), inside, 0.0)
        x = turn(x.to(tl.float32), other.to(tl.float32), d, position[:, None], turns, c)
    return x


@triton.jit
def load_keys(start, d0, width: tl.constexpr, seen, j, turns, guarded: tl.constexpr, c: tl.constexpr):
    """Elements d0 to d0 + width of keys, [width, block_n]; their heads begin at `start`, `seen` are read."""
    d = d0 + tl.arange(0, width)[:, None]
    inside = seen[None, :] & (d < c.dim_qk)
    if guarded or d0 + width > c.dim_qk:
        x = tl.load(start[None, :] + d, inside, 0.0)
    else:
        x = tl.load(start[None, :] + d)
    if c.rope:
        half: tl.constexpr = c.dim_qk // 2
        other = tl.load(start[None, :] + tl.where(d < half, d + half, d - half), inside, 0.0)
        x = turn(widen(x, tl.float32, c), widen(other, tl.float32, c), d, j[None, :], turns, c)
        return x
    return widen(x, c.qk_type, c)


@triton.jit
def place(kv_indices, kv_begin, j, kv_len, num_pages, c: tl.constexpr):
    """The page of key j (its row, if there are no pages), clamped, so that no table leads outside the cache."""
    if c.page_size > 0:
        page = tl.load(kv_indices + kv_begin + j // c.page_size, j < kv_len, 0)
    else:
        page = kv_begin + j
    return tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)


@triton.jit
def shape(s, scale, position, j, slope, cap, c: tl.constexpr):
    """Scaled logits in base 2, with ALiBi, then the soft cap."""
    s = s * scale
    if c.alibi:
        s += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
    if c.cap:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s * (2.0 * LOG2E / cap)))
    return s


@triton.jit
def visible(i, position, rows, j, q_len, kv_len, window, mask_bits, mask_begin, mask_size, c: tl.constexpr):
    """Which keys j each row sees."""
    seen = (j < kv_len)[None, :] & rows[:, None]
    if c.causal:
        seen &= j[None, :] <= position[:, None]
    if c.window:
        seen &= j[None, :] >= position[:, None] - window
    if c.mask:
        bit = i[:, None].to(tl.int64) * kv_len + j[None, :]
        byte = tl.minimum(mask_begin + (bit >> 3), mask_size - 1)
        seen &= ((tl.load(mask_bits + byte, seen, 0) >> (bit & 7).to(tl.uint8)) & 1) != 0
    return seen


@triton.jit
def walk(
    acc, m, l, q1, q2, k, v, kv_indices, k_page, k_token, k_head, v_page, v_token, v_head, num_pages,
    begin, end, lowest, high, i, position, rows, h, q_len, kv_begin, kv_len, row_scale, gain, slope, cap,
    window, mask_bits, mask_begin, mask_size, turns, guarded: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Keys begin to end into the state of a tile's rows. Guarded: only keys lowest to high are read, and each row
    takes those that it sees; otherwise all rows see all of them.
    """
    dv = tl.arange(0, c.dv)[None, :]
    page = place(kv_indices, kv_begin, begin + tl.arange(0, c.block_n), kv_len, num_pages, c)
    for t0 in range(begin, end, c.block_n):
        j = t0 + tl.arange(0, c.block_n)
        seen = (j < high) & (j >= lowest)
        within = j % c.page_size if c.page_size > 0 else j * 0
        k_start = k + page * k_page + within * k_token + h * k_head
        v_start = v + page * v_page + within * v_token + h * v_head
        # The next block's pages are asked for before this one's keys: no load waits for another in the same step.
        page = place(kv_indices, kv_begin, j + c.block_n, kv_len, num_pages, c)
        k1 = load_keys(k_start, 0, c.d1, seen, j, turns, guarded, c)
        s = tl.dot(q1, k1, input_precision=c.precision)
        if c.d2 > 0:
            k2 = load_keys(k_start, c.d1, c.d2, seen, j, turns, guarded, c)
            s = tl.dot(q2, k2, s, input_precision=c.precision)
        if c.shaped:
            s = shape(s, row_scale, position, j, slope, cap, c)
        if guarded:
            see = visible(i, position, rows, j, q_len, kv_len, window, mask_bits, mask_begin, mask_size, c)
            s = tl.where(see, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * gain)
        base = tl.where(m_new == float("-inf"), 0.0, m_new) if guarded else m_new
        p = tl.exp2(s * gain - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        m = m_new
        if guarded or c.dv > c.dim_vo:
            value = tl.load(v_start[:, None] + dv, seen[:, None] & (dv < c.dim_vo), 0.0)
        else:
            value = tl.load(v_start[:, None] + dv)
        acc = tl.dot(p.to(c.pv_type), widen(value, c.pv_type, c), acc * shrink[:, None], input_precision=c.precision)
    return acc, m, l


@triton.jit
def attend_piece(
    q, k, v, out, lse, part, part_ml,
    kv_indices, mask_bits, mask_indptr, mask_size, sinks, slopes, q_scale, k_scale, v_scale,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    num_pages, scale, v_gain, cap, window, turns,
    b, q_begin, q_len, kv_begin, kv_len, tile, h, first, last, cost, slot,
    c: tl.constexpr,
):  # fmt: skip
    """Blocks first to last (of `cost`) of one tile, to its rows of out and lse, or to a slot if that is not all."""
    r = tile * c.block_m + tl.arange(0, c.block_m)
    rows = r < q_len * c.group
    i, head = r // c.group, h * c.group + r % c.group
    past = kv_len - q_len
    position = past + i
    i_first, i_last = tile * c.block_m // c.group, tl.minimum((tile * c.block_m + c.block_m - 1) // c.group, q_len - 1)

    start = q + (q_begin + i).to(tl.int64) * q_token + head * q_head
    q1 = load_queries(start, 0, c.d1, rows, position, turns, c)
    q2 = q1
    if c.d2 > 0:
        q2 = load_queries(start, c.d1, c.d2, rows, position, turns, c)
    row_scale = tl.full([c.block_m, 1], 1.0, tl.float32) * scale
    if c.normed:
        top = tl.max(tl.abs(q1.to(tl.float32)), 1)
        if c.d2 > 0:
            top = tl.maximum(top, tl.max(tl.abs(q2.to(tl.float32)), 1))
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(top, 1e-30))))[:, None]
        q1, row_scale = q1 / power, row_scale * power
        if c.d2 > 0:
            q2 = q2 / power
    q1, q2 = q1.to(c.qk_type), q2.to(c.qk_type)
    if c.q_scale:
        row_scale *= tl.load(q_scale + head, rows, 1.0)[:, None]
    if c.k_scale:
        row_scale *= tl.load(k_scale + h)
    slope = row_scale
    if c.alibi:
        slope = tl.load(slopes + head, rows, 0.0)
    mask_begin = 0
    if c.mask:
        mask_begin = tl.maximum(tl.load(mask_indptr + b), 0)
    gain = scale  # what is left to multiply logits with
    if c.shaped:
        gain = 1.0

    # Keys low to high are those that some row sees, those before `clear` are seen by all.
    low = first_block(q_len, kv_len, window, 0, c) * c.block_n
    begin = tl.maximum(low + first * c.block_n, first_block(q_len, kv_len, window, i_first, c) * c.block_n)
    high, clear, lowest = kv_len, kv_len, 0
    if c.window:
        lowest = tl.maximum(past + i_first - window, 0)
    if c.causal:
        high = tl.minimum(kv_len, past + i_last + 1)
        clear = tl.maximum(tl.minimum(kv_len, past + i_first + 1), 0)
    if c.split:
        high = tl.minimum(high, low + last * c.block_n)
    clear = tl.minimum(clear // c.block_n * c.block_n, high // c.block_n * c.block_n)

    dv = tl.arange(0, c.dv)[None, :]
    m = tl.full([c.block_m], float("-inf"), tl.float32)
    l = tl.full([c.block_m], 0.0, tl.float32)
    acc = tl.full([c.block_m, c.dv], 0.0, tl.float32)
    if not (c.window or c.mask):
        acc, m, l = walk(
            acc, m, l, q1, q2, k, v, kv_indices, k_page, k_token, k_head, v_page, v_token, v_head, num_pages,
            begin, clear, lowest, high, i, position, rows, h, q_len, kv_begin, kv_len, row_scale, gain, slope, cap,
            window, mask_bits, mask_begin, mask_size, turns, False, c,
        )  # fmt: skip
        begin = tl.maximum(begin, clear)
    acc, m, l = walk(
        acc, m, l, q1, q2, k, v, kv_indices, k_page, k_token, k_head, v_page, v_token, v_head, num_pages,
        begin, high, lowest, high, i, position, rows, h, q_len, kv_begin, kv_len, row_scale, gain, slope, cap,
        window, mask_bits, mask_begin, mask_size, turns, True, c,
    )  # fmt: skip

    wide = rows[:, None] & (dv < c.dim_vo)
    if c.split and last - first < cost:
        at = slot.to(tl.int64) * c.block_m + tl.arange(0, c.block_m)
        tl.store(part + at[:, None] * c.dim_vo + dv, acc, wide)
        tl.store(part_ml + at * 2, m, rows)
        tl.store(part_ml + at * 2 + 1, l, rows)
    else:
        finish(acc, m, l, out, lse, sinks, v_scale, v_gain, q_begin + i, head, h, rows, wide, dv, o_token, o_head, c)


@triton.jit
def finish(
    acc, m, l, out, lse, sinks, v_scale, v_gain, token, head, h, rows, wide, dv, o_token, o_head, c: tl.constexpr
):
    """Rows' states to out and lse, sinks joined in; a row that saw nothing is 0 and -inf."""
    if c.sinks:
        sink = tl.load(sinks + head, rows, 0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        acc, l, m = acc * shrink[:, None], l * shrink + tl.exp2(sink - top), top
    acc = acc * (v_gain / tl.where(l == 0.0, 1.0, l))[:, None]
    if c.v_scale:
        acc *= tl.load(v_scale + h)
    tl.store(out + token[:, None].to(tl.int64) * o_token + head[:, None] * o_head + dv, acc, wide)
    if c.lse:
        tl.store(lse + token * (c.heads * c.group) + head, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), rows)


@triton.jit
def clear_padding(out, lse, q_end, tokens, o_token, o_head, c: tl.constexpr):
    """Zero the rows that belong to no request, spread over all programs."""
    dv = tl.arange(0, c.dv)[None, :]
    head = tl.arange(0, c.pad_heads)
    rows = head < c.heads * c.group
    for token in range(q_end + tl.program_id(0), tokens, tl.num_programs(0)):
        zero = tl.full([c.pad_heads, c.dv], 0.0, tl.float32)
        at = tl.full([1], 1, tl.int64) * token * o_token
        tl.store(out + at[:, None] + head[:, None] * o_head + dv, zero, rows[:, None] & (dv < c.dim_vo))
        if c.lse:
            tl.store(lse + token * (c.heads * c.group) + head, float("-inf"), rows)


@triton.jit(do_not_specialize=["mask_size", "batch", "tokens", "entries", "num_pages", "window"])
def attend(
    q, k, v, out, lse, part, part_ml, qo_indptr, kv_indptr, last_page_len,
    kv_indices, mask_bits, mask_indptr, mask_size, sinks, slopes, q_scale, k_scale, v_scale,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    batch, tokens, entries, num_pages, scale, v_gain, cap, window, turns,
    c: tl.constexpr,
):  # fmt: skip
    """Attention of a batch.

    q, k, v, out: as in `quire.kernels.registry.Call`; lse: float32 [tokens, heads]. part: float32 [2 * programs,
    block_m, dim_vo], part_ml: float32 [2 * programs, block_m, 2], with `split`. Strides count elements. scale and cap
    are in base 2; turns: float64 [dim_qk / 2], how often an element of a head turns per position.
    """
    program = tl.program_id(0)
    _begin, q_end = bounds(qo_indptr, batch - 1, tokens, batch > 0)
    clear_padding(out, lse, q_end, tokens, o_token, o_head, c)
    total, _b, _s = line(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries, window, 0, c)
    share = 1
    unit = total - 1 - program
    if c.split:
        share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
        unit = program * share
    end = tl.minimum(unit + share, total)
    _t, b, start = line(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries, window, tl.maximum(unit, 0), c)
    while (unit < end) & (unit >= 0):
        q_begin, q_len, kv_begin, kv_len = extent(qo_indptr, kv_indptr, last_page_len, b, tokens, entries, b < batch, c)
        tiles, cost = cost_of(q_len, kv_len, window, c)
        if unit < start + tiles * cost * c.heads:
            row = (unit - start) // cost
            first = unit - start - row * cost
            last = tl.minimum(first + end - unit, cost)
            slot = 2 * program + (first == 0).to(tl.int32)
            attend_piece(
                q, k, v, out, lse, part, part_ml,
                kv_indices, mask_bits, mask_indptr, mask_size, sinks, slopes, q_scale, k_scale, v_scale,
                q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
                num_pages, scale, v_gain, cap, window, turns,
                b, q_begin, q_len, kv_begin, kv_len, row // c.heads, row % c.heads, first, last, cost, slot,
                c,
            )  # fmt: skip
            unit += last - first
        else:
            start += tiles * cost * c.heads
            b += 1


@triton.jit(do_not_specialize=["batch", "tokens", "entries", "window", "programs"])
def merge(
    out, lse, part, part_ml, qo_indptr, kv_indptr, last_page_len, sinks, v_scale, o_token, o_head,
    batch, tokens, entries, window, v_gain, programs,
    c: tl.constexpr,
):  # fmt: skip
    """Put together the tile whose last part program `program_id(0)` holds, if it began before; row `program_id(1)`."""
    program, r = tl.program_id(0), tl.program_id(1)
    total, _b, _s = line(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries, window, 0, c)
    share = (total + programs - 1) // programs
    unit = program * share
    _t, b, start = line(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries, window, unit, c)
    q_begin, q_len, _k, kv_len = extent(qo_indptr, kv_indptr, last_page_len, b, tokens, entries, b < batch, c)
    _tiles, cost = cost_of(q_len, kv_len, window, c)
    row = (unit - start) // cost
    begin = start + row * cost
    tile, h = row // c.heads, row % c.heads
    real = tile * c.block_m + r < q_len * c.group
    if (unit < total) & (begin < unit) & (begin + cost <= unit + share) & real:
        origin = begin // share
        n = tl.arange(0, 16)
        dv = tl.arange(0, c.dv)[None, :]
        m = tl.full([1], float("-inf"), tl.float32)
        l = tl.full([1], 0.0, tl.float32)
        acc = tl.full([1, c.dv], 0.0, tl.float32)
        for p0 in range(origin, program + 1, 16):
            there = p0 + n <= program
            slot = 2 * (p0 + n) + (p0 + n == origin).to(tl.int32)
            at = slot.to(tl.int64) * c.block_m + r
            m_part = tl.load(part_ml + at * 2, there, float("-inf"))
            l_part = tl.load(part_ml + at * 2 + 1, there, 0.0)
            x = tl.load(part + at[:, None] * c.dim_vo + dv, there[:, None] & (dv < c.dim_vo), 0.0)
            m_new = tl.maximum(m, tl.max(m_part, 0))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.exp2(m_part - base)
            shrink = tl.exp2(m - base)
            acc = acc * shrink[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
            l = l * shrink + tl.sum(l_part * weight, 0)
            m = m_new
        token = tl.full([1], 1, tl.int32) * (q_begin + (tile * c.block_m + r) // c.group)
        head = tl.full([1], 1, tl.int32) * (h * c.group + (tile * c.block_m + r) % c.group)
        rows = head >= 0
        finish(acc, m, l, out, lse, sinks, v_scale, v_gain, token, head, h, rows, dv < c.dim_vo, dv, o_token, o_head, c)
