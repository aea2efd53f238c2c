from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from quire.bench.batches import random_table
from quire.definition import PackedMask, PageTable, RaggedLayout
from quire.definition.masks import pack_bits, unpack_bits
from quire.definition.pages import LengthTable, check_indptr


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def listed(table: PageTable) -> list[list[int]]:
    return [table.indices[a:b].tolist() for a, b in pairwise(table.indptr.tolist())]


def test_block_tables_and_lengths_become_a_page_table():
    blocks = torch.tensor([[7, 3, 9], [1, 0, 0], [5, 0, 0], [0, 0, 0]], dtype=torch.int32)
    table = PageTable.from_block_tables(blocks, ints(9, 4, 1, 0), page_size=4)
    assert listed(table) == [[7, 3, 9], [1], [5], []]
    assert table.last_page_len.tolist() == [1, 4, 1, 0]
    assert table.lengths().tolist() == [9, 4, 1, 0]


def test_random_block_tables_become_a_page_table(rng):
    lengths = torch.tensor([rng.randrange(0, 41) for _ in range(9)], dtype=torch.int32)
    blocks = torch.randint(0, 1000, (9, 10), dtype=torch.int32)
    table = PageTable.from_block_tables(blocks, lengths, 4)
    rows = [blocks[b, : -(-int(n) // 4)].tolist() for b, n in enumerate(lengths)]
    assert listed(table) == rows


def test_slots_and_req_to_token_become_a_page_table():
    table = PageTable.from_slots(ints(4, 9, 2, 7), ints(0, 3, 4))
    assert (listed(table), table.page_size, table.lengths().tolist()) == ([[4, 9, 2], [7]], 1, [3, 1])
    req_to_token = torch.arange(40, dtype=torch.int32).view(4, 10) + 100
    table = PageTable.from_req_to_token(req_to_token, torch.tensor([2, 0]), ints(3, 2))
    assert listed(table) == [[120, 121, 122], [100, 101]]
    paged = torch.tensor([[8, 9, 10, 11, 20, 21, 22, 23], [0, 1, 2, 3, 0, 0, 0, 0]], dtype=torch.int32)
    table = PageTable.from_req_to_token(paged, ints(0, 1), ints(6, 4), page_size=4)
    assert (listed(table), table.last_page_len.tolist()) == ([[2, 5], [0]], [2, 4])


def test_random_tables_have_their_lengths(rng):
    lengths = [rng.randrange(0, 100) for _ in range(20)]
    table, pool = random_table(lengths, rng.choice((1, 4, 16)))
    assert table.lengths().tolist() == lengths
    assert len(set(table.indices.tolist())) == len(table.indices) <= pool


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PageTable(ints(0, 2, 1), ints(0, 1), ints(1, 1), 4), ["falls at request 1", "from 2 to 1"]),
        (lambda: PageTable(ints(0, 1), ints(0), ints(5), 4), ["kv_last_page_len[0] = 5", "1 to page_size = 4"]),
        (lambda: PageTable(ints(0, 1), ints(0), ints(0), 4), ["kv_last_page_len[0] = 0"]),
        (lambda: PageTable(ints(0, 3), ints(0), ints(1), 4), ["kv_indptr[-1] = 3", "kv_indices = 1"]),
        (lambda: PageTable(ints(-1, 1), ints(0), ints(1), 4), ["kv_indptr[0] = -1"]),
        (lambda: PageTable(ints(0, 2), ints(0, -4), ints(1), 4), ["kv_indices[1] = -4"]),
        (lambda: PageTable(ints(0, 1).short(), ints(0), ints(1), 4), ["kv_indptr", "int16", "int32 or int64"]),
        (lambda: PageTable(ints(0, 1), ints(0), ints(1, 1), 4), ["kv_last_page_len has 2", "1 are needed"]),
        (lambda: PageTable(ints(0, 1), ints(0), ints(1), 0), ["page_size = 0"]),
        (lambda: RaggedLayout(ints(0, 5, 4)), ["indptr falls at request 1"]),
        (
            lambda: PageTable(ints(0, 1, 2), ints(0, 9), ints(1, 1), 4).check_pool(9),
            ["kv_indices[1] = 9", "request 1", "0 to 8"],
        ),
        (lambda: PageTable.from_block_tables(ints(0, 1)[None], ints(9), 4), ["lengths[0] = 9", "= 8"]),
        (lambda: PageTable.from_block_tables(ints(0, 1), ints(9, 9), 4), ["block_tables", "matrix"]),
    ],
)
def test_wrong_tables_are_refused_by_request_value_and_bound(make, words):
    with pytest.raises(ValueError, match=r".") as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_a_slice_of_a_longer_indptr_is_a_table():
    table = PageTable(ints(3, 5, 6), ints(9, 9, 9, 1, 2, 3), ints(2, 1), 4)
    assert table.lengths().tolist() == [6, 1]
    assert table.largest_page == 3


