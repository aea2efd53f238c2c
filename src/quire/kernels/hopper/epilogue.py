"""The epilogue: finished rows go to `out` and `lse`, and rows that belong to no request become zeros."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.softmax import add_sinks


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """What the epilogue is compiled for.

    Attributes:
        tile: the tiles, which also say how many heads there are.
        dim: elements of an output row that one consumer has.
        sinks: whether each query head has one more logit.
        lse: whether the LSE is written, too.
        v_scale: whether each KV head has a factor of its own.
    """

    tile: TileConfig
    dim: int
    sinks: bool
    lse: bool
    v_scale: bool


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


@aggregate
class Output:
    """out: [tokens, heads, head_dim] with strides in elements; lse: float32 [tokens, heads]; sinks: a logit per query
    head; v_scale: a factor per KV head; v_gain: a factor of all heads; config: an OutputConfig.
    """

    out: gl.tensor
    lse: gl.tensor | None
    o_token: gl.tensor
    o_head: gl.tensor
    sinks: gl.tensor | None
    v_scale: gl.tensor | None
    v_gain: gl.tensor
    config: gl.constexpr

    @gluon.jit
    def store_rows(self, state, q_start, h, row, row_end, wide: gl.constexpr = False):
        """Normalize and store a state whose first row is `row`, up to row_end; a row that saw no key is 0 and -inf.
        wide: acc has the layout of a product, and the threads of a warp exchange elements, so that each stores 16 bytes
        at once.
        """
        tile: gl.constexpr = self.config.tile
        acc = state.acc
        layout: gl.constexpr = acc.type.layout
        flat: gl.constexpr = gl.SliceLayout(1, layout)
        m, l = gl.convert_layout(state.m, flat), gl.convert_layout(state.l, flat)
        r = row + gl.arange(0, acc.shape[0], flat)
        head, valid = h * tile.group + r % tile.group, r < row_end
        if self.config.sinks:
            acc, m, l = add_sinks(acc, m, l, gl.load(self.sinks + head, valid, 0.0))
        acc = acc * (self.v_gain / gl.where(l == 0.0, 1.0, l))[:, None]
        if self.config.v_scale:
            acc = acc * gl.load(self.v_scale + head // (tile.group // tile.packed_heads), valid, 0.0)[:, None]
        if self.config.lse:
            at = (q_start + r // tile.group) * (tile.heads * tile.group) + head
            gl.store(self.lse + at, gl.where(l == 0.0, -float("inf"), m + gl.log2(l)), valid)
        x = acc.to(self.out.dtype.element_ty)
        if wide:
            x = gl.convert_layout(x, _wide_layout(acc.shape[0], self.config.dim))
        r = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, x.type.layout))
        d = gl.arange(0, self.config.dim, gl.SliceLayout(0, x.type.layout))
        token, head = q_start + r // tile.group, h * tile.group + r % tile.group
        at = token.to(gl.int64) * self.o_token + head.to(gl.int64) * self.o_head
        gl.store(self.out + at[:, None] + d[None, :], x, (r < row_end)[:, None])

    @gluon.jit
    def clear_padding(self, tables):
        """Zero the rows after the last request's, spread over all programs."""
        dim: gl.constexpr = self.config.dim
        heads: gl.constexpr = self.config.tile.heads * self.config.tile.group
        q_end = gl.load(tables.qo_indptr + tables.batch, tables.batch > 0, 0)
        q_end = gl.minimum(gl.maximum(q_end, 0), tables.tokens)
        layout: gl.constexpr = gl.BlockedLayout([1, dim // 32], [1, 32], [4, 1], [1, 0])
        d = gl.arange(0, dim, gl.SliceLayout(0, layout))[None, :]
        row = gl.arange(0, 4, gl.SliceLayout(1, layout))
        for i in range(q_end + gl.program_id(0), tables.tokens, gl.num_programs(0)):
            token = gl.to_tensor(i)
            for h0 in range(0, heads, 4):
                head = h0 + row
                at = token.to(gl.int64) * self.o_token + head.to(gl.int64) * self.o_head
                zero = gl.full([4, dim], 0.0, self.out.dtype.element_ty, layout)
                gl.store(self.out + at[:, None] + d, zero, (head < heads)[:, None])
                if self.config.lse:
                    gl.store(self.lse + token * heads + head, -float("inf"), head < heads)
