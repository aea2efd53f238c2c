"""Split-KV: partial states of tiles that are cut into several work tiles, and how they are combined.

Each consumer stores the state that it has in the slot of the work tile: of 64 query rows or, in MLA, of one half of
their columns. Of the consumers that have the same part of a tile, the last one to arrive merges the states of all work
tiles in the order of their keys, so that the result does not depend on which one was last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.softmax import SoftmaxState, empty_state, merge, merge_acc


@aggregate
class TilePartials:
    """Slots for partial states of 64 rows for each of `consumers`. acc: float32 [slots, consumers * 64, dim]; ml:
    float32 [slots, consumers * 64, 2], pairs (m, l); arrivals: int32 [slots, consumers], zeros before and after a
    launch, of which those of a tile's first slot count how many of its partial states are stored.
    """

    acc: gl.tensor | None
    ml: gl.tensor | None
    arrivals: gl.tensor
    consumers: gl.constexpr

    @gluon.jit
    def _addresses(self, slot, consumer: gl.constexpr, like):
        """Where the state of a consumer is in a slot: acc, which is like `like`, and m."""
        layout: gl.constexpr = like.type.layout
        dim: gl.constexpr = like.shape[1]
        r = slot.to(gl.int64) * (self.consumers * 64) + consumer * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        d = gl.arange(0, dim, gl.SliceLayout(0, layout))
        return self.acc + (r[:, None] * dim + d[None, :]), self.ml + r * 2

    @gluon.jit
    def combine(self, state, tile, consumer: gl.constexpr):
        """Store a consumer's state of a work tile, and merge the states of all work tiles of the tile if it is the last
        one to be stored. tile: the WorkTileSlot. Returns whether it was the last one, and the merged state if so.
        """
        acc, m, l = state.acc, state.m, state.l
        rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        flat: gl.constexpr = m.type.layout
        slot, splits = tile.load("slot"), tile.load("splits")
        at, ml = self._addresses(slot + tile.load("split"), consumer, acc)
        gl.store(at, acc)
        gl.store(ml, gl.convert_layout(m, rows))
        gl.store(ml + 1, gl.convert_layout(l, rows))
        # All warps have stored their rows.
        thread_barrier()
        arrivals = self.arrivals + slot * self.consumers + consumer
        last = gl.atomic_add(arrivals, 1) == splits - 1
        if last:
            gl.store(arrivals, 0)
            m, l = empty_state(64, flat)
            acc = gl.zeros_like(acc)
            for s in range(splits):
                at, ml = self._addresses(slot + s, consumer, acc)
                m_2, l_2 = gl.convert_layout(gl.load(ml), flat), gl.convert_layout(gl.load(ml + 1), flat)
                m, l, alpha, alpha_2 = merge(m, l, m_2, l_2)
                alpha = gl.convert_layout(alpha, rows)[:, None]
                acc = merge_acc(acc, gl.load(at), alpha, gl.convert_layout(alpha_2, rows)[:, None])
        return last, SoftmaxState(acc, m, l)
