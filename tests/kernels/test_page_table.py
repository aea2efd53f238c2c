"""Page tables from a matrix of slots: the kernel and torch against a loop over the requests."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.page_table import fill_page_table

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def slots_of_requests(rng, count, width, page_size):
    """A matrix of slots [count, width], of pages in random order, and the number of slots."""
    per_row = -(-width // page_size)
    pages = torch.randperm(count * per_row).view(count, per_row, 1)
    slots = (pages * page_size + torch.arange(page_size)).flatten(1)[:, :width]
    return slots.int(), count * per_row * page_size


def expected_pages(slots, row, length, page_size, slot_map=None):
    own = slots[row, :length:page_size].long()
    return (own if slot_map is None else slot_map[own]) // page_size


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_fill_page_table_random_requests_equals_loop(device, page_size, rng):
    """Requests with and without tokens, in any rows, more of them than are added at a time; extra tokens; a map."""
    for batch_size, width in ((1, 1), (rng.randint(2, 40), rng.randint(20, 90)), (3, 2500)):
        slots, count = slots_of_requests(rng, batch_size + 2, width, page_size)
        extra = rng.choice((0, rng.randint(0, min(width, 4))))
        lengths = [rng.choice((0, width - extra, rng.randint(0, width - extra))) for _ in range(batch_size)]
        rows = torch.randperm(batch_size + 2)[:batch_size]
        slot_map = None
        if rng.random() < 0.5:
            slot_map = (torch.randperm(count // page_size)[:, None] * page_size + torch.arange(page_size)).flatten()
        pages = [
            expected_pages(slots, row, length + extra, page_size, slot_map)
            for row, length in zip(rows.tolist(), lengths, strict=True)
        ]
        total = sum(map(len, pages))
        indptr, last = (torch.full((n,), -7, dtype=torch.int32, device=device) for n in (batch_size + 1, batch_size))
        indices = torch.full((total + 5,), -7, dtype=torch.int32, device=device)
        dtypes = rng.choice((torch.int32, torch.int64)), rng.choice((torch.int32, torch.int64))
        given = rows.to(device, dtypes[0]), torch.tensor(lengths, dtype=dtypes[1], device=device)
        padded = torch.full((batch_size + 2, width + 3), -9, dtype=torch.int32, device=device)
        padded[:, :width] = slots.to(device)
        moved = None if slot_map is None else slot_map.to(device)
        fill_page_table(indptr, indices, last, padded[:, :width], *given, moved, page_size, extra)
        counts = torch.tensor([0, *map(len, pages)])
        assert torch.equal(indptr.cpu().long(), counts.cumsum(0))
        assert torch.equal(indices[:total].cpu().long(), torch.cat(pages))
        assert (indices[total:] == -7).all()
        kept = [length + extra - max(len(own) - 1, 0) * page_size for length, own in zip(lengths, pages, strict=True)]
        assert last.tolist() == kept


@pytest.mark.parametrize("device", DEVICES)
def test_fill_page_table_empty_batch_writes_zero(device):
    indptr, none = torch.ones(1, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)
    fill_page_table(indptr, none, none, none.new_zeros(2, 3), none, none, None, 1, 0)
    assert indptr.tolist() == [0]


def test_fill_page_table_values_beyond_bounds_are_refused():
    def fill(rows=(0, 1), lengths=(2, 3), page_size=1, extra=0, capacity=8, **changes):
        tables = [torch.zeros(n, dtype=torch.int32) for n in (3, capacity, 2)]
        slots = changes.get("slots", torch.zeros(2, 4, dtype=torch.int32))
        fill_page_table(*tables, slots, torch.tensor(rows), torch.tensor(lengths), None, page_size, extra)

    fill()
    for changes, message in (
        ({"rows": (0, 2)}, r"rows\[1\] = 2 is out of range: 0 to 1"),
        ({"lengths": (-1, 0)}, r"lengths\[0\] = -1 is out of range"),
        ({"lengths": (1, 3), "extra": 2}, r"lengths\[1\] = 3 is out of range: with 2 more tokens it must be 0 to 4"),
        ({"capacity": 4}, "indices has 4 entries: the requests have 5 pages"),
        ({"rows": (0, 1, 1)}, r"rows has shape \[3\]: it must be \[2\]"),
        ({"slots": torch.zeros(2, 4)}, "req_to_token is torch.float32: it must be torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            fill(**changes)


@pytest.mark.gpu
def test_fill_page_table_on_gpu_clamps_and_cuts():
    """Wrong rows and lengths on a device, which nobody reads there, lead to no access outside the tensors."""
    slots = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    indptr, last = torch.full((4,), -1, dtype=torch.int32, device="cuda"), slots.new_zeros(3)
    indices = slots.new_full((8,), -7)
    rows, lengths = torch.tensor([-3, 9, 0], device="cuda"), torch.tensor([100, 2, -5], device="cuda")
    fill_page_table(indptr, indices[:5], last, slots, rows, lengths, None, 1, 0)
    assert indptr.tolist() == [0, 4, 5, 5]
    assert indices.tolist() == [0, 1, 2, 3, 4, -7, -7, -7]


@pytest.mark.gpu
def test_fill_page_table_in_a_graph_sees_new_lengths():
    slots = torch.randperm(600, dtype=torch.int32, device="cuda").view(3, 200)
    rows, lengths = torch.tensor([2, 0], device="cuda"), torch.tensor([5, 9], device="cuda")
    indptr, indices, last = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (3, 400, 2))
    given = (indptr, indices, last, slots, rows, lengths, None, 1, 0)
    fill_page_table(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_page_table(*given)
    for new_rows, new_lengths in (([1, 2], [200, 0]), ([0, 1], [17, 183])):
        rows.copy_(torch.tensor(new_rows))
        lengths.copy_(torch.tensor(new_lengths))
        graph.replay()
        expected = torch.cat([slots[r, :n] for r, n in zip(new_rows, new_lengths, strict=True)])
        assert indptr.tolist() == [0, new_lengths[0], sum(new_lengths)]
        assert torch.equal(indices[: len(expected)], expected)