def test_bits_are_packed_little_end_first(rng):
    bits = torch.tensor([rng.random() < 0.5 for _ in range(rng.randrange(1, 50))])
    packed = pack_bits(bits)
    assert packed.tolist() == [
        sum(int(bit) << i for i, bit in enumerate(bits[j : j + 8])) for j in range(0, len(bits), 8)
    ]
    assert torch.equal(unpack_bits(packed, len(bits)), bits)


def test_each_request_of_a_packed_mask_starts_at_a_byte():
    mask = PackedMask.from_bool(torch.ones(3 * 5 + 2 * 2, dtype=torch.bool), ints(3, 2), ints(5, 2))
    assert mask.indptr.tolist() == [0, 2, 3]
    assert mask.bits.tolist() == [0xFF, 0x7F, 0x0F]
    with pytest.raises(ValueError, match=r"20 entries.*is 19"):
        PackedMask.from_bool(torch.ones(20, dtype=torch.bool), ints(3, 2), ints(5, 2))
    with pytest.raises(ValueError, match=r"2 bytes.*need 3"):
        PackedMask.from_packed(torch.zeros(2, dtype=torch.uint8), ints(3, 2), ints(5, 2))


def test_with_tables_of_equal_shapes_on_a_device_checks_nothing():
    """On a device, where only shapes are looked at; what has another shape or type is left to the checks."""
    indptr, indices, last = (torch.empty(n, dtype=torch.int32, device="meta") for n in (4, 9, 3))
    pages = PageTable(indptr, indices, last, 16)
    more = torch.empty(12, dtype=torch.int32, device="meta")
    other = pages.with_tables(indptr.clone(), more, last.clone())
    assert other.indices is more
    assert (other.page_size, other.batch_size) == (16, 3)
    assert pages.with_tables(indptr[1:], indices, last[1:]).batch_size == 2
    assert pages.with_tables(indptr[1:], indices, last) is None
    assert pages.with_tables(indptr.short(), indices, last) is None
    assert pages.with_tables(indptr, indices.view(3, 3), last) is None
    assert pages.with_tables(indptr, torch.empty(18, dtype=torch.int32, device="meta")[::2], last) is None
    host = PageTable(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [5])), 16)
    assert host.with_tables(host.indptr, host.indices, host.last_page_len) is None
    rows = RaggedLayout(indptr)
    assert rows.with_tables(last).indptr is last
    for other in (None, [0, 1], indptr.short(), indptr.view(2, 2), indptr[::2], indptr[:0], host.indptr.long()):
        assert rows.with_tables(other) is None
    assert RaggedLayout(host.indptr).with_tables(host.indptr) is None


