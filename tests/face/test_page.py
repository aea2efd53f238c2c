from __future__ import annotations

import pytest
import torch

import quire as flashinfer
from quire.bench.batches import random_table

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def places_of(new, table):
    """The request and position of each appended token."""
    append_indptr = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
    return flashinfer.get_batch_indices_positions(append_indptr, table.lengths(), sum(new))


@pytest.mark.interpret
def test_documented_example_of_append_runs():
    """45 tokens of request 0, 8 of 1, 25 of 2 and 22 of 3, appended to empty pages of 16."""
    append_indptr = ints(0, 45, 53, 78, 100)
    indptr, indices, last = ints(0, 3, 4, 6, 8), torch.arange(8, dtype=torch.int32), ints(13, 8, 9, 6)
    lengths = flashinfer.get_seq_lens(indptr, last, 16)
    assert lengths.tolist() == [45, 8, 25, 22]
    requests, positions = flashinfer.get_batch_indices_positions(append_indptr, lengths, 100)
    assert requests.tolist() == [0] * 45 + [1] * 8 + [2] * 25 + [3] * 22
    assert positions.tolist() == [*range(45), *range(8), *range(25), *range(22)]
    key, value = torch.randn(100, 2, 32), torch.randn(100, 2, 32)
    cache = torch.full((8, 2, 16, 2, 32), torch.nan)
    flashinfer.append_paged_kv_cache(key, value, requests, positions, cache, indices, indptr, last)
    assert torch.equal(cache[:3, 0].flatten(0, 1)[:45], key[:45])
    assert torch.equal(cache[4:6, 1].flatten(0, 1)[:25], value[53:78])
    assert cache[3, :, 8:].isnan().all()


def test_batch_indices_positions_are_the_last_of_each_request():
    requests, positions = flashinfer.get_batch_indices_positions(ints(0, 1, 3, 6, 10), torch.tensor([5, 5, 5, 5]), 12)
    assert requests.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]
    given = [torch.full((12,), 9, dtype=torch.int32) for _ in range(2)]
    result = flashinfer.get_batch_indices_positions(ints(0, 1, 3, 6, 10), torch.tensor([5, 5, 5, 5]), 12, *given)
    assert result[0] is given[0]
    assert torch.equal(given[0], requests)
    assert torch.equal(given[1], positions)


