"""Sums of the tensors of several GPUs, and their concatenation. The ranks write to each other's memory.

Each rank writes its tensor to a slot of its own in the memory of every other rank, and reads what arrives in its own
memory. So an exchange takes the time of one transfer. All ranks add up in the order of the ranks, and have the same
bits.

Large sums of more than two ranks are in two steps, if their words are divisible by the number of ranks: each rank sums
its part of the tensor, and all gather the sums. So a rank is sent less than two tensors, whatever the number of ranks.

Small tensors are written as words of 64 bits, whose upper half is the number of the exchange: a word that has arrived
says so itself. Large ones are written as they are, and then the number to one flag per program.

A rank has two slots in each memory, which exchanges use in turn. Before exchange n + 2 writes to a slot again, this
rank has received words of exchange n + 1 from all other ranks, which have therefore ended exchange n, which read the
slot. For this to hold, the number counts all exchanges of a rank, also those in which a program took no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, wait_for_launch_before

# The most programs of a launch, each of which has a copy of the number of exchanges. This is a power of two.
PROGRAMS = 256


@dataclass(frozen=True)
class AllReduceConfig:
    """The constants that the kernels are compiled for."""

    rank: int
    num_ranks: int
    # Words of 32 bits that a program exchanges at a time.
    block: int
    # If true, a word has two elements.
    halves: bool
    num_warps: int
    # If true, a launch overlaps the one before.
    launch_pdl: bool
    # The number of programs that share a row. Each of them computes all of its norm, and sends and writes its part.
    parts: int = 1
    # This is PROGRAMS.
    programs: int = PROGRAMS


@triton.jit
def next_number(state):
    """The number of this exchange. `state` holds PROGRAMS copies of the number of the last exchange, and after them a
    flag that ends all waiting if it is not 0.
    """
    return tl.load(state + tl.program_id(0)) + 1


@triton.jit
def keep_number(state, number, c: tl.constexpr):
    """Write the number of this exchange to this program's copy, and to those of programs that this launch lacks."""
    copy = tl.arange(0, c.programs)
    tl.store(state + copy, tl.full((c.programs,), 0, tl.int32) + number, copy % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def memory_of(memories, rank, word: tl.constexpr):
    """The memory of a rank, as a pointer to words."""
    return tl.multiple_of(tl.load(memories + rank).to(tl.pointer_type(word)), 16)


@triton.jit
def slot_at(memory, rank, number, slot_words, c: tl.constexpr):
    """Where the slot of a rank begins in a memory."""
    return memory + ((number & 1) * c.num_ranks + rank).to(tl.int64) * slot_words


@triton.jit
def widen(word, kind: tl.constexpr, c: tl.constexpr):
    """The lower and the upper element of words, float32; the element twice, if a word has one."""
    if c.halves:
        low = word.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    else:
        low = word.to(tl.float32, bitcast=True)
        high = low
    return low, high


@triton.jit
def narrow(low, high, kind: tl.constexpr, c: tl.constexpr):
    """The words of two elements, or of one."""
    if c.halves:
        lower = low.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = lower | (high.to(kind).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        word = low.to(tl.int32, bitcast=True)
    return word


@triton.jit
def send_words(word, memories, at, inside, number, slot_words, c: tl.constexpr):
    """Write words with the number of the exchange to this rank's slot in the memory of every other rank."""
    ranks: tl.constexpr = c.num_ranks
    numbered = (number.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(ranks):
        if peer != c.rank:
            slot = slot_at(memory_of(memories, peer, tl.int64), c.rank, number, slot_words, c)
            tl.store(slot + at, numbered, inside)


@triton.jit
def receive_words(memories, rank, at, inside, number, state, slot_words, c: tl.constexpr):
    """The words that another rank writes to its slot in this memory, once all have the number of the exchange."""
    slot = slot_at(memory_of(memories, c.rank, tl.int64), rank, number, slot_words, c)
    expected = number.to(tl.int64) << 32
    found = tl.load(slot + at, inside, expected, volatile=True)
    while tl.max(((found >> 32).to(tl.int32) != number).to(tl.int32), 0) > tl.load(state + c.programs, volatile=True):
        found = tl.load(slot + at, inside, expected, volatile=True)
    return found.to(tl.int32)


@triton.jit
def sum_of_words(word, kind: tl.constexpr, memories, at, inside, is_own, number, state, slot_words, c: tl.constexpr):
    """The sums of the words of all ranks, as `widen` returns them. is_own: which words this program sends to others."""
    ranks: tl.constexpr = c.num_ranks
    send_words(word, memories, at, is_own, number, slot_words, c)
    low = tl.full((c.block,), 0.0, tl.float32)
    high = tl.full((c.block,), 0.0, tl.float32)
    for rank in tl.static_range(ranks):
        if rank == c.rank:
            part = word
        else:
            part = receive_words(memories, rank, at, inside, number, state, slot_words, c)
        of_low, of_high = widen(part, kind, c)
        low, high = low + of_low, high + of_high
    return low, high


@triton.jit
def words_of(x):
    return x.to(tl.pointer_type(tl.int32))


@triton.jit
def sum_words(x, out, memories, state, num_words, slot_words, c: tl.constexpr):
    """The sum of small tensors."""
    kind: tl.constexpr = x.dtype.element_ty
    at = tl.program_id(0) * c.block + tl.arange(0, c.block)
    inside = at < num_words
    wait_for_launch_before(c.launch_pdl)
    number = next_number(state)
    word = tl.load(words_of(x) + at, inside, 0)
    low, high = sum_of_words(word, kind, memories, at, inside, inside, number, state, slot_words, c)
    tl.store(words_of(out) + at, narrow(low, high, kind, c), inside)
    keep_number(state, number, c)


@triton.jit
def sum_norm_words(x, residual, weight, out, normed, memories, state, eps, row_words, slot_words, c: tl.constexpr):
    """The sum of small tensors, to which the residual is added, and the RMS norm of that times the weight; c.parts
    programs for each row. Roundings are those of `sum_words` and then of `norm.norm_rows`.
    """
    kind: tl.constexpr = x.dtype.element_ty
    row, part = tl.program_id(0) // c.parts, tl.program_id(0) % c.parts
    column = tl.arange(0, c.block)
    inside = column < row_words
    is_own = inside & (column // (c.block // c.parts) == part)
    at = row * row_words + column
    wait_for_launch_before(c.launch_pdl)
    number = next_number(state)
    word = tl.load(words_of(x) + at, inside, 0)
    low, high = sum_of_words(word, kind, memories, at, inside, is_own, number, state, slot_words, c)
    low, high = widen(narrow(low, high, kind, c), kind, c)
    of_low, of_high = widen(tl.load(words_of(residual) + at, inside, 0), kind, c)
    low, high = low + of_low, high + of_high
    tl.store(words_of(out) + at, narrow(low, high, kind, c), is_own)
    if c.halves:
        mean = tl.sum(low * low + high * high) / (2 * row_words)
    else:
        mean = tl.sum(low * low) / row_words
    scale = tl.rsqrt(mean + eps)
    of_low, of_high = widen(tl.load(words_of(weight) + column, inside, 0), kind, c)
    tl.store(words_of(normed) + at, narrow(low * scale * of_low, high * scale * of_high, kind, c), is_own)
    keep_number(state, number, c)


@triton.jit
def gather_words(x, out, memories, state, num_words, slot_words, c: tl.constexpr):
    """Small tensors of all ranks, one after another."""
    ranks: tl.constexpr = c.num_ranks
    at = tl.program_id(0) * c.block + tl.arange(0, c.block)
    inside = at < num_words
    wait_for_launch_before(c.launch_pdl)
    number = next_number(state)
    word = tl.load(words_of(x) + at, inside, 0)
    send_words(word, memories, at, inside, number, slot_words, c)
    for rank in tl.static_range(ranks):
        if rank == c.rank:
            part = word
        else:
            part = receive_words(memories, rank, at, inside, number, state, slot_words, c)
        tl.store(words_of(out) + rank * num_words + at, part, inside)
    keep_number(state, number, c)


@triton.jit
def exchange_blocks(x, memories, state, number, num_words, slot_words, flags_at, stride, c: tl.constexpr):
    """Write this program's blocks of a large tensor to the other ranks, and wait for theirs. The words for a rank
    begin `stride` words after those for the rank before it.
    """
    ranks: tl.constexpr = c.num_ranks
    program = tl.program_id(0)
    for start in range(program * c.block, num_words, tl.num_programs(0) * c.block):
        at = start + tl.arange(0, c.block)
        for peer in tl.static_range(ranks):
            if peer != c.rank:
                word = tl.load(words_of(x) + tl.cast(peer, tl.int64) * stride + at, at < num_words, 0)
                slot = slot_at(memory_of(memories, peer, tl.int32), c.rank, number, slot_words, c)
                tl.store(slot + at, word, at < num_words)
    # The release covers what all threads of the program have written before the barrier.
    tl.debug_barrier()
    for peer in tl.static_range(ranks):
        if peer != c.rank:
            flags = memory_of(memories, peer, tl.int32) + flags_at
            tl.atomic_xchg(flags + c.rank * c.programs + program, number, sem="release", scope="sys")
    memory = memory_of(memories, c.rank, tl.int32)
    for peer in tl.static_range(ranks):
        if peer != c.rank:
            flag = memory + flags_at + peer * c.programs + program
            is_late = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number).to(tl.int32)
            while is_late > tl.load(state + c.programs, volatile=True):
                is_late = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number).to(tl.int32)
    tl.debug_barrier()


@triton.jit
def block_of(x, memories, rank, at, number, num_words, slot_words, stride, c: tl.constexpr):
    """Words that this rank has got from a rank, or has itself, after `exchange_blocks`."""
    if rank == c.rank:
        part = tl.load(words_of(x) + tl.cast(rank, tl.int64) * stride + at, at < num_words, 0)
    else:
        slot = slot_at(memory_of(memories, c.rank, tl.int32), rank, number, slot_words, c)
        part = tl.load(slot + at, at < num_words, 0, volatile=True)
    return part


@triton.jit
def sum_blocks(x, out, memories, state, num_words, slot_words, flags_at, stride, c: tl.constexpr):
    """The sum of large tensors if stride is 0, and otherwise that of this rank's part of each, where parts begin
    `stride` words after each other.
    """
    kind: tl.constexpr = x.dtype.element_ty
    ranks: tl.constexpr = c.num_ranks
    wait_for_launch_before(c.launch_pdl)
    number = next_number(state)
    exchange_blocks(x, memories, state, number, num_words, slot_words, flags_at, stride, c)
    for start in range(tl.program_id(0) * c.block, num_words, tl.num_programs(0) * c.block):
        at = start + tl.arange(0, c.block)
        low = tl.full((c.block,), 0.0, tl.float32)
        high = tl.full((c.block,), 0.0, tl.float32)
        for rank in tl.static_range(ranks):
            part = block_of(x, memories, rank, at, number, num_words, slot_words, stride, c)
            of_low, of_high = widen(part, kind, c)
            low, high = low + of_low, high + of_high
        tl.store(words_of(out) + at, narrow(low, high, kind, c), at < num_words)
    keep_number(state, number, c)


@triton.jit
def gather_blocks(x, out, memories, state, num_words, slot_words, flags_at, out_words, c: tl.constexpr):
    """Large tensors of all ranks, each of which begins `out_words` after the one before."""
    ranks: tl.constexpr = c.num_ranks
    wait_for_launch_before(c.launch_pdl)
    number = next_number(state)
    exchange_blocks(x, memories, state, number, num_words, slot_words, flags_at, 0, c)
    for start in range(tl.program_id(0) * c.block, num_words, tl.num_programs(0) * c.block):
        at = start + tl.arange(0, c.block)
        for rank in tl.static_range(ranks):
            part = block_of(x, memories, rank, at, number, num_words, slot_words, 0, c)
            tl.store(words_of(out) + tl.cast(rank, tl.int64) * out_words + at, part, at < num_words)
    keep_number(state, number, c)


launch_sum = SmallLauncher(sum_words)
launch_sum_norm = SmallLauncher(sum_norm_words)
launch_gather = SmallLauncher(gather_words)
launch_sum_blocks = SmallLauncher(sum_blocks)
launch_gather_blocks = SmallLauncher(gather_blocks)
