"""Split-KV: partial states of tiles whose keys several programs have, and how they are combined.

Each program stores its state and counts it as arrived. The last program to arrive of FAN_IN neighbours merges their
partial states, and the last one to do so merges the results and writes the rows. Slots are merged in a fixed order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.softmax import SoftmaxState, empty_state, exponent_base

# Partial states that one program merges.
FAN_IN = gl.constexpr(8)
# Rows of partial states that are merged at a time.
MERGE_ROWS = gl.constexpr(8)


@aggregate
class SpanPartials:
    """Slots for partial states. acc: float32 [slots, rows, dim]; ml: pairs (m, l), [slots, rows, 2]; arrivals: counters
    for groups of neighbours, and for tiles; programs: those that compute the same rows. Slots and rows beyond the
    memory are not written, whatever the tables say.
    """

    acc: gl.tensor
    ml: gl.tensor
    slots: gl.tensor
    rows: gl.tensor
    arrivals: gl.tensor
    programs: gl.tensor
    dim: gl.constexpr

    @gluon.jit
    def store(self, state, slot, row, row_end):
        """Store a state whose first row is `row`, up to row_end, to a slot."""
        layout: gl.constexpr = state.acc.type.layout
        flat: gl.constexpr = gl.SliceLayout(1, layout)
        row_end = gl.where(slot < self.slots, gl.minimum(row_end, self.rows), 0)
        r = row + gl.arange(0, state.acc.shape[0], flat)
        d = gl.arange(0, self.dim, gl.SliceLayout(0, layout))
        at = slot.to(gl.int64) * self.rows + r
        gl.store(self.acc + at[:, None] * self.dim + d[None, :], state.acc, (r < row_end)[:, None])
        gl.store(self.ml + at * 2, gl.convert_layout(state.m, flat), r < row_end)
        gl.store(self.ml + at * 2 + 1, gl.convert_layout(state.l, flat), r < row_end)

    @gluon.jit
    def _merge_slots(self, row, row_end, owner, first, last, step):
        """Merge rows from `row` up to row_end of a tile's partial states, those of every `step`-th program from `first`
        to `last`. The tile starts in program `owner`. As many states are loaded at a time as registers hold, so
        that the loads overlap; each warp has rows of its own.
        """
        R: gl.constexpr = MERGE_ROWS
        N: gl.constexpr = 64 * 128 // (R * self.dim)
        width: gl.constexpr = self.dim // 32
        cube: gl.constexpr = gl.BlockedLayout([1, 1, width], [1, 1, 32], [1, 4, 1], [2, 1, 0])
        plane: gl.constexpr = gl.BlockedLayout([1, width], [1, 32], [4, 1], [1, 0])
        flat: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cube))
        n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None]
        d = gl.arange(0, self.dim, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
        r = row + gl.arange(0, R, flat)
        m, l = empty_state(R, flat)
        acc = gl.full([R, self.dim], 0.0, gl.float32, gl.SliceLayout(0, cube))
        for p in range(first, last + 1, N * step):
            program = p + n * step
            slot = gl.where(program == owner, 2 * program + 1, 2 * program)
            at = slot.to(gl.int64) * self.rows + r[None, :]
            valid = (program <= last) & (slot < self.slots) & (r < row_end)[None, :]
            m_n = gl.load(self.ml + at * 2, valid, -float("inf"))
            l_n = gl.load(self.ml + at * 2 + 1, valid, 0.0)
            acc_n = gl.load(self.acc + at[:, :, None] * self.dim + d[None, None, :], valid[:, :, None], 0.0)
            top = gl.maximum(m, gl.max(m_n, 0))
            base = exponent_base(top)
            alpha_n, alpha = gl.exp2(m_n - base[None, :]), gl.exp2(m - base)
            m, l = top, l * alpha + gl.sum(l_n * alpha_n, 0)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(0, cube)))
            acc = acc * alpha[:, None] + gl.sum(acc_n * alpha_n[:, :, None], 0)
        return SoftmaxState(gl.convert_layout(acc, plane), m, l)

    @gluon.jit
    def combine(self, output, request, tile, program, owner, last):
        """Count this program's partial state of a tile of programs owner to last as arrived, and merge what is
        complete: in two levels, since one program that merges all would take longer than the programs take to attend.
        """
        first = program - (program - owner) % FAN_IN
        group_last = gl.minimum(first + FAN_IN - 1, last)
        slot = 2 * first + (first == owner).to(gl.int32)
        group_arrivals = self.arrivals + self.programs + slot
        tile_arrivals = self.arrivals + owner
        rows = gl.minimum(tile.count, self.rows)
        # All warps have stored their rows.
        thread_barrier()
        if gl.atomic_add(group_arrivals, 1) == group_last - first:
            gl.store(group_arrivals, 0)
            step, complete = 1, last - owner < FAN_IN
            if last - owner >= FAN_IN:
                for row in range(0, rows, MERGE_ROWS):
                    state = self._merge_slots(row, rows, owner, first, group_last, 1)
                    self.store(state, slot, row, rows)
                thread_barrier()
                step, complete = FAN_IN, gl.atomic_add(tile_arrivals, 1) == (last - owner) // FAN_IN
                gl.store(tile_arrivals, 0, complete)
            if complete:
                for row in range(0, rows, MERGE_ROWS):
                    state = self._merge_slots(row, rows, owner, owner, last, step)
                    output.store_rows(state, request.q_start, 0, tile.row + row, tile.row + rows)


@gluon.jit
def span_partials(consumer: gl.constexpr, partials, arrivals, rows, c: gl.constexpr):
    """The SpanPartials of one consumer: the slots for its half of the columns that this program shares with every
    c.programs_per_span-th program, which compute the same rows in other spans. partials, arrivals: as in
    `decode_latent`.
    """
    all_programs, which = gl.num_programs(0), gl.program_id(0) % c.programs_per_span
    programs = all_programs // c.programs_per_span
    slots = 2 * programs
    all_rows, before = (2 * all_programs).to(gl.int64) * rows, (which * slots).to(gl.int64) * rows
    partials += consumer * all_rows * (c.dim + 2)
    arrivals += (consumer * c.programs_per_span + which) * (slots + slots // 2)
    acc, ml = partials + before * c.dim, partials + all_rows * c.dim + before * 2
    return SpanPartials(acc, ml, slots, rows, arrivals, programs, c.dim)
