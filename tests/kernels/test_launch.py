"""Launches by address that are repeated: over other tensors, over other tables, and with descriptors for TMA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.page_tables import empty_table
from quire.definition import PageTable
from quire.definition.pages import LengthTable, RaggedLayout

triton = pytest.importorskip("triton")
launch = pytest.importorskip("quire.kernels.gpu.launch")


def rows_of(batch_size: int = 2) -> RaggedLayout:
    return RaggedLayout(torch.zeros(batch_size + 1, dtype=torch.int32))


class Compiled:
    """A kernel that only keeps what it is launched with."""

    function = packed_metadata = "the kernel"
    global_scratch_size, profile_scratch_size = 1, 0

    def __init__(self):
        self.run, self.launched = self, []

    def __call__(self, *given):
        self.launched.append(given[-6:])


def read(rows: RaggedLayout, table: PageTable) -> tuple[torch.Tensor, ...]:
    """The tables of a launch, in its order."""
    return rows.indptr, table.indptr, table.per_request, table.indices


def launched(rows: RaggedLayout, table: PageTable, compiled: Compiled | None = None, entries: int | None = None):
    """The replay of a launch over these tables."""
    numbers = (len(table.indices) if entries is None else entries, 0.5)
    others = (torch.zeros(4), *read(rows, table))
    return launch.LaunchReplay(compiled or Compiled(), 1, others, numbers, tables=1, entries=5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_launch_over_other_tables(shared):
    """Their addresses and their number of page ids take the first ones' places; all else stays. One tensor may have
    been both the query rows' offsets and those of the pages.
    """
    first, second, compiled = empty_table(8), empty_table(20), Compiled()
    rows = (RaggedLayout(first.indptr) if shared else rows_of(), rows_of())
    repeat = launched(rows[0], first, compiled)
    for now, new in (((rows[0], first), None), ((rows[1], second), first), ((rows[0], first), second)):
        assert new is None or repeat.move(new, *now)
        assert repeat(0, None, 0, 0, None, 0, None, None, 0)
        addresses, numbers = compiled.launched[-1][:4], compiled.launched[-1][4:]
        assert addresses == tuple(x.data_ptr() for x in read(*now))
        assert numbers == (len(now[1].indices), 0.5)
    assert not repeat(0, None, 8, 0, None, 0, None, None, 0), "an address that is not aligned"
    assert len(compiled.launched) == 3


def test_a_launch_over_other_ragged_rows():
    """The rows' offsets take the place of all tables; there are as many rows of keys, which the run's key says."""
    rows, keys, compiled = (rows_of(), rows_of()), (rows_of(), rows_of()), Compiled()
    others = (torch.zeros(4), rows[0].indptr, *[keys[0].indptr] * 3)
    repeat = launch.LaunchReplay(compiled, 1, others, (77, 0.5), tables=1, entries=5)
    assert repeat.move(keys[0], rows[1], keys[1])
    assert repeat(0, None, 0, 0, None, 0, None, None, 0)
    assert compiled.launched[0] == (rows[1].indptr.data_ptr(), *[keys[1].indptr.data_ptr()] * 3, 77, 0.5)


def test_launches_that_are_not_moved():
    """Those that read no pages, and over other numbers of requests or other kinds of keys. They stay as they are."""
    first, second, rows = empty_table(8), empty_table(20), rows_of()
    for entries, given in (
        (0, (rows, second)),
        (None, (rows_of(3), second)),
        (None, (rows, rows)),
        (8, (rows, second)),
    ):
        compiled = Compiled()
        repeat = launched(rows, first, compiled, entries)
        moves = repeat.move(first, *given)
        assert moves == (entries == 8)
        assert repeat(0, None, 0, 0, None, 0, None, None, 0)
        table = second if moves else first
        assert compiled.launched[0][:4] == tuple(x.data_ptr() for x in read(rows, table))


def test_a_launch_with_programs_for_few():
    first, second, rows = empty_table(8), empty_table(20), rows_of()
    repeat = launched(rows, first)
    repeat.max_entries = 19
    assert not repeat.move(first, rows, second)
    repeat.max_entries = 20
    assert repeat.move(first, rows, second)


def test_two_launches_of_one_call():
    """Both are launched with the same addresses and tables, or neither is."""
    first, second, rows, compiled = empty_table(8), empty_table(20), rows_of(), [Compiled(), Compiled()]
    pair = launch.ReplayPair(*(launched(rows, first, x) for x in compiled))
    assert pair(0, None, 0, 0, None, 0, None, None, 0)
    assert pair.move(first, rows, second)
    assert pair(0, None, 0, 0, None, 0, None, None, 0)
    assert not pair(0, None, 8, 0, None, 0, None, None, 0), "an address that is not aligned"
    for each in compiled:
        assert [x[3] for x in each.launched] == [t.indices.data_ptr() for t in (first, second)]
    for entries in ((0, 8), (8, 0)):
        pair = launch.ReplayPair(*(launched(rows, first, entries=n) for n in entries))
        assert not pair.move(first, rows, second)


def test_a_launch_that_read_lengths():
    """It goes on with lengths, and only with those."""
    plain, lengths = empty_table(20), [torch.tensor(x, dtype=torch.int32) for x in ([5, 64], [17, 3])]
    tables = zip((empty_table(8), plain), lengths, strict=True)
    first, second = (LengthTable.of(t.indptr, t.indices, x, 16, "kv_lens") for t, x in tables)
    compiled, rows = Compiled(), rows_of()
    repeat = launched(rows, first, compiled)
    assert not repeat.move(first, rows, plain)
    assert repeat.move(first, rows, second)
    assert repeat(0, None, 0, 0, None, 0, None, None, 0)
    assert compiled.launched[0][1:4] == tuple(x.data_ptr() for x in (second.indptr, second.kv_lens, second.indices))
    assert not launched(rows, plain).move(plain, rows, first)


def test_a_launch_that_takes_descriptors(monkeypatch):
    """Keys and values go to the function behind Triton's own, as descriptors that are encoded once for each address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, wrap_handle_tensordesc

    given, encoded = [], []
    kind = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False}
    launcher = lambda *x: given.append(x[-21:])  # noqa: E731  (what is launched is told by its name)
    compiled = Compiled()
    compiled.launch = wrap_handle_tensordesc(launcher, {"k": "tensordesc<bf16[16,64]>", "v": "*fp32"}, [kind])
    compiled.metadata = SimpleNamespace(tensordesc_meta=[kind, kind])
    utils = SimpleNamespace(fill_tma_descriptor=lambda *x: encoded.append(x) or ("map", x[0]))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    matrices = launch.Matrix(160, 1024, 1024, 16, 128), launch.Matrix(320, 128, 256, 16, 128)
    table, rows = empty_table(8), rows_of()
    others = (torch.zeros(4), *read(rows, table))
    repeat = launch.LaunchReplay(compiled, 1, others, (8, 0.5), tables=1, entries=5, matrices=matrices)
    for k, v in ((16, 32), (48, 32), (16, 32)):
        assert repeat(64, None, k, v, None, 80, None, None, 0)
    for (k, v), x in zip(((16, 32), (48, 32), (16, 32)), given, strict=True):
        assert x[:10] == (("map", k), 160, 1024, 1024, 1, ("map", v), 320, 128, 256, 1)
        assert x[10:14] == (None, 80, None, None)
    assert [x[0] for x in encoded] == [16, 32, 48, 32]
    assert encoded[0][1:] == (3, 2, TMA_DTYPE_DEVICE_TO_HOST[10], (16, 64), (160, 1024), (1024, 1), 0)
    assert not repeat(64, None, 24, 32, None, 80, None, None, 0), "an address that is not aligned"


