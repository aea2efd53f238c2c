"""Exchanges of ranks, each of which finds in its memory what the others write there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.interpret import INTERPRETED
from helpers.triton_compile import compile_kernel
from quire.kernels import exchange as module
from quire.kernels.exchange import Exchange
from quire.kernels.triton import all_reduce

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SLOT = 1 << 14
on_the_cpu = pytest.mark.skipif(
    not INTERPRETED, reason="memory of the CPU is that of kernels only if they are interpreted"
)


class Memory:
    """The memories of two ranks, and the exchange of one of them."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SMALL", SLOT)
        monkeypatch.setattr(module, "_LARGE", SLOT)
        self.rank, self.peer = rank, 1 - rank
        self.numbered = torch.zeros(2, 2, 2, SLOT, dtype=torch.int64)
        self.whole = torch.zeros(2, 4 * SLOT + 2 * all_reduce.PROGRAMS, dtype=torch.int32)
        self.exchange = Exchange.__new__(Exchange)
        self.exchange.rank, self.exchange.num_ranks, self.exchange._device = rank, 2, torch.device("cpu")
        self.exchange._states = torch.zeros(2, all_reduce.PROGRAMS + 1, dtype=torch.int32)
        self.exchange._numbered, self.exchange._whole = (
            torch.tensor([part.data_ptr() for part in memory]) for memory in (self.numbered, self.whole)
        )

    def slot(self, memory: Tensor, of: int, writer: int, number: int) -> Tensor:
        """Where a rank writes the words of an exchange in the memory of a rank."""
        return memory[of].flatten()[: 4 * SLOT].view(2, 2, SLOT)[number % 2, writer]

    def arrive(self, x: Tensor, number: int) -> None:
        """Let a tensor of the other rank be in the memory of this one, in both formats."""
        words = x.view(torch.int32).flatten()
        numbered = (number << 32) | (words.long() & 0xFFFFFFFF)
        self.slot(self.numbered, self.rank, self.peer, number)[: len(words)] = numbered
        self.slot(self.whole, self.rank, self.peer, number)[: len(words)] = words
        flags = self.whole[self.rank, 4 * SLOT :].view(2, all_reduce.PROGRAMS)
        flags[self.peer] = number