def test_with_tables_on_the_host_checks_and_copies_them(rng):
    """Whichever of them lie there. Of lengths, all are left to the checks."""
    q_lens = ints(*(rng.randrange(9) for _ in range(rng.randint(1, 99))))
    indptr = RaggedLayout.from_lengths(q_lens).indptr
    rows = RaggedLayout(indptr.to("meta"))
    other = rows.with_tables(indptr)
    assert (rows.longest, other.longest, other.indptr.device.type) == (0, int(q_lens.max()), "meta")
    assert other.batch_size == len(q_lens) == rows.batch_size
    wrong = indptr.clone()
    wrong[-1] = -1
    with pytest.raises(ValueError, match=r"indptr falls at request \d+, from \d+ to -1|indptr\[0\] = -1"):
        rows.with_tables(wrong)
    good, fields = (ints(0, 2, 2, 5), ints(0, 3, 1, 4, 2), ints(16, 0, 7)), ("indptr", "indices", "last_page_len")
    far = PageTable(*(x.to("meta") for x in good), 16)
    for on_host in product((False, True), repeat=3):
        tables = [x if here else x.to("meta") for x, here in zip(good, on_host, strict=True)]
        copied = far.with_tables(*tables)
        assert {x.device.type for x in copied.tables} == {"meta"}
        assert [x.shape for x in copied.tables] == [x.shape for x in good]
        for which, i, value, message in (
            (0, 1, 3, r"kv_indptr falls at request 1, from 3 to 2"),
            (0, 3, 6, r"kv_indptr\[-1\] = 6 is beyond the number of kv_indices = 5"),
            (1, 3, -4, r"kv_indices\[3\] = -4 is out of range: page ids start at 0"),
            (2, 2, 17, r"kv_last_page_len\[2\] = 17 is out of range: 1 to page_size = 16"),
            (2, 0, 0, r"kv_last_page_len\[0\] = 0 is out of range: 1 to page_size = 16"),
        ):
            given = list(tables)
            given[which] = good[which].clone()
            given[which][i] = value
            if on_host[0] or which == 0:
                with pytest.raises(ValueError, match=message):
                    far.with_tables(*given)
            else:
                assert far.with_tables(*given) is not None, f"{fields[which]} alone says nothing"
    lengths = LengthTable.of(*(x.to("meta") for x in good), 16, "kv_lens")
    assert lengths.with_tables(*good) is None
    copied = lengths.with_tables(good[0], good[1].to("meta"), good[2])
    assert type(copied) is LengthTable
    assert {x.device.type for x in copied.tables} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_check_indptr_of_falling_offsets_names_the_request(dtype, rng):
    """Also where differences of int32 overflow; the longest request is returned."""
    limit, falls = 2**31 - 1, 0
    for _ in range(300):
        value = rng.choice((5, limit))
        offsets = [rng.randint(-rng.choice((0, 0, 0, value)), value) for _ in range(rng.randint(1, 9))]
        offsets = sorted(offsets) if rng.random() < 0.5 else offsets
        indptr, lengths = torch.tensor(offsets, dtype=dtype), [b - a for a, b in pairwise(offsets)]
        if offsets[0] < 0 or min(lengths, default=0) < 0:
            falls += 1
            with pytest.raises(ValueError, match=rf"rows\[0\] = {offsets[0]}: |rows falls at request"):
                check_indptr(indptr, "rows")
        else:
            assert check_indptr(indptr, "rows", offsets[-1], "all") == max(lengths, default=0)
            with pytest.raises(ValueError, match=rf"rows\[-1\] = {offsets[-1]} is beyond all = {offsets[-1] - 1}"):
                check_indptr(indptr, "rows", offsets[-1] - 1, "all")
    assert 9 < falls < 291
    for wraps in ([0, limit, -limit - 1, -1, 5], [0, limit, -2], [limit - 3, limit, -limit]):
        with pytest.raises(ValueError, match=rf"rows falls at request 1, from {limit}"):
            check_indptr(torch.tensor(wraps, dtype=dtype), "rows")
    assert check_indptr(torch.empty(3, dtype=dtype, device="meta"), "rows") == 0


def test_length_table_computes_last_page_len(rng):
    """last_page_len is computed from the lengths when it is read, with spare pages too; like() compares the lengths."""
    counts = torch.tensor([rng.randint(0, 4) for _ in range(9)], dtype=torch.int32)
    indptr = RaggedLayout.from_lengths(counts).indptr
    lengths = torch.stack([torch.randint(0, int(n) * 8 + 1, ()) for n in counts]).int()
    made = LengthTable.of(indptr, torch.arange(int(indptr[-1]), dtype=torch.int32), lengths, 8, "kv_lens")
    assert (made.batch_size, made.lengths().tolist()) == (9, lengths.tolist())
    assert ((made.last_page_len > 0) | (counts * 8 - lengths >= 8) | (counts == 0)).all()
    lengths //= 2
    assert made.lengths().tolist() == lengths.tolist()
    with pytest.raises(ValueError, match=r"kv_indptr, kv_indices and kv_lens lie on different devices: \['cpu', 'm"):
        LengthTable.of(indptr, indptr, lengths.to("meta"), 8, "kv_lens")
    far = LengthTable.of(*(x.to("meta") for x in (indptr, indptr, lengths)), 8, "kv_lens")
    other = far.with_tables(far.indptr, far.indices, far.kv_lens.clone())
    assert type(other) is LengthTable
    assert other.kv_lens is not far.kv_lens
    assert far.with_tables(far.indptr, far.indices, far.kv_lens[1:]) is None