class Kernel:
    """A kernel that Triton "compiles" at each call, which keeps its arguments."""

    def __init__(self):
        self.compiled, self.calls = Compiled(), []

    def __getitem__(self, grid):
        def call(*given, num_warps):
            self.calls.append((grid, given, num_warps))
            return self.compiled

        return call


def test_a_small_launch_is_compiled_once_and_then_made_by_address(monkeypatch):
    """Anew for other dtypes, sizes and constants; by Triton's own path wherever an address is not aligned."""
    monkeypatch.setattr(launch, "has_direct_launch", lambda: True)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # tensors on the CPU have no current device
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "the stream", raising=False)
    kernel = Kernel()
    small, x, y = launch.SmallLauncher(kernel), torch.zeros(64), torch.zeros(64)
    constants, others = (type("Constants", (), {"num_warps": n})() for n in (4, 8))
    small((3, 2), (x, None), (5, 0.5), (16,), constants)
    assert kernel.calls == [((3, 2), (x, None, 5, 0.5, 16, constants), 4)]
    small((7, 2), (y, None), (6, 0.25), (16,), constants)
    assert kernel.compiled.launched == [(y.data_ptr(), None, 6, 0.25, 16, constants)]
    for tensors, sizes, c in (
        ((x.int(), None), (16,), constants),
        ((x, None), (8,), constants),
        ((x, x), (16,), others),
    ):
        small((1, 1), tensors, (5, 0.5), sizes, c)
    assert len(kernel.calls) == 4
    for _ in range(2):
        small((1, 1), (x[1:], None), (5, 0.5), (16,), constants)
    assert len(kernel.calls) == 6
    assert len(kernel.compiled.launched) == 1
