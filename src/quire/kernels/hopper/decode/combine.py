"""Tiles in parts, whose keys several programs have: the program that has a tile's first keys collects what those after
it on the line leave.

Each number tells itself that it is there, for none is left as 0: nobody waits until writes have arrived, nor counts
them. And nobody waits forever, since programs that come later on the line start earlier.

Where a tile has many parts, they come together in two steps: every eighth program collects what the seven after it
leave, and leaves that together with its own.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.epilogue import write

MOST = gl.constexpr(16)  # rows that are collected together
FAN = gl.constexpr(8)  # programs whose parts come together first, where there are more than twice as many


class Parts(NamedTuple):
    """A place for each program: int32 [programs, c.part_rows, head_dim], and (largest logit, sum of weights) in
    [programs, c.part_rows, 2]. Numbers are float32, 0 is none.
    """

    rows: tl.tensor
    sums: tl.tensor


@gluon.jit
def _two_steps(origin, final):
    """Whether parts of a tile that programs origin to final have come together in two steps."""
    return final - origin > 2 * FAN


@gluon.jit
def collects(program, origin, final):
    """Whether a program collects parts of a tile that programs origin to final have. Who does so has nothing after it,
    or its ring would still be needed.
    """
    between = _two_steps(origin, final) & ((program - origin) % FAN == 0) & (program < final)
    return (program == origin) | between


@gluon.jit
def place_of(program, origin, final):
    """Where a program leaves its part: first those are that the tile's first program collects, then the others."""
    i = program - origin
    if _two_steps(origin, final):
        i = gl.where(i % FAN == 0, i // FAN, i - i // FAN + (final - origin) // FAN)
    return gl.minimum(origin + i, gl.num_programs(0) - 1)


@gluon.jit
def leave(acc, m, l, parts, place, r0, count, c: gl.constexpr):
    """A tile's part, of keys after its first, or its rows from r0 on: `count` rows, and what is collected with them."""
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    r = r0 + gl.arange(0, acc.shape[0], flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    run: gl.constexpr = min(c.part_rows, MOST)
    here = (r < c.part_rows) & (r // run * run < count)
    put(parts.rows + place * (c.part_rows * c.dim) + (r[:, None] * c.dim + d[None, :]), acc, here[:, None])
    sums = parts.sums + place * (c.part_rows * 2) + r * 2
    put(sums, gl.convert_layout(m, flat), here)
    put(sums + 1, gl.convert_layout(l, flat), here)


@gluon.jit
def put(places, x, here):
    """Numbers for `take`: -0 for 0, since what has not been written yet is 0. Of threads that have the same number only
    one may write it, as stores see to: who takes it clears its place, and another would come after that.
    """
    bits = x.to(gl.int32, bitcast=True)
    gl.store(places, gl.where(bits == 0, -(1 << 31), bits), here)


@gluon.constexpr_function
def _take(parts, vectors, row, pair):
    """Loads until there is no 0 among what is loaded: 16 bytes of a row and the 8 of its sums, of each part for each of
    a thread's vectors. Parts lie row and pair bytes apart, and those beyond the count, the last operand, are of no
    keys.
    """
    outs = 6 * parts * vectors
    clear, load = [f"{{ .reg .b32 least; .reg .pred p<{parts}>, again;"], ["AGAIN: mov.b32 least, -1;"]
    for i in range(parts):
        clear += [f"setp.gt.s32 p{i}, ${outs + 2 * vectors}, {i};"]
        for e in range(vectors):
            x = [f"${(6 * i + j) * vectors + e}" for j in range(6)]
            at, sums = f"${outs + e} + {i * row}", f"${outs + vectors + e} + {i * pair}"
            clear += [f"mov.b32 {each}, {none};" for each, none in zip(x, (1, 1, 1, 1, "0xff800000", 1), strict=True)]
            load += [f"@p{i} ld.relaxed.gpu.global.v4.b32 {{{', '.join(x[:4])}}}, [{at}];"]
            load += [f"@p{i} ld.relaxed.gpu.global.v2.b32 {{{', '.join(x[4:])}}}, [{sums}];"]
    least = [f"min.u32 least, least, ${i};" for i in range(outs)]
    return " ".join([*clear, *load, *least, "setp.eq.b32 again, least, 0; @again bra AGAIN; }"])


@gluon.constexpr_function
def _clear(parts, row, pair):
    """Zeros there again."""
    lines = [f"{{ .reg .b32 zero; .reg .pred p<{parts}>; mov.b32 zero, 0; mov.b32 $0, 0;"]
    for i in range(parts):
        lines += [f"setp.gt.s32 p{i}, $3, {i};"]
        lines += [f"@p{i} st.global.v4.b32 [$1 + {i * row}], {{zero, zero, zero, zero}};"]
        lines += [f"@p{i} st.global.v2.b32 [$2 + {i * pair}], {{zero, zero}};"]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _operands(outs, vectors):
    """Results, then addresses of rows and of sums, then the count of parts."""
    return ",".join(["=&r"] * outs + ["l"] * (2 * vectors) + ["r"] * vectors)


@gluon.constexpr_function
def _floats(count):
    return (gl.float32,) * count


@gluon.jit
def collect(acc, m, l, parts, results, request, h, program, origin, final, spare, spare_sums, c: gl.constexpr):
    """Add to this program's state of a tile, [rows, head_dim], what it collects of what programs origin to final have,
    in their order, and finish the tile or leave the sum. spare, spare_sums: shared memory that nobody needs any more.
    """
    R: gl.constexpr = min(c.part_rows, MOST)
    # Parts at a time: eight, if registers have room for so many numbers of a thread, and few for the last ones. More
    # would be more code, which takes time however few there are.
    many: gl.constexpr = max(min((64 if R < MOST else 32) * 128 // (R * c.dim), 8), 1)
    few: gl.constexpr = max(8 * 128 // (R * c.dim), 1)
    keep(acc, m, l, spare, spare_sums, 0, 1)
    gl.thread_barrier()
    rows = request.q_len * c.group
    last, steps = final, 1
    if _two_steps(origin, final):
        last = gl.minimum(program + FAN - 1, final)
        steps = gl.where(program == origin, 2, 1)
    for r0 in range(0, gl.minimum(rows, c.part_rows), R):
        acc_r, m_r, l_r = spread(spare, spare_sums, 0, 1, r0 // R, c)
        first = place_of(program + 1, origin, final)
        end = first + last - program - 1
        for _ in range(steps):
            end = gl.minimum(end, gl.num_programs(0) - 1)
            while end - first >= few:
                acc_r, m_r, l_r = add_parts(acc_r, m_r, l_r, parts, first, end, many, r0, c)
                first += many
            while end >= first:
                acc_r, m_r, l_r = add_parts(acc_r, m_r, l_r, parts, first, end, few, r0, c)
                first += few
            first, end = origin + 1, origin + (final - origin) // FAN
        if program == origin:
            write(acc_r, gl.max(m_r, 1), gl.max(l_r, 1), results, request.q_begin, h, r0, rows, c)
        else:
            place = place_of(program, origin, final)
            leave(acc_r, gl.max(m_r, 1), gl.max(l_r, 1), parts, place, r0, rows, c)


@gluon.jit
def keep(acc, m, l, spare, sums, which: gl.constexpr, states: gl.constexpr):
    """A state, [rows, head_dim], to shared memory that nobody needs any more: its numbers to `spare`, and to `sums`,
    which has room for those of some states, its largest logits and sums of weights.
    """
    rows: gl.constexpr = acc.shape[0]
    gl.thread_barrier()
    spare._reinterpret(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(acc)
    sums = sums._reinterpret(gl.float32, [2 * states, rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums.index(2 * which).store(m)
    sums.index(2 * which + 1).store(l)


@gluon.jit
def kept(spare, sums, which: gl.constexpr, states: gl.constexpr, some, plane: gl.constexpr, c: gl.constexpr):
    """Rows of a state from there: the some-th as many as are collected together."""
    R: gl.constexpr = min(c.part_rows, MOST)
    runs: gl.constexpr = c.rows // R
    flat: gl.constexpr = gl.SliceLayout(1, plane)
    x = spare._reinterpret(gl.float32, [runs, R, c.dim], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(some)
    sums = sums._reinterpret(gl.float32, [2 * states * runs, R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    m, l = sums.index(2 * which * runs + some), sums.index((2 * which + 1) * runs + some)
    return x.load(plane), m.load(flat), l.load(flat)


@gluon.jit
def spread(spare, sums, which: gl.constexpr, states: gl.constexpr, some, c: gl.constexpr):
    """The same as `take` has it: a thread has four neighbours of acc, and, like its neighbours, their row's sums. acc:
    [R, head_dim]; m, l: [R, head_dim / 4], for each four of acc.
    """
    R: gl.constexpr = min(c.part_rows, MOST)
    lanes: gl.constexpr = min(c.dim // 4, 32)
    plane: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])
    fours: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [4, 1], [1, 0])
    acc, m, l = kept(spare, sums, which, states, some, plane, c)
    every = gl.full([R, c.dim // 4], 1.0, gl.float32, fours)
    m = gl.convert_layout(m, gl.SliceLayout(1, fours))[:, None] * every
    l = gl.convert_layout(l, gl.SliceLayout(1, fours))[:, None] * every
    return acc, m, l


@gluon.jit
def take(like, parts, first, end, N: gl.constexpr, r0, c: gl.constexpr):
    """Rows r0 and on of the parts in N places from `first` on, none of them after `end`, as soon as they are there: of
    each six tensors [R, head_dim / 4], like `like`, four of a row and its sums; and where all that was. Their reads
    overlap, and a thread waits for what it reads alone.
    """
    R: gl.constexpr = like.shape[0]
    lanes: gl.constexpr = min(c.dim // 4, 32)
    vectors: gl.constexpr = max(R * lanes // 128, 1) * (c.dim // 4 // lanes)  # of a thread in a part
    row: gl.constexpr = c.part_rows * c.dim * 4
    pair: gl.constexpr = c.part_rows * 2 * 4
    r = r0 + gl.arange(0, R, gl.SliceLayout(1, like.type.layout))[:, None]
    d = gl.arange(0, c.dim // 4, gl.SliceLayout(0, like.type.layout))[None, :]
    rows = parts.rows + first * (c.part_rows * c.dim) + (r * c.dim + d * 4)
    sums = parts.sums + first * (c.part_rows * 2) + (r * 2 + d * 0)
    count = gl.zeros_like(r + d) + (end - first + 1)
    asm: gl.constexpr = _take(N, vectors, row, pair)
    operands: gl.constexpr = _operands(6 * N * vectors, vectors)
    x = gl.inline_asm_elementwise(asm, operands, [rows, sums, count], _floats(6 * N), False, vectors)
    return x, (rows, sums, count)


@gluon.jit
def clear(places, N: gl.constexpr, c: gl.constexpr):
    """Zeros again where something was taken from."""
    row: gl.constexpr = c.part_rows * c.dim * 4
    pair: gl.constexpr = c.part_rows * 2 * 4
    gl.thread_barrier()  # all threads have what they need
    gl.inline_asm_elementwise(_clear(N, row, pair), _operands(1, 1), places, gl.int32, False, 1)


@gluon.jit
def add_parts(acc, m, l, parts, first, end, N: gl.constexpr, r0, c: gl.constexpr):
    """Add to the state of rows r0 and on, which is as in `spread`, what N places have (see `take`)."""
    x, places = take(m, parts, first, end, N, r0, c)
    top = m
    for i in gl.static_range(N):
        top = gl.maximum(top, x[6 * i + 4])
    base = gl.where(top == -float("inf"), 0.0, top)
    shrink = gl.exp2(m - base)
    total, zero = l * shrink, gl.zeros_like(l)
    x_0, x_1, x_2, x_3 = zero, zero, zero, zero
    for i in gl.static_range(N):
        weight = gl.exp2(x[6 * i + 4] - base)
        total += x[6 * i + 5] * weight
        x_0, x_1 = x_0 + x[6 * i] * weight, x_1 + x[6 * i + 1] * weight
        x_2, x_3 = x_2 + x[6 * i + 2] * weight, x_3 + x[6 * i + 3] * weight
    clear(places, N, c)
    return acc * neighbours(shrink, shrink, shrink, shrink, acc) + neighbours(x_0, x_1, x_2, x_3, acc), top, total


@gluon.jit
def neighbours(x_0, x_1, x_2, x_3, like):
    """[R, head_dim] of every first, second, third and fourth element."""
    x = gl.join(gl.join(x_0, x_2), gl.join(x_1, x_3)).reshape(like.shape)
    return gl.convert_layout(x, like.type.layout)
