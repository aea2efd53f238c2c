"""Every kernel family against the oracle. What must not be read is NaN, and so is every output before its call."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from helpers.families import (
    BOUNDS,
    DTYPES,
    FAMILIES,
    LAYERS,
    alone,
    check,
    compute,
    draw_scales,
    layer,
    move,
    oracle_result,
    spoil,
)
from helpers.interpret import INTERPRETED
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import PageTable, RaggedLayout, attention_spec
from quire.definition.pages import LengthTable
from quire.kernels import registry
from quire.kernels.call import Call


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.interpret(
    dtypes=DTYPES[:1],
    name=[x for x in LAYERS if any(y in x for y in ("default", "window", "alibi", "mask", "sinks"))],
)
@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{str(d[0])[6:]}-{str(d[1])[6:]}")
def test_family_of_random_batches_matches_the_oracle(family, dtypes, name, rng):
    """Requests that decode, verify a few tokens, prefill, or are empty; any heads, sizes, pages, layouts, scales."""
    spec, page_size = layer(rng, *dtypes, **LAYERS[name]), rng.choice((1, 3, 16, 64))
    per_head = rng.random() < 0.3, rng.random() < 0.3
    for _ in range(1 if INTERPRETED else 3):
        count = rng.randint(1, 4 if INTERPRETED else 6)
        kv_lens = [
            rng.choice((0, 1, 5, 33, 90) if INTERPRETED else (0, 1, 5, 33, 200, 700, 1500)) for _ in range(count)
        ]
        q_lens = [rng.choice((0, 1, 1, 1, 3, 20, 50 if INTERPRETED else 100)) for _ in kv_lens]
        # Errors of rounding average out over the rows of this request. Those of one row of 8 elements can be twice the
        # bound where its products with values cancel.
        kv_lens.append(33)
        q_lens.append(20)
        batch = random_batch(
            spec,
            q_lens,
            kv_lens,
            page_size,
            kv_layout=rng.choice(("NHD", "HND")),
            padding=rng.choice((0, 2)),
            **draw_scales(rng, spec, per_head),
        )
        check(batch, *compute(batch, family), family)


@pytest.mark.interpret(pos_encoding=["ROPE_LLAMA"], masks=[{"causal": False}, {"causal": False, "custom_mask": True}])
@pytest.mark.parametrize("masks", [{}, {"causal": False}, {"causal": False, "custom_mask": True}], ids=str)
@pytest.mark.parametrize("pos_encoding", ["NONE", "ROPE_LLAMA", "ALIBI"])
def test_family_with_more_queries_than_keys_matches_the_oracle(family, pos_encoding, masks, rng):
    """Positions of queries are negative before the first key, which queries that are not causal see all the same."""
    most = 8 if INTERPRETED else 40
    for window, invariant in ((-1, False), (rng.choice((0, 3, most)), False), (-1, True))[: 1 if INTERPRETED else 3]:
        dtype = torch.bfloat16 if family == "hopper" else torch.float32
        options = {"pos_encoding": pos_encoding, "window_left": window, "batch_invariant": invariant, **masks}
        spec = layer(rng, dtype, dtype, **options)
        kv_lens = [rng.choice((0, 1)), rng.randint(2, most), rng.randint(2, most)]
        q_lens = [rng.randint(2, 5), kv_lens[1] + 1, kv_lens[2] + rng.randint(2, most)]
        batch = random_batch(spec, q_lens, kv_lens, rng.choice((1, 16)))
        check(batch, *compute(batch, family), family)


@pytest.mark.parametrize("dim", [*range(8, 257, 24), 256, 512])
def test_family_of_each_head_dim_matches_the_oracle(family, dim, rng):
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=dim, q_dtype=torch.float32)
    batch = random_batch(spec, [1, 60], [77, 90], 16)
    check(batch, *compute(batch, family), family)


@pytest.mark.parametrize("dims", [(192, 128), (576, 512), (64, 256)])
def test_family_with_another_head_dim_of_values_matches_the_oracle(family, dims):
    spec = attention_spec(
        num_qo_heads=4, num_kv_heads=1, head_dim_qk=dims[0], head_dim_vo=dims[1], q_dtype=torch.float32
    )
    batch = random_batch(spec, [1, 40], [130, 50], 16)
    check(batch, *compute(batch, family), family)


def test_family_of_split_requests_matches_the_oracle(family, rng):
    """One long request over all threads, beside short ones; with a window, most of it is never touched."""
    long = 900 if INTERPRETED else 9000
    for window in (-1, long // 3):
        spec = layer(rng, torch.float32, torch.float32, window_left=window)
        batch = random_batch(spec, [1, 1, 2, 1], [long, 3, long // 2, 40], 16)
        if window >= 0:
            spare = batch.kv.indices[: (long - window - 1) // 16].long()
            batch.k[spare] = batch.v[spare] = torch.nan
            out, _ = compute(batch, family)
            assert not out.isnan().any()
            batch.k[spare] = batch.v[spare] = 0.0
        check(batch, *compute(batch, family), family)


@pytest.mark.interpret
def test_family_with_spare_pages_matches_the_oracle(family, rng):
    """Requests that own more pages than their keys fill, of which nothing is read."""
    spec = layer(rng, torch.bfloat16, torch.bfloat16)
    batch = random_batch(spec, [1, 30, 2, 1], [40, 70, 0, 5], 16, padding=1)
    spare, counts = [2, 0, 3, 1], batch.kv.indptr.diff().tolist()
    used = batch.kv.indices.split([*counts, len(batch.kv.indices) - sum(counts)])
    indices = torch.cat(
        [x for own, n in zip(used, spare, strict=False) for x in (own, torch.full((n,), 1 << 30).int())]
    )
    owned = torch.tensor(counts) + torch.tensor(spare)
    kv = object.__new__(PageTable)  # whose checks on the host would not have it
    last_page_len = batch.kv.lengths() - (owned - 1).int() * 16
    indptr = torch.tensor([0, *owned.tolist()]).cumsum(0).int()
    kv.__dict__.update(indptr=indptr, indices=indices, last_page_len=last_page_len, page_size=16)
    check(batch, *compute(batch, family, kv=kv), family)


@pytest.mark.interpret
def test_family_over_ragged_rows_matches_the_oracle(family, rng):
    spec = layer(rng, torch.bfloat16, torch.bfloat16)
    batch = random_batch(spec, [1, 70, 5], [30, 70, 0], 16)
    k, v, indptr = batch.rows()
    check(batch, *compute(batch, family, k=k, v=v, kv=RaggedLayout(indptr)), family)


@pytest.mark.interpret
def test_family_over_a_length_table_matches_the_oracle(family, rng):
    """Lengths in place of those of last pages, with pages to spare, and too long for what pages there are."""
    spec = layer(rng, torch.bfloat16, torch.bfloat16)
    batch = random_batch(spec, [1, 40, 3, 1, 1], [30, 90, 70, 0, 20], rng.choice((3, 16)))
    kv = batch.kv
    shorter = torch.tensor([rng.randint(1, n) if n else 0 for n in kv.lengths().tolist()], dtype=torch.int32)
    given = LengthTable.of(kv.indptr, kv.indices, shorter, kv.page_size, "kv_lens")
    trimmed = PageTable.from_lengths(kv.indptr, kv.indices, shorter, kv.page_size)
    check(replace(batch, kv=trimmed), *compute(batch, family, kv=given), family)
    batch = random_batch(spec, [1, 3], [32, 96], 16)
    given = LengthTable.of(batch.kv.indptr, batch.kv.indices, torch.tensor([1 << 30, 97]).int(), 16, "kv_lens")
    check(batch, *compute(batch, family, kv=given), family)


@pytest.mark.interpret
def test_family_with_strided_tensors_matches_the_oracle(family, rng):
    """q as a slice of a fused projection, out as a slice of a larger buffer, k and v with different strides."""
    spec = layer(rng, torch.bfloat16, torch.bfloat16)
    batch = random_batch(spec, [1, 70, 4], [30, 90, 5], 16)
    fused = torch.full((len(batch.q), spec.num_qo_heads + 3, spec.head_dim_qk), torch.nan).bfloat16()
    q = fused[:, 1 : 1 + spec.num_qo_heads]
    q.copy_(batch.q)
    wide = torch.full((*batch.v.shape[:3], spec.head_dim_vo + 8), torch.nan).bfloat16()
    v = wide[..., 8:]
    v.copy_(batch.v)
    buffer = torch.full((len(q), spec.num_qo_heads + 1, spec.head_dim_vo), 7.0).bfloat16()
    lse = torch.empty(spec.num_qo_heads, len(q)).T
    device = "cuda" if family == "triton" and not INTERPRETED else "cpu"
    fused, wide, buffer, lse = (x.to(device) for x in (fused, wide, buffer, lse.T))
    lse, rest = lse.T, (move(x, device) for x in (batch.qo, batch.kv))
    call = Call(fused[:, 1 : 1 + spec.num_qo_heads], batch.k.to(device), wide[..., 8:], *rest, spec)
    registry.admit(call, family).attend(call, buffer[:, 1:], lse)
    check(batch, buffer[:, 1:].cpu(), lse.cpu(), family)
    assert (buffer[:, 0] == 7.0).all()


def test_family_with_each_output_dtype_matches_the_oracle(family, rng):
    small = 1e-6 if family == "cpu" else 3e-3  # weights are float32, or bf16 like the cache
    for dtype, bound in ((torch.float32, small), (torch.float16, max(small, 3.5e-4)), (torch.float8_e4m3fn, 0.05)):
        spec = layer(rng, torch.bfloat16, torch.bfloat16, o_dtype=dtype)
        batch = random_batch(spec, [1, 40], [30, 90], 16)
        out, _ = compute(batch, family)
        assert out.dtype == dtype
        assert relative_error(out.float(), oracle_result(batch)[0]) < bound


@pytest.mark.interpret
def test_family_with_scales_per_query_head_matches_the_oracle(family, rng):
    spec = layer(rng, torch.float32, torch.float32)
    batch = random_batch(spec, [1, 40], [30, 90], 16)
    scale = torch.rand(spec.num_qo_heads) + 0.5
    out, _ = compute(batch, family, q_scale=scale)
    scaled = Batch(spec, batch.q * scale[:, None], batch.k, batch.v, batch.qo, batch.kv)
    assert relative_error(out, oracle_result(scaled)[0]) < BOUNDS[family][torch.float32]


def test_family_of_more_heads_than_rows_of_a_tile_matches_the_oracle(family):
    spec = attention_spec(num_qo_heads=300, num_kv_heads=1, head_dim_qk=16, q_dtype=torch.float32)
    batch = random_batch(spec, [1, 3], [30, 40], 16)
    check(batch, *compute(batch, family), family)


def test_family_with_a_negative_scale_matches_the_oracle(family, rng):
    spec = layer(rng, torch.float32, torch.float32)
    batch = random_batch(spec, [1, 20], [30, 90], 16)
    k_scale = torch.rand(spec.num_kv_heads) + 0.5
    out, _ = compute(batch, family, q_scale=-1.0, k_scale=k_scale)
    turned = Batch(spec, -batch.q, batch.k, batch.v, batch.qo, batch.kv, k_scale=k_scale)
    assert relative_error(out, oracle_result(turned)[0]) < BOUNDS[family][torch.float32]


def test_family_with_alibi_slopes_matches_the_oracle(family, rng):
    slopes = tuple(rng.uniform(-0.2, 0.2) for _ in range(6))
    for q_len in (1, 30):
        spec = attention_spec(
            num_qo_heads=6, num_kv_heads=2, head_dim_qk=16, q_dtype=torch.float32, pos_encoding="ALIBI", slopes=slopes
        )
        batch = random_batch(spec, [q_len, 1], [60, 90], 16)
        check(batch, *compute(batch, family), family)
        usual = replace(batch, spec=spec.replace(slopes=()))
        assert relative_error(oracle_result(usual)[0], oracle_result(batch)[0]) > 1e-3


def test_family_with_rope_of_far_positions_matches_the_oracle(family):
    """Angles of positions beyond 60,000, for which float32 has no digits left behind the point's third."""
    spec = attention_spec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=16, q_dtype=torch.float32, pos_encoding="ROPE_LLAMA", window_left=30
    )
    length = 900 if INTERPRETED else 65_000
    batch = random_batch(spec, [1], [length], 64)
    check(batch, *compute(batch, family), family)


