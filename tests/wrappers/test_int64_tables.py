"""Tables of int64, which every function takes, and converts without waiting for a device.

Entries that nobody uses hold numbers that would be valid ones if only their lowest 32 bits were kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import quire as flashinfer
from helpers.interpret import INTERPRETED
from quire.bench.batches import random_batch, random_table, relative_error
from quire.definition import PageTable, RaggedLayout, attention_spec, oracle
from quire.definition.items import Items
from quire.definition.pages import LengthTable, as_int32
from quire.rope import rope_quantize_fp8_append_paged_kv_cache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F32, BEYOND = torch.float32, 1 << 32  # what wraps to 0
SPEC = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=F32)
HEADS = (4, 2, 32)
on_each = pytest.mark.parametrize("device", DEVICES)


def wide(*tables, device="cpu"):
    return [x.long().to(device) for x in tables]


def paged(batch, device="cpu", spare=2):
    """int64 page tables, the page ids followed by `spare` that nobody uses."""
    indices = torch.cat([batch.kv.indices.long(), torch.full((spare,), BEYOND, device=batch.kv.indices.device)])
    return wide(batch.kv.indptr, indices, batch.kv.last_page_len, device=device)


def workspace(device):
    return torch.empty(1 << 24, dtype=torch.uint8, device=device)


def decode(batch, device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*paged(batch, device), *HEADS, batch.kv.page_size, q_data_type=F32)
    return wrapper


def of_graph(batch, device):
    """Into the buffers of a CUDA graph, by `plan`; `fast_decode_plan` then reads them, and the lengths of tables."""
    sizes = (batch.kv.batch_size + 1, 64, batch.kv.batch_size)
    buffers = [torch.full((n,), -7, dtype=torch.int32, device=device) for n in sizes]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    given = paged(batch, device, spare=0)
    wrapper.plan(*given, *HEADS, batch.kv.page_size, q_data_type=F32)
    flashinfer.fast_decode_plan(wrapper, *given, *HEADS, batch.kv.page_size, q_data_type=F32)
    return wrapper


def prefill(batch, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = (*wide(batch.qo.indptr, device=device), *paged(batch, device))
    wrapper.plan(*tables, *HEADS, batch.kv.page_size, causal=True, q_data_type=F32)
    return wrapper


def pod(batch, device):
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    tables = (*wide(batch.qo.indptr, device=device), *paged(batch, device))
    wrapper.plan(*tables, *tables, *HEADS, batch.kv.page_size, q_data_type=F32)

    class Prefills:
        def run(self, q, cache):
            return wrapper.run(q, cache, q, cache, causal_p=True)[0]

    return Prefills()


def mixed(batch, device):
    wrapper = flashinfer.BatchAttention(device=device)
    indptr, indices, _ = paged(batch, device)
    lengths = batch.kv.lengths().long().to(device)
    rows = batch.qo.indptr.long().to(device)
    wrapper.plan(rows, indptr, indices, lengths, *HEADS, 32, batch.kv.page_size, True, None, None, F32, F32)

    class Outputs:
        def run(self, q, cache):
            return wrapper.run(q, cache)[0]

    return Outputs()


def cascade(batch, device):
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(device))
    indptr, indices, last = paged(batch, device)
    tables = ([batch.qo.indptr.long().to(device)], [indptr], [indices], [last])
    wrapper.plan(*tables, *HEADS, batch.kv.page_size, causal=True, q_data_type=F32)
    return wrapper


@on_each
@pytest.mark.parametrize("face", [decode, of_graph, prefill, pod, mixed, cascade], ids=lambda face: face.__name__)
def test_paged_plan_with_int64_tables_matches_the_oracle(face, device, rng):
    decodes = face in (decode, of_graph)
    batch = random_batch(SPEC, [1] * 3 if decodes else [3, 1, 9], [20, 1, 9], rng.choice((1, 4, 16)), device=device)
    out = face(batch, device).run(batch.q, (batch.k, batch.v))
    assert relative_error(out, batch.exact()[0]) < 2e-6


@on_each
def test_plan_with_tables_of_changing_dtypes_matches_the_oracle(device, rng):
    """What differs from the last plan in its tables alone, int64 after int32 and the other way round."""
    wrapper, spec = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device)), SPEC
    for kind in (torch.int32, torch.int64, torch.int64, torch.int32, torch.int64):
        batch = random_batch(spec, [1] * 3, [rng.randint(1, 60) for _ in range(3)], 16, device=device)
        indptr, indices, last = (x.to(kind) for x in paged(batch, device, spare=0))
        wrapper.plan(indptr, indices, last, *HEADS, 16, q_data_type=F32)
        for _ in range(2):
            out = wrapper.run(batch.q, (batch.k, batch.v))
            assert relative_error(out, batch.exact()[0]) < 2e-6
    held = (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf)
    assert [x.dtype for x in held] == [torch.int32] * 3
    assert [x.tolist() for x in held] == [indptr.tolist(), indices.tolist(), last.tolist()]


@on_each
@pytest.mark.parametrize("form", ["csr", "dense"])
def test_latent_plan_with_int64_tables_matches_the_oracle(form, device, rng):
    spec = attention_spec(
        num_qo_heads=16, num_kv_heads=1, head_dim_qk=192, head_dim_vo=128, q_dtype=F32, causal=True, sm_scale=0.1
    )
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    for _ in range(2):
        batch = random_batch(spec, [2, 1, 5], [rng.randint(5, 60) for _ in range(3)], 16, device=device)
        rows, lengths = wide(batch.qo.indptr, batch.kv.lengths(), device=device)
        indptr, indices, _ = paged(batch, device)
        layer = (16, 128, 64, 16, True, 0.1, F32, F32)
        if form == "csr":
            wrapper.plan(rows, indptr, indices, lengths, *layer)
        else:
            blocks = torch.full((3, 5), BEYOND, device=device)
            for own, pages in zip(blocks, indices.tensor_split(batch.kv.indptr[1:].cpu().long())[:3], strict=True):
                own[: len(pages)] = pages
            names = ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale")
            named = dict(zip((*names, "q_data_type", "kv_data_type"), layer, strict=True))
            wrapper.plan(**named, cum_seq_lens_q=rows, block_tables=blocks, seq_lens=lengths)
        q, k = batch.q, batch.k.squeeze(2)
        out = wrapper.run(q[..., :128], q[..., 128:], k[..., :128], k[..., 128:])
        exact, _ = oracle.attend_batch(q, batch.k, batch.k[..., :128], batch.qo, batch.kv, spec)
        assert relative_error(out, exact) < 3e-6


@on_each
def test_ragged_and_block_sparse_plans_with_int64_tables_match_the_oracle(device):
    batch = random_batch(SPEC, [3, 1, 9], [20, 1, 9], 4, device=device)
    k, v, begins = batch.rows()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(*wide(batch.qo.indptr, begins, device=device), *HEADS, causal=True, q_data_type=F32)
    assert relative_error(ragged.run(batch.q, k, v), batch.exact()[0]) < 2e-6
    indptr, indices = torch.tensor([0, 2, 3], device=device), torch.tensor([0, 3, 2], device=device)
    mask = torch.rand(3, 4, 5, device=device) < 0.6
    sparse = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sparse.plan(indptr, indices, 8, 20, 4, 5, *HEADS, mask=mask, q_data_type=F32, o_data_type=F32)
    dense = torch.zeros(8, 20, dtype=torch.bool, device=device)
    dense[:4, :5], dense[:4, 15:], dense[4:, 10:15] = mask
    q, k, v = (torch.randn(n, heads, 32, device=device) for n, heads in ((8, 4), (20, 2), (20, 2)))
    exact, _ = oracle.attend(q, k, v, SPEC.replace(causal=False, custom_mask=True), mask=dense)
    assert relative_error(sparse.run(q, k, v), exact) < 2e-6


def test_items_with_int64_numbers_equal_those_with_int32():
    prefix, numbers = torch.tensor([3, 2]), torch.tensor([0, 1, 2, 0, 1, 0])
    wider, exact = (Items(prefix.to(kind), numbers.to(kind), 3) for kind in (torch.int64, torch.int32))
    assert wider.prefix_lens.dtype == wider.positions.dtype == torch.int32
    assert all(torch.equal(wider.mask(b, 4, 6), exact.mask(b, 4, 6)) for b in range(2))


@pytest.mark.interpret
@on_each
def test_append_with_int64_tables_writes_to_the_right_slots(device, rng):
    """All ways of appending write to equal slots; append_indptr is int64, as `torch.cat` of int32 and int64 is."""
    lengths, new, size = [rng.randint(1, 40) for _ in range(3)], [1, 0, 1], rng.choice((1, 4, 16))
    table, pool = random_table(lengths, size)
    append_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), torch.tensor(new).cumsum(0)]).to(device)
    indptr, indices, last = wide(table.indptr, table.indices, table.last_page_len, device=device)
    seq_lens = flashinfer.get_seq_lens(indptr, last, size)
    assert (seq_lens.dtype, seq_lens.tolist()) == (torch.int32, lengths)
    places = flashinfer.get_batch_indices_positions(append_indptr, seq_lens.long(), 3)
    assert [x.dtype for x in places] == [torch.int32] * 2
    assert [x.tolist() for x in places] == [[0, 2, -1], [lengths[0] - 1, lengths[2] - 1, 0]]
    places = wide(*places, device=device)
    places[0][2], places[1][2] = -BEYOND, BEYOND  # of nobody
    rows = torch.randn(3, 1, 8, device=device)
    caches = [torch.zeros(2, pool, size, 1, 8, device=device) for _ in range(2)]
    flashinfer.append_paged_kv_cache(rows, rows, *places, tuple(caches[0]), indices, indptr, last)
    latent = [x.squeeze(2) for x in caches[1]]
    flashinfer.append_paged_mla_kv_cache(rows[:, 0], rows[:, 0], *places, *latent, indices, indptr, last)
    expected = torch.zeros_like(caches[0])
    for row, request in ((0, 0), (1, 2)):
        position = lengths[request] - 1
        page = int(table.indices[int(table.indptr[request]) + position // size])
        expected[:, page, position % size] = rows[row]
    assert torch.equal(caches[0], expected)
    assert torch.equal(caches[1], expected)
    fp8 = [torch.zeros(pool, size, 1, 8, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    still = torch.tensor([1.0, 0.0], device=device).repeat_interleave(4)[None]  # turns nothing
    positions = torch.zeros(3, dtype=torch.int64, device=device)
    given = (rows, rows, None, None, rows, still, positions, tuple(fp8), indices, indptr, *places)
    rope_quantize_fp8_append_paged_kv_cache(*given, page_size=size)
    for cache, exact in zip(fp8, expected, strict=True):
        assert torch.equal(cache.float(), exact.to(torch.float8_e4m3fn).float())


@pytest.mark.interpret
def test_append_of_tokens_beyond_their_pages_writes_nothing():
    """Their index in the page table need not fit int32. This runs interpreted, because the host refuses such tokens."""
    if not INTERPRETED:
        pytest.skip("only Triton's kernels skip such tokens")
    from quire.kernels.rope import rotate_quantized
    from quire.kernels.triton.append import append

    table = PageTable(torch.tensor([0, 5, 7]), torch.arange(7), torch.ones(2).long(), 1)
    rows = torch.ones(3, 1, 8)
    requests, places = torch.tensor([1, 0, 1]).int(), torch.tensor([(1 << 31) - 1, 0, (1 << 31) - 5]).int()
    caches = [torch.zeros(9, 1, 1, 8) for _ in range(2)]
    append(*caches, rows, rows, requests, places, table)
    fp8 = [torch.zeros(9, 1, 1, 8).to(torch.float8_e4m3fn) for _ in range(2)]
    out, still = rows.to(torch.float8_e4m3fn), torch.tensor([1.0, 0.0]).repeat_interleave(4)[None]
    none, nobody = rows[..., :0], torch.zeros(3, dtype=torch.int32)
    outs = (out, out[..., :0], fp8[0], fp8[0][..., :0], fp8[1])
    pages = (requests, places, table.indptr, table.indices)
    rotate_quantized(*outs, rows, none, rows, none, rows, nobody, still, *pages, False, 1.0, 1.0)
    for cache in (*caches, *(x.float() for x in fp8)):
        assert cache.flatten(1).any(1).nonzero().flatten().tolist() == [0]


def test_as_int32_of_numbers_beyond_int32_saturates():
    numbers = torch.tensor([0, -1, 7, (1 << 31) - 1, 1 << 31, -(1 << 31) - 1, BEYOND + 7, -BEYOND + 7, 1 << 62])
    largest = (1 << 31) - 1
    assert as_int32(numbers).tolist() == [0, -1, 7, largest, largest, -largest - 1, largest, -largest - 1, largest]
    assert as_int32(numbers).dtype == torch.int32
    assert as_int32(numbers.int()).tolist() == numbers.int().tolist()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("face", [decode, of_graph, prefill, pod, cascade], ids=lambda face: face.__name__)
def test_plan_with_numbers_beyond_int32_is_refused(face, sign, which):
    """They are another page, begin or length in their lowest 32 bits."""
    batch = random_batch(SPEC, [1] * 3, [20, 1, 9], 4)
    tables = paged(batch, spare=0)
    tables[which][1] += sign * BEYOND
    broken = replace(batch, kv=_Unchecked(*tables, 4))
    with pytest.raises(ValueError, match=r"(kv_indptr|kv_indices|kv_last_page_len).* -?21474836|falls at request"):
        face(broken, "cpu").run(batch.q, (batch.k, batch.v))


class _Unchecked(PageTable):
    """A page table that holds what it is given."""

    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize("name", ["batch_indices", "positions", "kv_indices", "kv_indptr"])
@pytest.mark.parametrize("fused", [False, True], ids=["append", "rope"])
def test_append_with_numbers_beyond_int32_is_refused(name, fused):
    given = {"kv_indices": [0, 1], "kv_indptr": [0, 2], "batch_indices": [0, 0], "positions": [0, 5]}
    given[name][1] += BEYOND
    tables, rows = {key: torch.tensor(x) for key, x in given.items()}, torch.ones(2, 1, 8)
    cache = tuple(torch.zeros(2, 4, 1, 8).to(torch.float8_e4m3fn if fused else F32) for _ in range(2))
    if fused:
        still = torch.tensor([1.0, 0.0]).repeat_interleave(4)[None]
        places = tuple(tables[key] for key in ("kv_indices", "kv_indptr", "batch_indices", "positions"))
        given = (rows, rows, None, None, rows, still, torch.zeros(2).int(), cache, *places)
        call = partial(rope_quantize_fp8_append_paged_kv_cache, *given, page_size=4)
    else:
        pages = {"paged_kv_cache": cache, "kv_last_page_len": torch.tensor([4])}
        call = partial(flashinfer.append_paged_kv_cache, rows, rows, **pages, **tables)
    with pytest.raises(ValueError, match=r"\b2147483647\b"):
        call()
    assert not any(x.float().any() for x in cache)


def test_graph_wrapper_with_int64_buffers_is_refused():
    """Plans are copied to them, and graphs read them."""
    workspace, sizes = torch.empty(16, dtype=torch.uint8), {"indptr_buffer": 3, "indices_buffer": 9}
    buffers = {name: torch.zeros(n).int() for name, n in (sizes | {"last_page_len_buffer": 2}).items()}
    for name, buffer in buffers.items():
        with pytest.raises(ValueError, match=rf"paged_kv_{name}\.dtype = torch\.int64 .* torch\.int32"):
            flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, **buffers | {name: buffer.long()})
    latent = [torch.zeros(n).int() for n in (3, 3, 9, 2)]
    tables = [torch.tensor(x) for x in ([0, 1, 2], [0, 1, 2], [0, 1], [3, 3])]
    for i in range(4):
        mixed = [x.long() if i == j else x for j, x in enumerate(latent)]
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace, True, *mixed)
        with pytest.raises(ValueError, match=r"\.dtype = torch\.int64 .* torch\.int32"):
            wrapper.plan(*tables, 16, 128, 64, 4, True, 0.1, F32, F32)


def test_layouts_of_int64_tables_hold_int32():
    """What stands behind the tables of all functions, each of them int64 by itself."""
    tables = [torch.tensor(x).int() for x in ([0, 2, 3], [4, 0, 2], [1, 3])]
    for kinds in ((0,), (1,), (2,), (0, 1, 2)):
        given = [x.long() if i in kinds else x for i, x in enumerate(tables)]
        made = PageTable(*given, 4)
        assert [x.dtype for x in (made.indptr, made.indices, made.last_page_len)] == [torch.int32] * 3
        assert made.lengths().tolist() == [5, 3]
        far = [x.to("meta") for x in given]
        for planned in (
            PageTable(*(x.int() for x in far), 4),
            LengthTable.of(*(x.int() for x in far), 4, "kv_len_arr"),
        ):
            assert planned.with_tables(*far) is None, "the plan has to convert them"
    rows = RaggedLayout.from_lengths(torch.tensor([3, 0, 2]))
    assert (rows.indptr.dtype, RaggedLayout(rows.indptr.long()).indptr.tolist()) == (torch.int32, [0, 3, 3, 5])
    blocks = torch.tensor([[4, BEYOND], [0, 2]])
    made = PageTable.from_block_tables(blocks, torch.tensor([3, 7]), 4)
    assert (made.indices[:3].tolist(), made.lengths().tolist()) == ([4, 0, 2], [3, 7])
    made = PageTable.from_pages(torch.tensor([4, 0, 2]), torch.tensor([3, 7]), 4)
    assert (made.indices.tolist(), made.lengths().tolist()) == ([4, 0, 2], [3, 7])
    slots = torch.tensor([[BEYOND] * 4, [20, 21, 22, 23]])
    made = PageTable.from_req_to_token(slots, torch.tensor([1]), torch.tensor([3]), 4)
    assert (made.indices.tolist(), made.lengths().tolist()) == ([5], [3])


@pytest.mark.gpu
def test_plan_with_int64_tables_does_not_wait_for_the_device(rng):
    """Nor is one that is captured with its run bound to the tables that it saw."""
    batch = random_batch(SPEC, [1] * 3, [20, 1, 9], 4, device="cuda")
    wrappers = [flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda")) for _ in range(2)]
    given, rows = paged(batch, "cuda"), batch.qo.indptr.long()
    paged_prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
    latent = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cuda"))
    lengths = batch.kv.lengths().long()

    def plan(wrapper):
        wrapper.plan(*given, *HEADS, 4, q_data_type=F32)

    plan(wrappers[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            plan(wrappers[0])
        paged_prefill.plan(rows, *given, *HEADS, 4, q_data_type=F32)
        latent.plan(rows, *given[:2], lengths, 16, 128, 64, 4, True, 0.1, torch.bfloat16, torch.bfloat16)
        seq_lens = flashinfer.get_seq_lens(given[0], given[2], 4)
        flashinfer.get_batch_indices_positions(rows, seq_lens.long(), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plan(wrappers[1])
    wrappers[1].run(batch.q, (batch.k, batch.v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(wrappers[1])
        out = wrappers[1].run(batch.q, (batch.k, batch.v))
    given[2][0] = 1
    given[1][:5] = given[1][:5].flip(0)
    graph.replay()
    changed = replace(batch, kv=PageTable(*(x.cpu() for x in given), 4).to("cuda"))
    assert relative_error(out, changed.exact()[0]) < 2e-6


@pytest.mark.gpu
def test_page_id_beyond_int32_on_a_gpu_is_clamped_and_refused_in_checked_mode(rng):
    """They are found where tables are read, and are no other page where they are not."""
    batch = random_batch(SPEC, [1] * 3, [20, 1, 9], 4, device="cuda")
    tables, exact = paged(batch, "cuda"), batch.exact()[0]
    tables[1][0] += BEYOND
    checked = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"), check=True)
    checked.plan(*tables, *HEADS, 4, q_data_type=F32)
    with pytest.raises(ValueError, match=r"kv_indices\[0\] = 2147483647"):
        checked.run(batch.q, (batch.k, batch.v))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"))
    wrapper.plan(*tables, *HEADS, 4, q_data_type=F32)
    out = wrapper.run(batch.q, (batch.k, batch.v))
    assert relative_error(out[1:], exact[1:]) < 2e-6
    assert int(batch.kv.indices[0]) == len(batch.k) - 1 or not relative_error(out[:1], exact[:1]) < 2e-6
