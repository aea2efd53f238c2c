"""Launches by address that are repeated: over other tensors, over other tables, and with descriptors for TMA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.page_tables import empty_table
from quire.definition import PageTable
from quire.definition.pages import LengthTable, RaggedLayout

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
    moved = repeat.moved(first, rows[1], second)
    for which in (repeat, moved, moved.moved(second, rows[0], first)):
        assert which(0, None, 0, 0, None, 0, None, None, 0)
    expected = [(*read(rows[0], first), 8), (*read(rows[1], second), 20), (*read(rows[0], first), 8)]
    assert [x[:4] for x in compiled.launched] == [tuple(t.data_ptr() for t in x[:4]) for x in expected]
    assert [x[4:] for x in compiled.launched] == [(x[4], 0.5) for x in expected]
    assert not repeat(0, None, 8, 0, None, 0, None, None, 0), "an address that is not aligned"


def test_launches_that_are_not_moved():
    """Those that read no pages or ragged rows, and over other numbers of requests."""
    first, second, rows = empty_table(8), empty_table(20), rows_of()
    assert launched(rows, first, entries=0).moved(first, rows, second) is None
    assert launched(rows, first).moved(first, rows_of(3), second) is None
    assert launched(rows, first).moved(rows, rows, rows) is None
    assert launched(rows, first).moved(first, rows, second) is not None


def test_a_launch_with_programs_for_few():
    first, second, rows = empty_table(8), empty_table(20), rows_of()
    repeat = launched(rows, first)
    repeat.max_entries = 19
    assert repeat.moved(first, rows, second) is None
    repeat.max_entries = 20
    assert repeat.moved(first, rows, second).max_entries == 20


def test_two_launches_of_one_call():
    """Both are launched with the same addresses and tables, or neither is."""
    first, second, rows, compiled = empty_table(8), empty_table(20), rows_of(), [Compiled(), Compiled()]
    pair = launch.ReplayPair(*(launched(rows, first, x) for x in compiled))
    moved = pair.moved(first, rows, second)
    for which in (pair, moved):
        assert which(0, None, 0, 0, None, 0, None, None, 0)
    assert not pair(0, None, 8, 0, None, 0, None, None, 0), "an address that is not aligned"
    for each in compiled:
        assert [x[3] for x in each.launched] == [t.indices.data_ptr() for t in (first, second)]
    for entries in ((0, 8), (8, 0)):
        assert (
            launch.ReplayPair(*(launched(rows, first, entries=n) for n in entries)).moved(first, rows, second) is None
        )


def test_a_launch_that_read_lengths():
    """It goes on with lengths, and only with those."""
    plain, lengths = empty_table(20), [torch.tensor(x, dtype=torch.int32) for x in ([5, 64], [17, 3])]
    tables = zip((empty_table(8), plain), lengths, strict=True)
    first, second = (LengthTable.of(t.indptr, t.indices, x, 16, "kv_lens") for t, x in tables)
    compiled, rows = Compiled(), rows_of()
    repeat = launched(rows, first, compiled)
    assert repeat.moved(first, rows, second)(0, None, 0, 0, None, 0, None, None, 0)
    assert compiled.launched[0][1:4] == tuple(x.data_ptr() for x in (second.indptr, second.kv_lens, second.indices))
    assert repeat.moved(first, rows, plain) is None
    assert launched(rows, plain).moved(plain, rows, first) is None


def test_a_launch_that_takes_descriptors(monkeypatch):
    """Keys and values go to the function behind Triton's own, as descriptors that are encoded once for each address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, wrap_handle_tensordesc

    tma, given, encoded = launch.descriptors.__wrapped__.__globals__, [], []
    kind = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False}
    launcher = lambda *x: given.append(x[-21:])  # noqa: E731  (what is launched is told by its name)
    compiled = Compiled()
    compiled.launch = wrap_handle_tensordesc(launcher, {"k": "tensordesc<bf16[16,64]>", "v": "*fp32"}, [kind])
    compiled.metadata = SimpleNamespace(tensordesc_meta=[kind, kind])
    utils = SimpleNamespace(fill_tma_descriptor=lambda *x: encoded.append(x) or ("map", x[0]))
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setitem(tma, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
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
