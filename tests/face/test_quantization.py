"""Packing booleans into bits: numpy's packbits is the definition."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire as flashinfer
from quire.definition import PackedMask
from quire.definition.masks import byte_indptr
from quire.kernels.pack import pack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ORDERS = ["big", "little"]
both = pytest.mark.parametrize("device", DEVICES)
orders = pytest.mark.parametrize("bitorder", ORDERS)


def random_bits(n: int, device: str) -> torch.Tensor:
    return torch.rand(n, device=device) < 0.5


def exact(x: torch.Tensor, bitorder: str) -> torch.Tensor:
    return torch.from_numpy(np.packbits(x.cpu().numpy(), bitorder=bitorder))


def random_segments(rng, device: str, dtype: torch.dtype = torch.int32, begin: int = 0) -> torch.Tensor:
    """An indptr with empty segments, ones of whole bytes, and others."""
    lengths = [rng.choice((0, 0, 8, 64, rng.randrange(1, 300))) for _ in range(rng.randrange(1, 40))]
    return torch.tensor([begin, *lengths], device=device).cumsum(0).to(dtype)


@pytest.mark.interpret
@both
@orders
def test_packbits_equals_numpy(device, bitorder, rng):
    for n in (0, 1, 8, 9, 2048, rng.randrange(10, 6000)):
        x = random_bits(n, device)
        packed = flashinfer.packbits(x, bitorder)
        assert packed.device == x.device
        assert torch.equal(packed.cpu(), exact(x, bitorder)), n
    assert torch.equal(flashinfer.packbits(x), flashinfer.packbits(x, "big"))


@pytest.mark.interpret
@both
@orders
def test_packbits_of_numbers_and_views_equals_numpy(device, bitorder):
    x = torch.randint(-2, 3, (999,), device=device)
    assert torch.equal(flashinfer.packbits(x, bitorder).cpu(), exact(x != 0, bitorder))
    bits = random_bits(999, device)
    assert torch.equal(flashinfer.packbits(bits[5::3], bitorder).cpu(), exact(bits[5::3], bitorder))
    assert torch.equal(flashinfer.packbits(bits[:1].expand(77), bitorder).cpu(), exact(bits[:1].expand(77), bitorder))


@pytest.mark.interpret
@both
@orders
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segment_packbits_starts_each_segment_at_a_byte(device, bitorder, dtype, rng):
    indptr = random_segments(rng, device, dtype, begin=rng.choice((0, 5)))
    x = random_bits(int(indptr[-1]) + rng.choice((0, 11)), device)
    packed, begins = flashinfer.segment_packbits(x, indptr, bitorder)
    parts = [exact(x[a:b], bitorder) for a, b in pairwise(indptr.tolist())]
    assert (begins.dtype, begins.device) == (torch.int32, x.device)
    assert begins.tolist() == [0, *np.cumsum([len(part) for part in parts]).tolist()]
    assert torch.equal(packed.cpu(), torch.cat(parts))


@pytest.mark.interpret
@both
def test_segment_packbits_of_empty_segments_is_empty(device):
    for indptr in ([0], [0, 0, 0], [3, 3]):
        at = torch.tensor(indptr, device=device)
        packed, begins = flashinfer.segment_packbits(random_bits(9, device), at)
        assert len(packed) == 0
        assert begins.tolist() == [0] * len(indptr)


@pytest.mark.interpret
@both
def test_pack_beyond_the_segments_writes_zeros_and_reads_nothing(device):
    indptr = torch.tensor([0, 9, 60, 1 << 40], device=device)
    storage = torch.ones(200, dtype=torch.bool, device=device)
    bits = torch.full((40,), 0xAA, dtype=torch.uint8, device=device)
    pack(storage[:70], indptr, byte_indptr(indptr.diff()), bits[:30], False)
    assert bits.tolist() == [0xFF, 1, *[0xFF] * 6, 7, 0xFF, 3, *[0] * 19, *[0xAA] * 10]
    ends = torch.tensor([0, 3, 4], device=device)
    pack(storage, ends, byte_indptr(ends.diff()), bits[:5], True)
    assert bits[:5].tolist() == [0xE0, 0x80, 0, 0, 0]


@pytest.mark.interpret
@both
def test_pack_with_an_invalid_indptr_on_a_device_writes_inside_its_output(device, rng):
    """On a device nobody looks at the values: whatever they are, bits come out and nothing else is touched."""
    x = random_bits(100, device)
    for values in ([0, 50, 20, 100], [-40, 30, 90], [1 << 60, 3, 7], [90, 80, 70]):
        indptr = torch.tensor(values, device=device)
        bits = torch.full((60,), 0xAA, dtype=torch.uint8, device=device)
        pack(x, indptr, byte_indptr(indptr.diff()), bits[:50], False)
        assert bits[50:].tolist() == [0xAA] * 10


@pytest.mark.parametrize(
    ("x", "indptr", "bitorder", "message"),
    [
        (torch.zeros(2, 8).bool(), None, "big", r"x is of shape \[2, 8\]"),
        ([True], None, "big", "x is a list"),
        (torch.zeros(8).bool(), None, "bit", "bitorder = 'bit'"),
        (torch.zeros(8).bool(), torch.tensor([0, 9]), "big", r"indptr\[-1\] = 9 is beyond the length of x = 8"),
        (torch.zeros(8).bool(), torch.tensor([0, 5, 4]), "big", "indptr falls at request 1, from 5 to 4"),
        (torch.zeros(8).bool(), torch.tensor([-1, 4]), "big", r"indptr\[0\] = -1"),
        (torch.zeros(8).bool(), torch.tensor([0.0, 4.0]), "big", "indptr = 'torch.float32"),
        (torch.zeros(8).bool(), torch.tensor([]).int(), "big", "indptr = 'torch.int32"),
        (torch.zeros(8).bool(), torch.tensor([0, 4], device="meta"), "big", "indptr.device = 'meta'"),
    ],
)
def test_packbits_with_wrong_arguments_is_refused(x, indptr, bitorder, message):
    arguments = (x, bitorder) if indptr is None else (x, indptr, bitorder)
    with pytest.raises(ValueError, match=message):
        (flashinfer.packbits if indptr is None else flashinfer.segment_packbits)(*arguments)


@pytest.mark.interpret
@both
def test_packbits_passes_opcheck_and_compiles(device, rng):
    x, indptr = random_bits(100, device), torch.tensor([0, 30, 100], device=device)
    bits = torch.empty(13, dtype=torch.uint8, device=device)
    torch.library.opcheck(torch.ops.quire.packbits.default, (x, None, None, bits, True))
    torch.library.opcheck(torch.ops.quire.packbits.default, (x, indptr, byte_indptr(indptr.diff()), bits, False))
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(lambda x: flashinfer.packbits(x, "little") + 1, fullgraph=True, backend=backend)
    for n in (50, 51, rng.randrange(100, 200)):
        x = random_bits(n, device)
        assert torch.equal(compiled(x).cpu(), exact(x, "little") + 1)


class Counter(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.interpret
@both
def test_packed_mask_of_many_requests_takes_a_fixed_number_of_operations(device, rng):
    counts = set()
    for batch in (1, 2, 40):
        q_lens = torch.tensor([rng.randrange(0, 9) for _ in range(batch)], dtype=torch.int32, device=device)
        kv_lens = torch.tensor([rng.randrange(0, 40) for _ in range(batch)], dtype=torch.int32)  # tables of two devices
        areas = (q_lens.cpu() * kv_lens).tolist()
        mask = random_bits(sum(areas), device)
        with Counter() as counter:
            packed = PackedMask.from_bool(mask, q_lens, kv_lens)
        counts.add(counter.count)
        parts = [exact(part, "little") for part in mask.split(areas)]
        assert torch.equal(packed.bits.cpu(), torch.cat(parts))
        assert packed.indptr.tolist() == [0, *np.cumsum([len(part) for part in parts]).tolist()]
        same = PackedMask.from_packed(packed.bits, q_lens, kv_lens)
        assert torch.equal(same.indptr, packed.indptr)
        assert same.indptr.dtype == packed.indptr.dtype == torch.int32
    assert len(counts) == 1, "a request more is not an operation more"