@pytest.mark.interpret
@on_the_cpu
@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_two_ranks_is_that_of_their_tensors(dtype, is_small, rng, monkeypatch):
    rank = rng.randrange(2)
    memory = Memory(rank, monkeypatch)
    if not is_small:
        monkeypatch.setattr(module, "_SMALL", 0)
    for number in (1, 2, 3):
        size = 2 * rng.randint(1, 3000)
        own, other = torch.randn(2, size).to(dtype)
        memory.arrive(other, number)
        total = memory.exchange.sum(own)
        expected = (own.double() + other.double()).to(dtype)
        # The interpreter cuts bits off where a GPU rounds.
        torch.testing.assert_close(total, expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
        sent = memory.slot(memory.numbered if is_small else memory.whole, memory.peer, rank, number)
        words = own.view(torch.int32)
        assert torch.equal(sent[: len(words)].to(torch.int32), words)
        if is_small:
            assert (sent[: len(words)] >> 32 == number).all()
        assert (memory.exchange._states[0 if is_small else 1, :-1] == number).all()


@pytest.mark.interpret
@on_the_cpu
@pytest.mark.parametrize("rows", ["few", "many", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_norm_of_two_ranks_is_that_of_the_sum_and_the_residual(dtype, rows, rng, monkeypatch):
    memory = Memory(rng.randrange(2), monkeypatch)
    features = 2 * rng.randint(150, 450)
    if rows == "large":
        monkeypatch.setattr(module, "_SMALL", 0)
    for number in (1, 2):
        shape = (rng.randint(17, 18) if rows == "many" else rng.randint(1, 3), features)
        # The sums of the ranks have no more than 8 bits, and are not rounded.
        own, other = (torch.randint(-60, 61, (2, *shape)) / 16).to(dtype)
        residual, weight = torch.randn(shape).to(dtype), torch.randn(features).to(dtype)
        eps = rng.choice([1e-6, 1e-3])
        memory.arrive(other, number)
        total, normed = memory.exchange.sum_norm(own, residual, weight, eps)
        exact = own.double() + other.double() + residual.double()
        expected = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        # The interpreter cuts bits off where a GPU rounds.
        bounds = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(total, exact.to(dtype), **bounds)
        torch.testing.assert_close(normed, expected.to(dtype), **bounds)


@pytest.mark.interpret
@on_the_cpu
@pytest.mark.parametrize("is_small", [True, False])
def test_gather_of_two_ranks_has_the_bits_of_both(is_small, rng, monkeypatch):
    rank = rng.randrange(2)
    memory = Memory(rank, monkeypatch)
    if not is_small:
        monkeypatch.setattr(module, "_SMALL", 0)
    for number in (1, 2, 3):
        both = torch.randint(-(1 << 62), 1 << 62, (2, 2, rng.randint(1, 3000)))
        memory.arrive(both[1 - rank], number)
        assert torch.equal(memory.exchange.gather(both[rank]), both)


@pytest.mark.interpret
@on_the_cpu
def test_gather_of_tensors_larger_than_a_slot_has_the_bits_of_both(rng, monkeypatch):
    memory = Memory(0, monkeypatch)
    monkeypatch.setattr(module, "_SMALL", 0)
    own, other = torch.randint(-(1 << 31), 1 << 31, (2, SLOT + rng.randint(1, SLOT))).int()
    # The second part has the next number, and so the other slot.
    memory.arrive(other[SLOT:], 2)
    memory.arrive(other[:SLOT], 1)
    flags = memory.whole[0, 4 * SLOT :].view(2, all_reduce.PROGRAMS)
    launch = all_reduce.launch_gather_blocks

    def launch_part(*args):
        launch(*args)
        flags[1] = 2

    monkeypatch.setattr(all_reduce, "launch_gather_blocks", launch_part)
    assert torch.equal(memory.exchange.gather(own), torch.stack([own, other]))


@pytest.mark.interpret
@on_the_cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_sum_of_three_ranks_is_in_two_steps(dtype, rng, monkeypatch):
    """Of three tensors, this rank sums its part, and finds the sums of the other parts in its memory."""
    for name in ("_SMALL", "_LARGE"):
        monkeypatch.setattr(module, name, 0 if name == "_SMALL" else SLOT)
    rank = rng.randrange(3)
    whole = torch.zeros(3, 6 * SLOT + 3 * all_reduce.PROGRAMS, dtype=torch.int32)
    exchange = Exchange.__new__(Exchange)
    exchange.rank, exchange.num_ranks, exchange._device = rank, 3, torch.device("cpu")
    exchange._states = torch.zeros(2, all_reduce.PROGRAMS + 1, dtype=torch.int32)
    exchange._whole = torch.tensor([part.data_ptr() for part in whole])
    slots, flags = whole[rank, : 6 * SLOT].view(2, 3, SLOT), whole[rank, 6 * SLOT :].view(3, all_reduce.PROGRAMS)
    words = rng.randint(1, SLOT // 3)
    x = torch.randn(3, 3 * words * 4 // dtype.itemsize).to(dtype)
    parts = x.view(torch.int32).view(3, 3, words)
    sums = x.double().sum(0).to(dtype)
    others = [other for other in range(3) if other != rank]
    for other in others:
        slots[1, other, :words] = parts[other, rank]
        slots[0, other, :words] = sums.view(torch.int32).view(3, words)[other]
    flags[others] = 1
    launch = all_reduce.launch_sum_blocks

    def launch_first(*args):
        launch(*args)
        flags[others] = 2

    monkeypatch.setattr(all_reduce, "launch_sum_blocks", launch_first)
    # The interpreter cuts bits off where a GPU rounds.
    torch.testing.assert_close(exchange.sum(x[rank]), sums, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for other in others:
        sent = whole[other, : 6 * SLOT].view(2, 3, SLOT)[1, rank, :words]
        assert torch.equal(sent, parts[rank, other])


@pytest.mark.interpret
@on_the_cpu
def test_exchange_of_tensors_that_are_not_whole_words_has_all_elements(rng, monkeypatch):
    memory = Memory(0, monkeypatch)
    size = 2 * rng.randint(1, 50) + 1
    own, other = torch.randn(2, size).bfloat16()
    memory.arrive(torch.nn.functional.pad(other, (0, 1)), 1)
    torch.testing.assert_close(memory.exchange.sum(own), own + other, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-7)
    memory.arrive(torch.nn.functional.pad(other, (0, 1)), 2)
    assert torch.equal(memory.exchange.gather(own), torch.stack([own, other]))
    assert memory.exchange.sum(own[:0]).shape == (0,)
    assert memory.exchange.gather(own[:0]).shape == (2, 0)
    with pytest.raises(ValueError, match=r"tensors of torch.int64 are not summed over GPUs"):
        memory.exchange.sum(torch.ones(2, dtype=torch.int64))


@pytest.mark.interpret
@on_the_cpu
def test_abandoned_exchange_does_not_wait(monkeypatch):
    memory = Memory(0, monkeypatch)
    memory.exchange._states[:, -1] = 1
    assert memory.exchange.sum(torch.ones(8)).shape == (8,)
    monkeypatch.setattr(module, "_SMALL", 0)
    assert memory.exchange.sum(torch.ones(8)).shape == (8,)


@pytest.mark.parametrize("kernel", ["sum_words", "gather_words", "sum_blocks", "gather_blocks"])
def test_exchange_compiles_for_hopper(kernel):
    constants = all_reduce.AllReduceConfig(1, 2, 512, True, 4, True)
    sizes = {"num_words": "i32", "slot_words": "i32"}
    sizes |= {"flags_at": "i32"} if kernel.endswith("blocks") else {}
    sizes |= {{"sum_blocks": "stride", "gather_blocks": "out_words"}[kernel]: "i32"} if "flags_at" in sizes else {}
    given = {"x": "*bf16", "out": "*bf16", "memories": "*i64", "state": "*i32", **sizes, "c": constants}
    compile_kernel(getattr(all_reduce, kernel), "sm_90", given, num_warps=4)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_norm_of_sums_compiles_for_hopper(dtype):
    constants = all_reduce.AllReduceConfig(1, 2, 2048, dtype == "bf16", 16, True, 4)
    given = dict.fromkeys(("x", "residual", "weight", "out", "normed"), f"*{dtype}")
    given |= {"memories": "*i64", "state": "*i32", "eps": "fp32", "row_words": "i32", "slot_words": "i32"}
    compile_kernel(all_reduce.sum_norm_words, "sm_90", given | {"c": constants}, num_warps=16)
