"""The epilogue: finished rows go to `out` and `lse`, and rows that belong to no request become zeros."""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.softmax import add_sinks


class Output(NamedTuple):
    """out: [tokens, heads, head_dim] with strides in elements; lse: float32 [tokens, heads]; sinks: a logit per query
    head; v_scale: a factor per KV head; v_gain: a factor of all.
    """

    out: tl.tensor
    lse: tl.tensor
    o_token: tl.tensor
    o_head: tl.tensor
    sinks: tl.tensor
    v_scale: tl.tensor
    v_gain: tl.tensor


@gluon.constexpr_function
def _wide_layout(rows, dim):
    """The layout of [rows, dim], 64 rows or more, in which each thread of a warp group has 16 neighbouring bytes of
    16-bit elements, of rows that it also has in the layout of a product.
    """
    columns = [[0, 32 << i] for i in range((dim // 32).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *columns, [8, 0]], lanes, [[16, 0], [32, 0]], [], [rows, dim]
    )


@gluon.jit
def store_rows(acc, m, l, output, q_start, h, row, row_end, c: gl.constexpr, wide: gl.constexpr = False):
    """Normalize and store a state whose first row is `row`, up to row_end; a row that saw no key is 0 and -inf. wide:
    acc has the layout of a product, and the threads of a warp exchange elements, so that each stores 16 bytes at once.
    """
    layout: gl.constexpr = acc.type.layout
    m, l = gl.convert_layout(m, gl.SliceLayout(1, layout)), gl.convert_layout(l, gl.SliceLayout(1, layout))
    r = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    head, valid = h * c.group + r % c.group, r < row_end
    if c.sinks:
        acc, m, l = add_sinks(acc, m, l, gl.load(output.sinks + head, valid, 0.0))
    acc = acc * (output.v_gain / gl.where(l == 0.0, 1.0, l))[:, None]
    if c.v_scale:
        acc = acc * gl.load(output.v_scale + head // (c.group // c.packed_heads), valid, 0.0)[:, None]
    if c.lse:
        at = (q_start + r // c.group) * (c.heads * c.group) + head
        gl.store(output.lse + at, gl.where(l == 0.0, -float("inf"), m + gl.log2(l)), valid)
    x = acc.to(output.out.dtype.element_ty)
    if wide:
        x = gl.convert_layout(x, _wide_layout(acc.shape[0], c.dim))
    r = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, x.type.layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, x.type.layout))
    token, head = q_start + r // c.group, h * c.group + r % c.group
    at = token.to(gl.int64) * output.o_token + head.to(gl.int64) * output.o_head
    gl.store(output.out + at[:, None] + d[None, :], x, (r < row_end)[:, None])


@gluon.jit
def clear_padding(tables, output, c: gl.constexpr):
    """Zero the rows after the last request's, spread over all programs."""
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
            at = token.to(gl.int64) * output.o_token + head.to(gl.int64) * output.o_head
            zero = gl.full([4, c.dim], 0.0, output.out.dtype.element_ty, layout)
            gl.store(output.out + at[:, None] + d, zero, (head < heads)[:, None])
            if c.lse:
                gl.store(output.lse + token * heads + head, -float("inf"), head < heads)