@pytest.mark.interpret(dtypes=DTYPES[:1], name=["default", "window", "sinks"])
@pytest.mark.parametrize(
    "dtypes", DTYPES if torch.cuda.is_available() else DTYPES[:1], ids=lambda d: f"{str(d[0])[6:]}-{str(d[1])[6:]}"
)
@pytest.mark.parametrize("name", ["default", "window", "soft cap", "rope", "sinks"])
def test_family_batch_invariant_has_equal_bits_in_any_batch(family, name, dtypes, products_in_order, rng):
    """Batch-invariant: decoded one by one, in chunks or whole, alone or among others, at any place."""
    spec = layer(rng, *dtypes, o_dtype=torch.float32, batch_invariant=True, **LAYERS[name])
    if registry.why_not(family, spec, torch.device("cpu" if INTERPRETED or family == "cpu" else "cuda")):
        pytest.skip("the family is not batch-invariant")
    if INTERPRETED:
        spec = spec.replace(num_qo_heads=spec.group_size, num_kv_heads=1)
    kv_lens = [rng.randint(1, 150), rng.randint(1100, 1400), 1] if not INTERPRETED else [20, 70, 1]
    q_lens = [kv_lens[0], rng.randint(200, 300) if not INTERPRETED else 41, 1]
    batch = random_batch(spec, q_lens, kv_lens, 16)
    out, lse = compute(batch, family)
    check(batch, out, lse, family)
    for b, begin, end in ((0, 0, q_lens[0]), (1, 3, 40), (1, q_lens[1] - 1, q_lens[1]), (1, 17, 18), (2, 0, 1)):
        part = alone(batch, b, begin, end)
        rows = slice(int(batch.qo.indptr[b]) + begin, int(batch.qo.indptr[b]) + end)
        for known in {0, end - begin}:
            chunk, chunk_lse = compute(part, family, max_q_len=known)
            assert torch.equal(chunk, out[rows]), (b, begin, end, known)
            assert torch.equal(chunk_lse, lse[rows])


