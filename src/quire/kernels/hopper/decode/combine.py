"""Split-KV: partial states of tiles whose keys several programs have, and how they are combined.

The owner of a tile is the program with its first keys. The programs after it store the states of their keys, one slot
each, and the owner merges them into its own state and writes the rows. If a tile has many partial states, they are
combined in two levels: every eighth program merges those of the seven after it with its own, and stores the result.

Partial states are self-flagging: 0 means not yet written, and a real 0.0 is stored as -0.0, so the reader polls the
data and needs no counter. Readers set slots to 0 again. No reader waits forever, because programs with later units
start first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.softmax import SoftmaxState, exponent_base

# Rows that are combined at a time.
MAX_ROWS = gl.constexpr(16)
# Programs of a group of the first level, for tiles of more than twice as many programs.
FAN_IN = gl.constexpr(8)


@gluon.jit
def _two_levels(owner, last):
    """Whether the partial states of a tile of programs owner to last are combined in two levels."""
    return last - owner > 2 * FAN_IN


@gluon.jit
def combines(program, owner, last):
    """Whether a program merges other programs' partial states of a tile of programs owner to last. Such a program has
    no tile after this one, so that the pipeline's shared memory is free.
    """
    group = _two_levels(owner, last) & ((program - owner) % FAN_IN == 0) & (program < last)
    return (program == owner) | group


@gluon.jit
def slot_of(program, owner, last):
    """The slot of a program's partial state: first the slots that the owner reads, then the others."""
    i = program - owner
    if _two_levels(owner, last):
        i = gl.where(i % FAN_IN == 0, i // FAN_IN, i - i // FAN_IN + (last - owner) // FAN_IN)
    return gl.minimum(owner + i, gl.num_programs(0) - 1)


@gluon.constexpr_function
def _poll_ptx(count, vectors, acc_step, ml_step):
    """PTX that loads partial states until none of the loaded words is 0: for each of `count` slots and each of a
    thread's vectors, 16 bytes of acc and the row's 8 bytes (m, l). Slots lie acc_step and ml_step bytes apart. The last
    operand says how many of them are read; the others give the state of no keys.
    """
    outs = 6 * count * vectors
    init, load = [f"{{ .reg .b32 least; .reg .pred p<{count}>, again;"], ["AGAIN: mov.b32 least, -1;"]
    for i in range(count):
        init += [f"setp.gt.s32 p{i}, ${outs + 2 * vectors}, {i};"]
        for e in range(vectors):
            x = [f"${(6 * i + j) * vectors + e}" for j in range(6)]
            acc, ml = f"${outs + e} + {i * acc_step}", f"${outs + vectors + e} + {i * ml_step}"
            init += [f"mov.b32 {each}, {none};" for each, none in zip(x, (1, 1, 1, 1, "0xff800000", 1), strict=True)]
            load += [f"@p{i} ld.relaxed.gpu.global.v4.b32 {{{', '.join(x[:4])}}}, [{acc}];"]
            load += [f"@p{i} ld.relaxed.gpu.global.v2.b32 {{{', '.join(x[4:])}}}, [{ml}];"]
    least = [f"min.u32 least, least, ${i};" for i in range(outs)]
    return " ".join([*init, *load, *least, "setp.eq.b32 again, least, 0; @again bra AGAIN; }"])


@gluon.constexpr_function
def _clear_ptx(count, acc_step, ml_step):
    """PTX that stores zeros where `_poll_ptx` has loaded."""
    lines = [f"{{ .reg .b32 zero; .reg .pred p<{count}>; mov.b32 zero, 0; mov.b32 $0, 0;"]
    for i in range(count):
        lines += [f"setp.gt.s32 p{i}, $3, {i};"]
        lines += [f"@p{i} st.global.v4.b32 [$1 + {i * acc_step}], {{zero, zero, zero, zero}};"]
        lines += [f"@p{i} st.global.v2.b32 [$2 + {i * ml_step}], {{zero, zero}};"]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _constraints(outs, vectors):
    """PTX operands: results, then addresses of acc and of (m, l), then the number of slots."""
    return ",".join(["=&r"] * outs + ["l"] * (2 * vectors) + ["r"] * vectors)


@gluon.constexpr_function
def _floats(count):
    return (gl.float32,) * count


@aggregate
class DecodePartials:
    """Slots for partial states as int32, the bits of float32. acc: [slots, rows, dim]; ml: pairs (m, l),
    [slots, rows, 2]; slots: the number of slots, for the invariant split. With whole tiles there are no slots.
    """

    acc: gl.tensor | None
    ml: gl.tensor | None
    slots: gl.tensor
    rows: gl.constexpr
    dim: gl.constexpr

    @gluon.jit
    def store(self, state, slot, row, row_end):
        """Store a state to a slot, [rows, head_dim] from `row` on. Rows up to row_end are stored, and those after them
        that are combined together with them.
        """
        layout: gl.constexpr = state.acc.type.layout
        flat: gl.constexpr = gl.SliceLayout(1, layout)
        r = row + gl.arange(0, state.acc.shape[0], flat)
        d = gl.arange(0, self.dim, gl.SliceLayout(0, layout))
        step: gl.constexpr = min(self.rows, MAX_ROWS)
        valid = (r < self.rows) & (r // step * step < row_end)
        at = self.acc + slot * (self.rows * self.dim) + (r[:, None] * self.dim + d[None, :])
        _store_flagged(at, state.acc, valid[:, None])
        ml = self.ml + slot * (self.rows * 2) + r * 2
        _store_flagged(ml, gl.convert_layout(state.m, flat), valid)
        _store_flagged(ml + 1, gl.convert_layout(state.l, flat), valid)

    @gluon.jit
    def poll(self, like, first, last, N: gl.constexpr, row):
        """Wait for and load R rows, from `row` on, of the partial states in N slots from `first` on; slots after `last`
        give the state of no keys. Returns six tensors like `like`, [R, head_dim / 4], for each slot: four neighbouring
        elements of acc, m and l; and the addresses. Loads of all slots overlap, and a thread polls only what it loads.
        """
        R: gl.constexpr = like.shape[0]
        threads: gl.constexpr = min(self.dim // 4, 32)
        # Vectors of a thread in a slot.
        vectors: gl.constexpr = max(R * threads // 128, 1) * (self.dim // 4 // threads)
        acc_step: gl.constexpr = self.rows * self.dim * 4
        ml_step: gl.constexpr = self.rows * 2 * 4
        r = row + gl.arange(0, R, gl.SliceLayout(1, like.type.layout))[:, None]
        d = gl.arange(0, self.dim // 4, gl.SliceLayout(0, like.type.layout))[None, :]
        acc = self.acc + first * (self.rows * self.dim) + (r * self.dim + d * 4)
        ml = self.ml + first * (self.rows * 2) + (r * 2 + d * 0)
        count = gl.zeros_like(r + d) + (last - first + 1)
        ptx: gl.constexpr = _poll_ptx(N, vectors, acc_step, ml_step)
        constraints: gl.constexpr = _constraints(6 * N * vectors, vectors)
        x = gl.inline_asm_elementwise(ptx, constraints, [acc, ml, count], _floats(6 * N), False, vectors)
        return x, (acc, ml, count)

    @gluon.jit
    def clear(self, addresses, N: gl.constexpr):
        """Store zeros again where `poll` has loaded."""
        acc_step: gl.constexpr = self.rows * self.dim * 4
        ml_step: gl.constexpr = self.rows * 2 * 4
        # All threads have loaded.
        thread_barrier()
        gl.inline_asm_elementwise(_clear_ptx(N, acc_step, ml_step), _constraints(1, 1), addresses, gl.int32, False, 1)

    @gluon.jit
    def _merge_slots(self, state, first, last, N: gl.constexpr, row):
        """Merge what `poll` loads into a state with the layouts of `SavedState.rows`."""
        x, addresses = self.poll(state.m, first, last, N, row)
        top = state.m
        for i in gl.static_range(N):
            top = gl.maximum(top, x[6 * i + 4])
        base = exponent_base(top)
        alpha = gl.exp2(state.m - base)
        total, zero = state.l * alpha, gl.zeros_like(state.l)
        x_0, x_1 = zero, zero
        x_2, x_3 = zero, zero
        for i in gl.static_range(N):
            weight = gl.exp2(x[6 * i + 4] - base)
            total += x[6 * i + 5] * weight
            x_0, x_1 = x_0 + x[6 * i] * weight, x_1 + x[6 * i + 1] * weight
            x_2, x_3 = x_2 + x[6 * i + 2] * weight, x_3 + x[6 * i + 3] * weight
        self.clear(addresses, N)
        alpha = interleave(alpha, alpha, alpha, alpha, state.acc)
        return SoftmaxState(state.acc * alpha + interleave(x_0, x_1, x_2, x_3, state.acc), top, total)

    @gluon.jit
    def combine(self, saved, output, request, h, program, owner, last):
        """Merge partial states of a tile of programs owner to last, in their order, into this program's state, and
        write the tile or store the merged state. saved: the SavedState.
        """
        R: gl.constexpr = min(self.rows, MAX_ROWS)
        # The numbers of slots that are merged at a time: `many`, up to eight as registers allow, and then `few` for
        # the rest. More variants would be more code, which takes time to load even if there are few slots.
        many: gl.constexpr = max(min((64 if R < MAX_ROWS else 32) * 128 // (R * self.dim), 8), 1)
        few: gl.constexpr = max(8 * 128 // (R * self.dim), 1)
        row_end = request.rows()
        last_read, levels = last, 1
        if _two_levels(owner, last):
            last_read = gl.minimum(program + FAN_IN - 1, last)
            levels = gl.where(program == owner, 2, 1)
        for row in range(0, gl.minimum(row_end, self.rows), R):
            state = saved.rows(row // R)
            slot = slot_of(program + 1, owner, last)
            slot_last = slot + last_read - program - 1
            for _ in range(levels):
                slot_last = gl.minimum(slot_last, gl.num_programs(0) - 1)
                while slot_last - slot >= few:
                    state = self._merge_slots(state, slot, slot_last, many, row)
                    slot += many
                while slot_last >= slot:
                    state = self._merge_slots(state, slot, slot_last, few, row)
                    slot += few
                slot, slot_last = owner + 1, owner + (last - owner) // FAN_IN
            if program == owner:
                output.store_rows(one_per_row(state), request.q_start, h, row, row_end)
            else:
                self.store(one_per_row(state), slot_of(program, owner, last), row, row_end)


@gluon.jit
def _store_flagged(at, x, valid):
    """Store float32 numbers, -0.0 for 0.0. If several threads have the same element, only one of them stores it: a
    second store might come after the reader has cleared the slot.
    """
    bits = x.to(gl.int32, bitcast=True)
    gl.store(at, gl.where(bits == 0, -(1 << 31), bits), valid)


@aggregate
class SavedState:
    """A state in shared memory that nothing else uses any longer: acc in `acc`, and m and l at place `index` of `ml`,
    which has room for `states` of them. config: a DecodeConfig.
    """

    acc: gl.shared_memory_descriptor
    ml: gl.shared_memory_descriptor
    index: gl.constexpr
    states: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def save(self, state):
        """Save a state, [block_m, head_dim]. Its warps must meet at a barrier before rows are restored."""
        thread_barrier()
        shape: gl.constexpr = [self.config.block_m, self.config.dim]
        self.acc._reinterpret(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(state.acc)
        flat: gl.constexpr = [2 * self.states, self.config.block_m]
        ml = self.ml._reinterpret(gl.float32, flat, gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ml.index(2 * self.index).store(state.m)
        ml.index(2 * self.index + 1).store(state.l)

    @gluon.jit
    def rows(self, chunk):
        """The chunk-th R rows of the state, as many as are combined at a time, in the layouts of `DecodePartials.poll`.
        acc: [R, head_dim], four neighbours in a thread; m, l: [R, head_dim / 4], the row's numbers once for each four
        elements of acc.
        """
        R: gl.constexpr = min(self.config.partial_rows, MAX_ROWS)
        dim: gl.constexpr = self.config.dim
        chunks: gl.constexpr = self.config.block_m // R
        # Threads of a warp in a row.
        threads: gl.constexpr = min(dim // 4, 32)
        plane: gl.constexpr = gl.BlockedLayout([1, 4], [32 // threads, threads], [4, 1], [1, 0])
        fours: gl.constexpr = gl.BlockedLayout([1, 1], [32 // threads, threads], [4, 1], [1, 0])
        flat: gl.constexpr = gl.SliceLayout(1, plane)
        shape: gl.constexpr = [chunks, R, dim]
        acc = self.acc._reinterpret(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(chunk)
        ml_shape: gl.constexpr = [2 * self.states * chunks, R]
        ml = self.ml._reinterpret(gl.float32, ml_shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
        m, l = ml.index(2 * self.index * chunks + chunk), ml.index((2 * self.index + 1) * chunks + chunk)
        acc, m, l = acc.load(plane), m.load(flat), l.load(flat)
        ones = gl.full([R, dim // 4], 1.0, gl.float32, fours)
        m = gl.convert_layout(m, gl.SliceLayout(1, fours))[:, None] * ones
        l = gl.convert_layout(l, gl.SliceLayout(1, fours))[:, None] * ones
        return SoftmaxState(acc, m, l)


@gluon.jit
def one_per_row(state):
    """A state with the layouts of `SavedState.rows`, with m and l once for each row."""
    return SoftmaxState(state.acc, gl.max(state.m, 1), gl.max(state.l, 1))


@gluon.jit
def interleave(x_0, x_1, x_2, x_3, like):
    """[R, head_dim], like `like`, from its first, second, third and fourth of every four elements."""
    x = gl.join(gl.join(x_0, x_2), gl.join(x_1, x_3)).reshape(like.shape)
    return gl.convert_layout(x, like.type.layout)
