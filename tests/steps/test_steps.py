"""What all serving backends stand on: a step's tables, keys and values into slots, buffers of graphs."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from quire.bench.batches import relative_error
from quire.definition import PageTable, RaggedLayout, attention_spec, oracle
from quire.kernels.append import write
from quire.steps import GraphBuffers, Heads, StepTables, fp8_dtype, greedy_rows, plan, quantize, store, workspace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def random_step(rng, page_size, most=6):
    """Lengths, new tokens and pages (some to spare) of a random batch, and the pool's size."""
    lengths = [rng.choice((1, 2, page_size, page_size + 1, rng.randint(1, 90))) for _ in range(rng.randint(1, most))]
    query_lens = [rng.choice((1, n, rng.randint(1, n))) for n in lengths]
    counts = [-(-n // page_size) + rng.choice((0, 0, 2)) for n in lengths]
    ids = rng.sample(range(sum(counts) + 3), sum(counts))
    pages = [array("i", [ids.pop() for _ in range(n)]) for n in counts]
    return pages, lengths, query_lens, sum(counts) + 3


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_step_tables_of_a_random_step_have_positions_and_slots(device, page_size, rng):
    pages, lengths, query_lens, pool = random_step(rng, page_size)
    tables = StepTables.from_host(pages, lengths, query_lens, page_size, pool, device, pad_to=len(lengths) + 2)
    assert tables.batch_size == len(lengths) + 2
    assert tables.lengths.tolist() == [*lengths, 0, 0]
    assert tables.pages.lengths().tolist() == [*lengths, 0, 0]
    assert RaggedLayout(tables.qo_indptr.cpu()).lengths().tolist() == [*query_lens, 0, 0]
    expected = [
        (position, own[position // page_size] * page_size + position % page_size)
        for own, n, new in zip(pages, lengths, query_lens, strict=True)
        for position in range(n - new, n)
    ]
    assert list(zip(tables.positions.tolist(), tables.slots.tolist(), strict=True)) == expected


def test_step_tables_from_numpy_pages_equal_those_from_arrays(rng):
    pages, lengths, query_lens, pool = random_step(rng, 4)
    own = [np.array(p, dtype=np.int32) for p in pages]
    a, b = (StepTables.from_host(p, lengths, query_lens, 4, pool) for p in (pages, own))
    assert torch.equal(a.pages.indices, b.pages.indices)
    assert torch.equal(a.slots, b.slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [9, 3]}, "request 0 has 9 tokens, and pages for 8"),
        ({"pages": [array("i", [0, 1]), array("i", [7])]}, "request 1 has page 7: pages are 0 to 6"),
        ({"pages": [array("i", [0, 1]), array("i", [-1])]}, "request 1 has page -1"),
        ({"query_lens": [1, 4]}, "request 1 has 3 tokens, of which 4 cannot be new"),
        ({"query_lens": [1]}, "lengths has 2 requests, query_lens 1"),
    ],
)
def test_step_tables_with_wrong_arguments_are_refused(change, message):
    given = {"pages": [array("i", [0, 1]), array("i", [2])], "lengths": [8, 3], "query_lens": [1, 1]} | change
    with pytest.raises(ValueError, match=message):
        StepTables.from_host(**given, page_size=4, num_pages=7)


@pytest.mark.interpret(layout=["HND"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_store_writes_to_the_given_slots_alone(device, page_size, layout, dtype, integer, rng):
    pool, heads, dims = 12, 3, (16, 24)
    caches = [torch.full((pool, page_size, heads, d), 7.0).to(device, dtype) for d in dims]
    if layout == "HND":
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    expected = [x.clone() for x in caches]
    slots = torch.tensor(rng.sample(range(pool * page_size), 9), dtype=integer)
    slots[rng.randrange(9)] = -1
    key, value = (torch.randn(9, heads, d, device=device) * 3 for d in dims)
    per_head = (torch.rand(heads, device=device) + 0.5) * rng.choice((1.0, 0.3))
    k_scale, v_scale = rng.choice(((0.7, torch.tensor(2.0, device=device)), (per_head, 1.3)))
    if dtype.itemsize > 1:
        key, value = key.to(dtype), value.to(dtype)
    store((caches[0], caches[1]), key, value, slots.to(device), k_scale, v_scale)
    for i, slot in enumerate(slots.tolist()):
        for out, new, scale in zip(expected, (key, value), (k_scale, v_scale), strict=True):
            if slot >= 0:
                out[slot // page_size, slot % page_size] = quantize(new[i], dtype, scale)
    for cache, out in zip(caches, expected, strict=True):
        assert torch.equal(cache.float(), out.float())


def test_quantize_of_large_values_to_fp8_saturates():
    x = torch.tensor([1e6, -1e6, 1.0])
    assert quantize(x, torch.float8_e4m3fn, 1.0).float().tolist() == [448.0, -448.0, 1.0]
    assert quantize(x, torch.float16, 5.0) is x


def test_store_with_wrong_arguments_is_refused(device):
    k, v = torch.zeros(3, 4, 2, 8, device=device), torch.zeros(3, 4, 2, 16, device=device)
    key, value = torch.ones(2, 2, 8, device=device), torch.ones(2, 2, 16, device=device)
    slots = torch.tensor([0, 1], device=device)
    turned = torch.ones(2, 8, 2, device=device).transpose(1, 2)
    for cache, args, message in (
        ((k, v), (key, value, slots[:1]), "key has shape"),
        ((k, v), (key, value[:, :1], slots), r"value has shape \[2, 1, 16\]"),
        ((k, v), (key.half(), value, slots), "key is torch.float16: it must be torch.float32"),
        ((k, v), (turned, value, slots), r"key has strides \[16, 1, 2\]: the last one must be 1"),
        ((k, v), (key, value, slots.float()), "slots is torch.float32: it must be torch.int64"),
        ((k, v[:2]), (key, value, slots), r"v_cache has shape \[2, 4, 2, 16\]: it must be \[3, 4, 2, any\]"),
        ((k, v.half()), (key, value, slots), "v_cache is torch.float16: it must be torch.float32"),
        ((k, v), (key, value, slots.to("meta")), "slots lies on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            store(cache, *args)
    assert not k.any()
    assert not v.any()


def test_write_with_slots_beyond_the_cache_writes_nothing_there(device, monkeypatch):
    wide = torch.zeros(5, 4, 2, 8, device=device)
    cache, slots = wide[:3], torch.tensor([3, 12], device=device)
    rows = torch.ones(2, 2, 8, device=device)
    if device.type == "cuda":
        write(cache, cache, rows, rows, slots)
        assert bool(wide[0, 3].all())
        monkeypatch.setenv("QUIRE_CHECK", "1")
    with pytest.raises(ValueError, match=r"slots\[1\] = 12 is out of range: the cache has 12 slots"):
        write(cache, cache, rows, rows, slots)
    assert not wide[3:].any()


def test_compiled_write_equals_eager():
    cache, rows, slots = torch.zeros(3, 4, 2, 8), torch.randn(2, 2, 8), torch.tensor([3, 11])
    compiled = torch.compile(lambda: write(cache, cache, rows, rows, slots), fullgraph=True, backend="aot_eager")
    compiled()
    assert torch.equal(cache.view(12, 2, 8)[slots], rows)
    torch.library.opcheck(torch.ops.quire.write.default, (cache, cache.clone(), rows, rows, slots))


def test_store_to_fp8_compiles_with_scales_as_numbers_and_tensors():
    bytes_cache, rows, slots = torch.zeros(3, 4, 2, 8, dtype=torch.uint8), torch.randn(2, 2, 8), torch.tensor([3, 11])
    cache, scale = bytes_cache.view(torch.float8_e4m3fn), torch.tensor([0.5, 2.0])
    compiled = torch.compile(
        lambda: store((cache, cache), rows, rows, slots, scale, scale), fullgraph=True, backend="aot_eager"
    )
    compiled()
    assert torch.equal(cache.float().view(12, 2, 8)[slots], quantize(rows, cache.dtype, scale).float())
    with pytest.raises(ValueError, match=r"k_scale = \[3\] is not supported"):
        store((cache, cache), rows, rows, slots, torch.ones(3))
    with pytest.raises(ValueError, match=r"slots\[1\] = 12 is out of range"):
        store((cache, cache), rows, rows, slots + 1)


def test_page_table_from_req_to_token_with_starts_reads_from_them_on(device, rng):
    """Request b's slots are those from column starts[b] on."""
    req_to_token = torch.randint(0, 99, (6, 40), dtype=torch.int32, device=device)
    rows, starts, lengths = ([rng.randint(0, high) for _ in range(4)] for high in (5, 20, 20))
    given = [torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, starts, lengths)]
    table = PageTable.from_req_to_token(req_to_token, given[0], given[2], starts=given[1], entries=sum(lengths) + 3)
    expected = torch.cat([req_to_token[r, s : s + n] for r, s, n in zip(rows, starts, lengths, strict=True)])
    assert torch.equal(table.indices[: sum(lengths)], expected)
    assert table.lengths().tolist() == lengths


def test_page_table_from_req_to_token_beyond_its_rows_is_refused():
    matrix, ints = torch.zeros(3, 8, dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lengths\[1\] = 9 is out of range: 0 to max_context = 8"):
        PageTable.from_req_to_token(matrix, ints, torch.tensor([3, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"req_pool_indices\[1\] = 3 is out of range: 0 to 2"):
        PageTable.from_req_to_token(matrix, ints + 1, ints)


@pytest.mark.parametrize("decode", [True, False])
def test_graph_buffers_wrapper_of_padded_batches_matches_the_oracle(device, decode, rng):
    """One wrapper, planned for batch after batch padded to its size, is right about each."""
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, q_dtype=torch.float32)
    buffers = GraphBuffers(*(torch.zeros(n, dtype=torch.int32, device=device) for n in (9, 400, 8, 9)))
    space = workspace(device, 1 << 20)
    wrapper = (buffers.decode if decode else buffers.prefill)(8, space)
    for _ in range(3):
        pages, lengths, query_lens, pool = random_step(rng, 4)
        if decode:
            query_lens = [1] * len(lengths)
        tables = StepTables.from_host(pages, lengths, query_lens, 4, pool, device, pad_to=8)
        k, v = torch.full((2, pool, 4, 2, 16), torch.nan, device=device)
        every = StepTables.from_host(pages, lengths, lengths, 4, pool, device).slots
        store((k, v), *torch.randn(2, sum(lengths), 2, 16, device=device), every)
        heads, qo = Heads(4, 2, 16, 16), tables.qo_indptr
        options = {} if decode else {"qo_indptr": qo, "causal": True}
        plan(wrapper, tables.pages, heads, torch.float32, torch.float32, **options)
        q = torch.randn(8 if decode else sum(query_lens), 4, 16, device=device)
        host = PageTable(*(x.cpu() for x in (tables.pages.indptr, tables.pages.indices, tables.pages.last_page_len)), 4)
        layout = RaggedLayout(torch.arange(9).int() if decode else qo.cpu())
        exact, _ = oracle.attend_batch(q.cpu(), k.cpu(), v.cpu(), layout, host, spec)
        assert relative_error(wrapper.run(q, (k, v)).cpu(), exact) < 2e-6


def test_graph_buffers_smaller_than_the_graph_are_refused():
    ints = torch.zeros(5, dtype=torch.int32)
    buffers = GraphBuffers(ints, ints, ints[:4])
    with pytest.raises(ValueError, match="a graph of 5 requests does not fit buffers made for 4"):
        buffers.decode(5, workspace(torch.device("cpu"), 64))
    with pytest.raises(ValueError, match="qo_indptr is missing"):
        buffers.prefill(2, workspace(torch.device("cpu"), 64))


def test_fp8_dtype_of_an_unknown_name_is_refused():
    assert fp8_dtype("fp8") == fp8_dtype("fp8_e4m3") == torch.float8_e4m3fn
    assert fp8_dtype("fp8_e5m2") == torch.float8_e5m2
    with pytest.raises(ValueError, match="'fp8_e3m4' is not known: fp8, fp8_e4m3, fp8_e5m2 are"):
        fp8_dtype("fp8_e3m4")


@pytest.mark.interpret(dtype=[torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [9, 9000])
def test_most_likely_of_ties_and_values_that_are_not_finite_is_the_first(device, dtype, vocab):
    """The first of equal ones, and what is not finite, in rows that do not lie one after another."""
    whole = torch.randn(8, vocab + 3, device=device).to(dtype)
    logits = whole[:, :vocab]
    logits[0, [3, vocab - 1]] = 9.0
    logits[1, 5], logits[2, 5] = torch.nan, torch.inf
    logits[3], logits[4, 1:] = -torch.inf, -torch.inf
    tokens = torch.full((9,), 77, device=device)
    marked = torch.full((9,), 77, dtype=torch.int32, device=device)
    greedy_rows(tokens[:8], marked[:8], logits)
    chosen = logits[4:].float().argmax(-1).tolist()
    assert tokens.tolist() == [3, 0, 0, 0, *chosen, 77]
    assert marked.tolist() == [3, -1, -1, -1, *chosen, 77]
    greedy_rows(tokens[:0], marked[:0], logits[:0])
    torch.library.opcheck(torch.ops.quire.greedy_rows.default, (tokens[:8].clone(), marked[:8].clone(), logits))