def test_family_called_again_has_equal_bits(family, rng):
    spec = layer(rng, torch.float32, torch.float32)
    batch = random_batch(spec, [1, 1, 40, 1], [300 if INTERPRETED else 3000, 20, 90, 1], 16)
    first = compute(batch, family)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, compute(batch, family), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_cpu_family_with_any_number_of_threads_matches_the_oracle(threads, rng):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        batch = random_batch(layer(rng, torch.float32, torch.float32), [1, 1, 90], [3000, 20, 90], 16)
        check(batch, *compute(batch, "cpu"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.interpret
def test_family_with_invalid_tables_reads_inside_the_tensors(family, rng):
    """Tables are read when attention runs. Whatever they say then, they are bounded by the tensors they index."""
    batch = random_batch(layer(rng, torch.float32, torch.float32), [1, 40], [64, 64], 16)
    expected = spoil(batch)
    check(expected, *compute(batch, family), family)


@pytest.mark.interpret
def test_triton_run_of_overlapping_tables_writes_inside_its_workspace():
    """Requests whose tables overlap have more keys together, and so more partial states, than a plan can know of."""
    triton = pytest.importorskip("quire.kernels.triton.host").FAMILY
    device = torch.device("cpu" if INTERPRETED else "cuda", None if INTERPRETED else 0)
    if triton.why_not(attention_spec(num_qo_heads=1, num_kv_heads=1, head_dim_qk=16), device) or not (
        INTERPRETED or torch.cuda.is_available()
    ):
        pytest.skip("there is no GPU")
    spec = attention_spec(num_qo_heads=2, num_kv_heads=1, head_dim_qk=16, q_dtype=torch.float32, batch_invariant=True)
    batch = random_batch(spec, [1] * 6, [2300, 1, 1, 1, 1, 1], 16)
    every = int(batch.kv.indptr[-1])
    batch.kv.indptr.copy_(torch.tensor([0, every, 0, every, 0, every, 0]))
    size = triton.float_workspace_size(spec, device, 1, 6, every * 16) // 4
    scratch = torch.full((size + 100_000,), 7.0, device=device)
    compute(batch, "triton", max_q_len=1, float_workspace=scratch)
    assert (scratch[size:] == 7).all()
    assert not (scratch[:size] == 7).all()


@pytest.mark.interpret
def test_family_with_tables_changed_in_place_reads_them(family):
    """A table whose contents changed since it was made is read anew: what CUDA graphs need, on any device."""
    spec = attention_spec(num_qo_heads=2, num_kv_heads=1, head_dim_qk=16, q_dtype=torch.float32)
    batch = random_batch(spec, [1, 1], [20, 7], 16)
    table = PageTable(batch.kv.indptr.clone(), batch.kv.indices, batch.kv.last_page_len.clone(), 16)
    table.last_page_len[0] -= 2
    shorter = Batch(spec, batch.q, batch.k, batch.v, batch.qo, table)
    check(shorter, *compute(shorter, family), family)
    table.last_page_len[0] += 2
    check(batch, *compute(batch, family, kv=table), family)


def test_registry_choose_without_a_family_names_the_reasons():
    spec = attention_spec(num_qo_heads=2, num_kv_heads=1, head_dim_qk=16, q_dtype=torch.float32)
    assert registry.choose(spec, torch.device("cpu")).name == "cpu"
    assert registry.choose(spec, torch.device("cpu"), "fa3").name == "cpu"
    assert registry.choose(spec, torch.device("cuda"), "reference").name == "reference"
    with pytest.raises(
        ValueError,
        match=r"no kernels .* on meta: cpu: it computes on the CPU, not on meta; hopper: it needs a Hopper GPU; "
        r"triton: it ",
    ):
        registry.choose(spec, torch.device("meta"))
    with pytest.raises(ValueError, match=r"backend = 'fa9' is unknown: auto, cpu, hopper, triton, reference"):
        registry.choose(spec, torch.device("cpu"), "fa9")


def test_call_that_one_family_refuses_is_computed_by_the_next(rng, monkeypatch):
    """With "auto" the next family computes the call; a family that `backend` names raises with its reason."""
    real = registry.family
    picky = SimpleNamespace(
        name="cpu", why_not=lambda *given: None, refuses=lambda call: "its tensors are odd", attend=None
    )
    monkeypatch.setattr(registry, "family", lambda name: picky if name == "cpu" else real(name))
    monkeypatch.setattr(registry, "FAMILIES", {"cpu": "", "other": "quire.kernels.reference"})
    registry.choose.cache_clear()
    batch = random_batch(layer(rng, torch.float32, torch.float32), [1, 4], [9, 9], 4)
    try:
        with pytest.warns(UserWarning, match="cpu does not compute a call, .*: its tensors are odd"):
            result = compute(batch, "auto")
        check(batch, *result)
        with pytest.raises(ValueError, match="no kernels for this call: cpu: its tensors are odd"):
            compute(batch, "cpu")
    finally:
        registry.choose.cache_clear()


def test_reference_family_equals_sdpa_of_torch(rng):
    """This family is the oracle, so it is compared with torch's attention over the rows of each request."""
    spec, q_lens, kv_lens = layer(rng, torch.float32, torch.float32, causal=False), [1, 4], [9, 7]
    batch = random_batch(spec, q_lens, kv_lens, 4)
    out, lse = compute(batch, "reference")
    k, v, _ = batch.rows()
    lengths = (q_lens, kv_lens, kv_lens, q_lens, q_lens)
    for request in zip(*(x.split(n) for x, n in zip((batch.q, k, v, out, lse), lengths, strict=True)), strict=True):
        q, k, v, result, result_lse = (x.double().transpose(0, 1) for x in request)
        exact = F.scaled_dot_product_attention(q, k, v, scale=spec.sm_scale, enable_gqa=True)
        logits = q @ k.repeat_interleave(spec.group_size, 0).transpose(1, 2) * spec.sm_scale
        torch.testing.assert_close(result, exact, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result_lse, logits.logsumexp(-1) / math.log(2), rtol=1e-6, atol=1e-6)
