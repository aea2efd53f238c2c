"""Where rows go when they are finished."""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = tl.constexpr(1.4426950408889634)


class Results(NamedTuple):
    """Where rows go, [tokens, heads, head_dim], and their sums, and what joins them there."""

    out: tl.tensor
    lse: tl.tensor
    o_token: tl.tensor
    o_head: tl.tensor
    sinks: tl.tensor
    v_scale: tl.tensor
    v_gain: tl.tensor


@gluon.jit
def write(acc, m, l, results, q_begin, h, r0, rows, c: gl.constexpr):
    """Rows r0 and on of a tile to out and lse, sinks joined in; a row that saw nothing is 0 and -inf."""
    layout: gl.constexpr = acc.type.layout
    m, l = gl.convert_layout(m, gl.SliceLayout(1, layout)), gl.convert_layout(l, gl.SliceLayout(1, layout))
    r = r0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    real = r < rows
    token, head = q_begin + r // c.group, h * c.group + r % c.group
    if c.sinks:
        sink = gl.load(results.sinks + head, real, 0.0) * LOG2E
        top = gl.maximum(m, sink)
        shrink = gl.exp2(m - top)
        acc, l, m = acc * shrink[:, None], l * shrink + gl.exp2(sink - top), top
    acc = acc * (results.v_gain / gl.where(l == 0.0, 1.0, l))[:, None]
    if c.v_scale:
        acc = acc * gl.load(results.v_scale + head // (c.group // c.pair), real, 0.0)[:, None]
    at = token.to(gl.int64) * results.o_token + head.to(gl.int64) * results.o_head
    gl.store(results.out + at[:, None] + d[None, :], acc.to(results.out.dtype.element_ty), real[:, None])
    if c.lse:
        at = token * (c.heads * c.group) + head
        gl.store(results.lse + at, gl.where(l == 0.0, -float("inf"), m + gl.log2(l)), real)


@gluon.jit
def clear_padding(tables, results, c: gl.constexpr):
    """Zero the rows that belong to no request, spread over all programs."""
    q_end = gl.load(tables.qo_indptr + tables.batch, tables.batch > 0, 0)
    q_end = gl.minimum(gl.maximum(q_end, 0), tables.tokens)
    layout: gl.constexpr = gl.BlockedLayout([1, c.dim // 32], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))[None, :]
    row = gl.arange(0, 4, gl.SliceLayout(1, layout))
    heads: gl.constexpr = c.heads * c.group
    for i in range(q_end + gl.program_id(0), tables.tokens, gl.num_programs(0)):
        token = gl.to_tensor(i)
        for h0 in range(0, heads, 4):
            head = h0 + row
            at = token.to(gl.int64) * results.o_token + head.to(gl.int64) * results.o_head
            zero = gl.full([4, c.dim], 0.0, results.out.dtype.element_ty, layout)
            gl.store(results.out + at[:, None] + d, zero, (head < heads)[:, None])
            if c.lse:
                gl.store(results.lse + token * heads + head, -float("inf"), head < heads)
