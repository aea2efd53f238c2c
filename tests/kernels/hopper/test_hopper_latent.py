"""Latent caches (MLA) on Hopper GPUs against the oracle; elsewhere the kernel is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire
from helpers.families import check, compute, oracle_result
from helpers.hopper import Recorded, gpu, shifted
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import PageTable, attention_spec
from quire.kernels import registry
from quire.kernels.call import Call

hopper = pytest.importorskip("quire.kernels.hopper.host")
DTYPES = [torch.bfloat16, torch.float16]


def latent_batch(heads, dtype, q_lens, kv_lens, page_size, dim=512, padding=0, **layer) -> Batch:
    """A batch whose values are the first part of keys."""
    given = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim_qk": dim + 64, "head_dim_vo": dim, "sm_scale": 0.07}
    spec = attention_spec(**given, q_dtype=dtype, **layer)
    batch = random_batch(spec, q_lens, kv_lens, page_size, padding=padding)
    return replace(batch, v=batch.k[..., :dim])


def run(batch: Batch, max_q_len=0, **changes):
    dim = batch.spec.head_dim_vo
    given = {"q": batch.q[..., :dim], "q_pe": batch.q[..., dim:], "k": batch.v, "k_pe": batch.k[..., dim:]}
    given |= {"spec": batch.spec.replace(latent=True), "max_q_len": max_q_len}
    return compute(batch, "hopper", **(given | changes))


@gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_decode_of_random_batches_matches_the_oracle(dtype, causal, rng):
    """Requests of one or a few query tokens, or none; without keys, or with some; any heads, pages and scales."""
    shapes = [(rng.choice((1, 3, 16, 33, 64, 128)), rng.choice((512, 512, 256, 128))) for _ in range(2)]
    for heads, dim in shapes * 2:  # each compiles kernels of its own
        longest = rng.choice((1, 1, 2, 4))
        kv_lens = [rng.choice((0, 1, 5, 63, 64, 65, 200, 700)) for _ in range(rng.randint(1, 7))]
        q_lens = [rng.choice((0, 1, longest, longest)) for _ in kv_lens]
        layer = {"causal": causal, "sinks": rng.choice((True, False)), "dim": dim}
        batch = latent_batch(heads, dtype, q_lens, kv_lens, rng.choice((1, 16, 64)), padding=2, **layer)
        batch = replace(batch, k_scale=rng.choice((1.0, 0.5, torch.tensor([0.7]))), v_scale=rng.choice((1.0, 2.0)))
        out, lse = run(batch, rng.choice((0, longest)))
        check(batch, out, lse, "hopper")
        tokens = sum(q_lens)
        assert (out[tokens:] == 0).all()
        assert (lse[tokens:] == -torch.inf).all()


@gpu
@pytest.mark.parametrize("shape", [(1, 20000, 4, 1), (3, 5000, 16, 1), (40, 300, 3, 3), (300, 20, 5, 1)], ids=str)
def test_latent_decode_of_split_requests_matches_the_oracle_with_equal_bits(shape, rng):
    """Long requests that many programs share, and many short ones: the same bits each time, and right."""
    count, length, heads, q_len = shape
    kv_lens = [rng.randint(length // 2, length) for _ in range(count)]
    batch = latent_batch(heads, torch.bfloat16, [q_len] * count, kv_lens, 16)
    first = run(batch, q_len)
    check(batch, *first, "hopper")
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(batch, q_len), strict=True))


@gpu
def test_latent_decode_of_several_tiles_per_request_matches_the_oracle(rng):
    """More rows than neighbouring programs share, known before and not."""
    batch = latent_batch(100, torch.bfloat16, [1, 20, 3], [300, 130, 3], 16, causal=True)
    for longest in (0, 20):
        check(batch, *run(batch, longest), "hopper")


@gpu
@pytest.mark.parametrize("dim", [512, 256, 128])
def test_latent_decode_of_one_long_query_among_short_ones_matches_the_oracle(dim, rng):
    """max_q_len is unknown, and one request has several query tokens, where nearly all have one."""
    zeros = torch.zeros(8 << 18, dtype=torch.int32, device="cuda")
    for heads, causal in ((16, True), (3, True), (128, False), (40, True)):
        kv_lens = [rng.choice((3, 70, rng.randint(1, 3000))) for _ in range(12)]
        q_lens = [rng.choice((0, 1, 1)) for _ in range(11)] + [rng.randint(2, 50)]
        layer = {"causal": causal, "dim": dim, "padding": 3}
        batch = latent_batch(heads, torch.bfloat16, q_lens, kv_lens, rng.choice((1, 4, 16, 64)), **layer)
        check(batch, *run(batch, int_workspace=zeros), "hopper")
        assert not zeros.any()


@gpu
@pytest.mark.parametrize("causal", [True, False])
def test_latent_run_of_many_query_rows_matches_the_oracle(causal, rng):
    """Requests of so many query rows that programs take tiles one by one, and few long ones, whose keys are split."""
    zeros = torch.zeros(8 << 18, dtype=torch.int32, device="cuda")
    for heads in (rng.choice((3, 16, 40)), 128):
        layer = {"causal": causal, "dim": rng.choice((512, 256, 128)), "padding": 3, "sinks": rng.choice((True, False))}
        dtype, page_size = rng.choice(DTYPES), rng.choice((1, 4, 16, 64))
        for count in (1, 2, 9):
            kv_lens = [rng.choice((0, 3, 200, rng.randint(1, 3000))) for _ in range(count)]
            q_lens = [rng.choice((0, 1, rng.randint(1, 200))) for _ in kv_lens]
            q_lens[0], kv_lens[0] = 4800 * count // heads, 20_000 if count == 1 else 700
            batch = latent_batch(heads, dtype, q_lens, kv_lens, page_size, **layer)
            assert hopper.mla_host.has_many_rows(batch.spec, len(batch.q), count)
            out, lse = run(batch, int_workspace=zeros)
            check(batch, out, lse, "hopper")
            assert (out[sum(q_lens) :] == 0).all()
            assert (lse[sum(q_lens) :] == -torch.inf).all()
            assert not zeros.any()
            assert all(torch.equal(a, b) for a, b in zip((out, lse), run(batch, int_workspace=zeros), strict=True))


@gpu
@pytest.mark.parametrize("q_len", [1, 40])  # which `decode_latent` and `prefill_latent` compute
def test_latent_run_with_keys_of_no_probability_has_equal_bits(q_len, rng):
    """As long as no maximum grows, states are multiplied by exactly 1, not by what a product and a sum round to."""
    batch = latent_batch(128, torch.bfloat16, [q_len], [64 * 20], 64, causal=False)
    page = batch.kv.indices[rng.randrange(20)]
    batch.q[..., 0] = 1
    seen_keys = batch.k[page].clone()
    batch.k[..., 0] = -30_000
    batch.k[page] = seen_keys
    ends = batch.kv.indptr.new_tensor([0, 1])
    alone = run(batch, q_len, kv=PageTable(ends, page[None], batch.kv.last_page_len, 64))
    assert all(torch.equal(a, b) for a, b in zip(run(batch, q_len), alone, strict=True))


@gpu
def test_latent_run_with_invalid_tables_reads_inside_the_tensors():
    batch = latent_batch(16, torch.bfloat16, [1, 1], [640, 64], 16)
    batch.kv.indices[1], batch.kv.indices[2] = 1 << 30, -(1 << 30)
    batch.kv.indptr[2] = 1 << 30
    batch.kv.last_page_len[0] = 1 << 30
    batch.qo.indptr[2] = 1 << 30
    run(batch, 1)
    torch.cuda.synchronize()


@gpu
def test_auto_for_latent_decode_on_hopper_chooses_hopper():
    batch = latent_batch(128, torch.bfloat16, [1, 3], [640, 64], 16, causal=True)
    spec, kv = batch.spec.replace(latent=True), batch.kv
    assert registry.choose(spec, torch.device("cuda", 0)).name == "hopper"
    wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(0, device="cuda"), backend="hopper")
    tables = (x.cuda() for x in (batch.qo.indptr, kv.indptr, kv.indices, kv.lengths()))
    wrapper.plan(*tables, 128, 512, 64, 16, True, 0.07, torch.bfloat16, torch.bfloat16)
    assert wrapper.backend == "hopper"
    q, cache = batch.q.cuda(), batch.k.cuda().squeeze(2)
    for _ in range(3):
        assert relative_error(wrapper.run(query=q, kv_cache=cache).cpu(), oracle_result(batch)[0]) < 3e-3
    odd = shifted(q[..., :512].contiguous()), q[..., 512:].contiguous()
    assert relative_error(wrapper.run(query=odd, kv_cache=cache).cpu(), oracle_result(batch)[0]) < 3e-3
    with pytest.raises(ValueError, match="hopper: keys must be aligned to 16 bytes"):
        wrapper.run(query=q, kv_cache=shifted(cache))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [512, 256, 128])
def test_latent_kernels_compile_within_their_memory(dim):
    from helpers.triton_compile import compile_latent

    spec = attention_spec(num_qo_heads=128, num_kv_heads=1, head_dim_qk=dim + 64, head_dim_vo=dim, latent=True)
    near = (spec.replace(num_qo_heads=16), 1, 16, False)
    others = [(spec, 1), (spec.replace(sinks=True), 4)] if dim == 512 else []
    for given in [near, (*near, True), *others]:
        usage = compile_latent(*given)
        assert usage.shared <= usage.limit
        assert usage.spills <= 32, usage.spills


def test_latent_launch_passes_the_arguments_of_the_kernel(monkeypatch):
    calls = hopper.mla_host
    monkeypatch.setattr(calls, "Launcher", Recorded)
    calls._launcher.cache_clear()
    batch = latent_batch(128, torch.bfloat16, [1, 1], [640, 64], 16)
    q, q_pe = batch.q.split((512, 64), -1)
    k, k_pe = batch.k.split((512, 64), -1)
    spec = batch.spec.replace(latent=True)
    call = Call(q, k, k, batch.qo, batch.kv, spec, q_pe=q_pe, k_pe=k_pe, max_q_len=1)
    assert calls.refuses(call) is None
    calls.launch(call, torch.empty(2, 128, 512), None, 132)
    given = Recorded.last
    assert "partial_rows" in given
    assert (given["programs"], given["c"].programs_per_span, given["c"].schedule.page_size) == (132, 2, 16)
    assert (given["entries"], given["pages"], given["batch"], given["tokens"]) == (44, len(k), 2, 2)
    assert (given["k_page"], given["k_token"], given["k_pe_token"]) == (16 * 576, 576, 576)
    assert (given["q"].data_ptr(), given["q_pe"].data_ptr()) == (q.data_ptr(), q_pe.data_ptr())
    batch = latent_batch(128, torch.bfloat16, [5, 60], [640, 64], 16)
    q, q_pe = batch.q.split((512, 64), -1)
    call = Call(q, k, k, batch.qo, batch.kv, spec, q_pe=q_pe, k_pe=k_pe)
    calls.launch(call, torch.empty(65, 128, 512), None, 132)
    given = Recorded.last
    assert (given["programs"], given["slots"], given["c"].tile.rows, given["tokens"]) == (132, 264, 64, 65)
    assert given["partials"].numel() == 264 * 128 * 258
    call.k_pe = shifted(k_pe.contiguous())
    assert "aligned to 16 bytes" in calls.refuses(call)
    calls._launcher.cache_clear()


def test_latent_host_declines_unsupported_layers_with_a_reason():
    spec = attention_spec(num_qo_heads=128, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, latent=True)
    declines = hopper.mla_host.declines
    assert declines(spec, 1) is None
    for mask in ({"window_left": 3}, {"window_right": 3, "causal": False}, {"custom_mask": True}, {"items": True}):
        assert "no windows, nor masks but causal" in declines(spec.replace(**mask), 1)
    assert "torch.float8_e5m2" in declines(spec.replace(kv_dtype=torch.float8_e5m2), 1)
    assert "batch invariance" in declines(spec.replace(batch_invariant=True), 1)


def test_programs_per_span_of_few_and_many_rows_differ():
    """Few query rows by neighbouring programs, many one tile at a time."""
    spec = attention_spec(num_qo_heads=128, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, latent=True)
    programs = [hopper.mla_host.programs_per_span(spec, n) for n in (0, 1, 2, 3, 6, 7)]
    assert programs == [2, 2, 4, 6, 12, 7]
    assert hopper.mla_host.programs_per_span(spec.replace(num_qo_heads=16), 1) == 1
    many = [hopper.mla_host.has_many_rows(spec, tokens, 2) for tokens in (2, 8, 63, 64, 4096)]
    assert many == [False, False, False, True, True]
