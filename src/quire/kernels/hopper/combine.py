"""Split-KV: partial states of tiles whose keys are cut into several work units, and how they are combined.

Each consumer stores the state that it has in the slot of the unit: of 64 query rows or, in MLA, of one half of their
columns. The last one to arrive, of those that have the same part of a tile, merges the states of all units in the order
of their keys, so that the result does not depend on who was last.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.softmax import empty_state, merge, merge_acc
from quire.kernels.hopper.tile_scheduler import INDEX, SLOT, SPLITS, job_field


class Partials(NamedTuple):
    """Slots for partial states of 64 rows for each consumer. acc: float32 [slots, c.consumers * 64, c.dim]; ml: float32
    [slots, c.consumers * 64, 2], pairs (m, l); arrivals: int32 [slots, c.consumers], zeros before and after a launch,
    of which those of a tile's first slot count how many of its partial states are stored.
    """

    acc: tl.tensor
    ml: tl.tensor
    arrivals: tl.tensor


@gluon.jit
def _addresses(partials, slot, W: gl.constexpr, layout: gl.constexpr, c: gl.constexpr):
    """Where the state of consumer W is in a slot: acc, and m."""
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    r = slot.to(gl.int64) * (c.consumers * 64) + W * 64 + gl.arange(0, 64, flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    return partials.acc + (r[:, None] * c.dim + d[None, :]), partials.ml + r * 2


@gluon.jit
def combine(acc, m, l, partials, mailbox, i, W: gl.constexpr, c: gl.constexpr):
    """Store consumer W's state of the i-th job and, if it has been stored for all other units of the tile, merge them.
    Returns whether that was done, and the state.
    """
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = m.type.layout
    slot, splits = job_field(mailbox, i, SLOT), job_field(mailbox, i, SPLITS)
    at, ml = _addresses(partials, slot + job_field(mailbox, i, INDEX), W, layout, c)
    gl.store(at, acc)
    gl.store(ml, gl.convert_layout(m, gl.SliceLayout(1, layout)))
    gl.store(ml + 1, gl.convert_layout(l, gl.SliceLayout(1, layout)))
    gl.thread_barrier()  # all warps have stored their rows
    arrivals = partials.arrivals + slot * c.consumers + W
    last = gl.atomic_add(arrivals, 1) == splits - 1
    if last:
        gl.store(arrivals, 0)
        m, l = empty_state(64, flat)
        acc = gl.zeros_like(acc)
        for s in range(splits):
            at, ml = _addresses(partials, slot + s, W, layout, c)
            m_2, l_2 = gl.convert_layout(gl.load(ml), flat), gl.convert_layout(gl.load(ml + 1), flat)
            m, l, alpha, alpha_2 = merge(m, l, m_2, l_2)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None]
            acc = merge_acc(acc, gl.load(at), alpha, gl.convert_layout(alpha_2, gl.SliceLayout(1, layout))[:, None])
    return last, acc, m, l