@pytest.mark.interpret(layout=["HND"], dtype=[torch.float32])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_of_random_tokens_writes_to_their_pages(layout, dtype, rng):
    page_size = rng.choice((1, 4, 16))
    lengths = [rng.randrange(1, 60) for _ in range(4)]
    new = [rng.randrange(0, n + 1) for n in lengths]
    table, pool = random_table(lengths, page_size)
    shape = (pool, page_size, 3, 16) if layout == "NHD" else (pool, 3, page_size, 16)
    cache = tuple(torch.full(shape, torch.nan).to(dtype) for _ in range(2))
    append_indptr = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
    key, value = torch.randn(sum(new), 3, 16).to(dtype), torch.randn(sum(new), 3, 16).to(dtype)
    places = flashinfer.get_batch_indices_positions(append_indptr, table.lengths(), sum(new))
    flashinfer.append_paged_kv_cache(
        key, value, *places, cache, table.indices, table.indptr, table.last_page_len, layout
    )
    views = [x if layout == "NHD" else x.transpose(1, 2) for x in cache]
    for view, rows in zip(views, (key, value), strict=True):
        flat = view.float().flatten(0, 1)
        assert int((~flat.isnan().any(-1).any(-1)).sum()) == sum(new), "nothing else was written"
        for i, (request, position) in enumerate(zip(*(x.tolist() for x in places), strict=True)):
            page = int(table.indices[int(table.indptr[request]) + position // page_size])
            assert torch.equal(flat[page * page_size + position % page_size], rows[i].float())


@pytest.mark.interpret
def test_append_of_tokens_of_request_minus_one_skips_them():
    cache = torch.zeros(2, 2, 4, 1, 8)
    rows = torch.ones(3, 1, 8)
    flashinfer.append_paged_kv_cache(rows, rows, ints(0, -1, 0), ints(0, 0, 5), cache, ints(0, 1), ints(0, 2), ints(2))
    assert cache[:, 0, :, 0, 0].flatten().nonzero().flatten().tolist() == [0, 5]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_append_mla_of_random_tokens_writes_to_their_pages(dtype, packed, device, rng):
    page_size, dims = rng.choice((1, 5, 16)), rng.choice([(512, 64), (24, 8), (16, 0)])
    lengths = [rng.randrange(1, 60) for _ in range(3)]
    table, pool = random_table(lengths, page_size)
    new = [rng.randrange(0, n + 1) for n in lengths]
    places = places_of(new, table)
    whole = torch.full((pool, page_size, sum(dims)), torch.nan).to(dtype).to(device)
    rows = torch.randn(sum(new), sum(dims)).to(dtype).to(device)
    caches, parts = whole.split(dims, -1), rows.split(dims, -1)
    if not packed:
        caches = [x.contiguous() for x in caches]
    where = [x.to(device) for x in (*places, table.indices, table.indptr, table.last_page_len)]
    flashinfer.append_paged_mla_kv_cache(*parts, *where[:2], *caches, *where[2:])
    flat = torch.cat([x.float().flatten(0, 1) for x in caches], -1).cpu()
    assert int((~flat.isnan().any(-1)).sum()) == sum(new), "nothing else was written"
    for i, (request, position) in enumerate(zip(*(x.tolist() for x in places), strict=True)):
        page = int(table.indices[int(table.indptr[request]) + position // page_size])
        assert torch.equal(flat[page * page_size + position % page_size], rows[i].float().cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_compiled_append_equals_eager(layout, device):
    """The cache may be one tensor of keys and values, of which the operation writes two views."""
    table, pool = random_table([9, 3], 4)
    key, value = torch.randn(2, 5, 2, 8, device=device)
    where = [x.to(device) for x in (*places_of([4, 1], table), table.indices, table.indptr, table.last_page_len)]
    caches = torch.zeros(2, pool, 2, *((4, 2) if layout == "NHD" else (2, 4)), 8, device=device)

    def append(cache):
        flashinfer.append_paged_kv_cache(key, value, *where[:2], cache, *where[2:], layout)
        return cache + 1

    eager = append(caches[0])
    compiled = torch.compile(append, backend="aot_eager", fullgraph=True)(caches[1])
    assert caches[0].count_nonzero() == 2 * key.numel()
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(eager, compiled)
    views = [x if layout == "NHD" else x.transpose(1, 2) for x in torch.zeros_like(caches[0]).unbind(1)]
    tables = (where[3], where[2], where[4])
    torch.library.opcheck(torch.ops.quire.append.default, (*views, key, value, *where[:2], *tables))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ckv_cache": None}, "ckv_cache = None"),
        ({"kpe_cache": torch.zeros(2, 4, 1, 8)}, r"kpe_cache = \[2, 4, 1, 8\]"),
        ({"kpe_cache": torch.zeros(1, 4, 8)}, "kpe_cache has shape"),
        ({"kpe_cache": torch.zeros(2, 4, 8).half()}, "kpe_cache is torch.float16"),
        ({"append_ckv": torch.zeros(1, 8)}, "append_ckv has shape"),
        ({"append_kpe": torch.zeros(2, 8)}, "append_kpe has shape"),
        ({"positions": ints(8)}, r"positions\[0\] = 8"),
    ],
)
def test_append_mla_with_wrong_arguments_is_refused(changes, message):
    given = {
        "append_ckv": torch.ones(1, 16), "append_kpe": torch.ones(1, 8), "batch_indices": ints(0),
        "positions": ints(0), "ckv_cache": torch.zeros(2, 4, 16), "kpe_cache": torch.zeros(2, 4, 8),
        "kv_indices": ints(0, 1), "kv_indptr": ints(0, 2), "kv_last_page_len": ints(2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        flashinfer.append_paged_mla_kv_cache(**{**given, **changes})
    assert not given["ckv_cache"].any()


def test_append_with_fewer_pages_of_values_is_refused():
    cache, rows = (torch.zeros(2, 4, 1, 8), torch.zeros(1, 4, 1, 8)), torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match="values has shape"):
        flashinfer.append_paged_kv_cache(rows, rows, ints(0), ints(0), cache, ints(0, 1), ints(0, 2), ints(2))


@pytest.mark.parametrize(
    ("places", "tables", "message"),
    [
        (
            (ints(0), ints(8)),
            (ints(0, 1), ints(0, 2), ints(2)),
            r"positions\[0\] = 8 .* request 0, which has pages for 8",
        ),
        ((ints(0), ints(-1)), (ints(0, 1), ints(0, 2), ints(2)), r"positions\[0\] = -1"),
        ((ints(3), ints(0)), (ints(0, 1), ints(0, 2), ints(2)), r"names request 3: there are 1"),
        ((ints(0), ints(0)), (ints(0, 7), ints(0, 2), ints(2)), r"kv_indices\[1\] = 7 of request 0"),
        ((ints(0), ints(0)), (ints(0, 1), ints(0, 3), ints(2)), r"kv_indptr\[-1\] = 3"),
        ((ints(0, 0), ints(0)), (ints(0, 1), ints(0, 2), ints(2)), r"batch_indices has shape \[2\]"),
        ((torch.zeros(1), ints(0)), (ints(0, 1), ints(0, 2), ints(2)), r"batch_indices is torch.float32"),
    ],
)
def test_append_of_tokens_without_a_page_is_refused_and_writes_nothing(places, tables, message):
    cache = torch.zeros(2, 2, 4, 1, 8)
    rows = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match=message):
        flashinfer.append_paged_kv_cache(rows, rows, *places, cache, *tables)
    assert not cache.any()
