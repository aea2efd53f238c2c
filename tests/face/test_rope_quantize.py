"""Heads rotated and rounded to fp8, also into pages, against torch's rounding of float64 results."""

from __future__ import annotations

import pytest
import torch

import quire
from helpers.rotary import turned
from quire import rope
from quire.bench.batches import random_table

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP8 = pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)


def rounded(x, scale, fp8):
    largest = torch.finfo(fp8).max
    return (x.float() * scale).clamp(-largest, largest).to(fp8).float()


def check_rounded(result, x, scale, fp8, exact=True):
    """Equal, NaN where NaN; rotated numbers may fall to the other side of a tie in one of some hundred numbers."""
    result, expected = result.cpu().float(), rounded(x.cpu(), scale, fp8)
    if not exact:
        torch.testing.assert_close(result, expected, rtol=0.26, atol=2**-9)
        assert (result != expected).float().mean() < 0.01
    else:
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def batch(rng, device, one_head, rope_dim, rest, tokens=13, dtype=torch.float32):
    """q, k and v, with heads of rope_dim + rest, a cos_sin_cache, positions and the cache's angles there."""
    q_heads, k_heads = rng.choice([(4, 2), (7, 1), (16, 16)])
    q, v = torch.randn(tokens, q_heads, rope_dim + rest), torch.randn(tokens, k_heads, rope_dim + rest)
    k = torch.randn(tokens, rope_dim + rest) if one_head else torch.randn_like(v)
    angles = torch.rand(50, rope_dim // 2, dtype=torch.float64) * 7
    cache = torch.cat([angles.cos(), angles.sin()], 1).float()
    positions = torch.randint(50, (tokens,), dtype=rng.choice((torch.int32, torch.int64)))
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, k, v, cache.to(device), positions.to(device), angles[positions.long()]


def expected_turned(x, angles, interleave):
    return turned(x if x.ndim == 3 else x.unsqueeze(1), angles, interleave).reshape(x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_head", [False, True], ids=["heads", "mla"])
@pytest.mark.parametrize("is_neox", [False, True])
@FP8
def test_rope_quantize_of_parts_matches_float64(fp8, is_neox, one_head, device, rng):
    rope_dim, rest = rng.choice((8, 48, 64)), rng.choice((0, 40, 96))
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    q, k, _, cache, positions, angles = batch(rng, device, one_head, rope_dim, rest, dtype=dtype)
    scales = (rng.choice((1.0, 0.3)), rng.choice((1.0, 50.0)))
    parts = [x for y in (slice(rope_dim), slice(rope_dim, None)) for x in (q[..., y], k[..., y])]
    given = parts if rest or rng.random() < 0.5 else [*parts[:2], None, None]
    outs, named = None, {}
    if rng.random() < 0.5:
        outs = [torch.full(x.shape, torch.nan, device=device).to(fp8) for x in (q, k)]
        names = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")
        views = [x for y in (slice(rope_dim), slice(rope_dim, None)) for x in (outs[0][..., y], outs[1][..., y])]
        named = dict(zip(names, views, strict=True))
    call = rng.choice((rope.rope_quantize_fp8, rope.mla_rope_quantize_fp8))
    results = call(*given, cache, positions, is_neox, fp8, *scales, **named)
    for result, x in zip(results, parts, strict=True):
        assert result.dtype == fp8
        assert result.shape == x.shape
    for i, (x, scale) in enumerate(zip((q, k), scales, strict=True)):
        check_rounded(results[i], expected_turned(x, angles, not is_neox)[..., :rope_dim], scale, fp8, exact=False)
        check_rounded(results[i + 2], parts[i + 2], scale, fp8)
        if outs:
            assert results[i].data_ptr() == outs[i].data_ptr()


@pytest.mark.interpret(fp8=[torch.float8_e5m2])
@pytest.mark.parametrize("device", DEVICES)
@FP8
def test_rope_quantize_of_every_float16_equals_torch(fp8, device):
    """NaN, infinity, what is too large, and numbers below the normal ones of fp8 among them."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(device)
    rest, zero = halves.view(64, 1, 1024), torch.zeros(64, 1, 2, dtype=torch.float16, device=device)
    cache, positions = torch.ones(1, 2, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    results = rope.rope_quantize_fp8(zero, zero, rest, rest, cache, positions, True, fp8, 1.0, 0.007)
    check_rounded(results[2], rest, 1.0, fp8)
    check_rounded(results[3], rest, 0.007, fp8)


@pytest.mark.interpret(fp8=[torch.float8_e4m3fn])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "mla"])
@FP8
def test_rope_quantize_append_matches_float64(fp8, layout, device, rng):
    rope_dim, rest, page_size = rng.choice((8, 64)), rng.choice((0, 40)), rng.choice((1, 4, 16))
    lengths = [rng.randrange(1, 40) for _ in range(4)]
    table, pool = random_table(lengths, page_size)
    places = [(b, p) for b, n in enumerate(lengths) for p in rng.sample(range(n), min(n, 4))] + [(-1, 0), (-1, 5)]
    requests, slots = torch.tensor(places, dtype=torch.int32).T.contiguous()
    q, k, v, cache, positions, angles = batch(rng, device, layout == "mla", rope_dim, rest, len(places))
    dim, heads = rope_dim + rest, v.shape[1]
    shapes = {
        "NHD": [(pool, page_size, heads, dim)] * 2,
        "HND": [(pool, heads, page_size, dim)] * 2,
        "mla": [(pool, page_size, rest), (pool, page_size, rope_dim)],
    }
    pages = [torch.full(x, torch.nan, device=device).to(fp8) for x in shapes[layout]]
    nope = (q[..., rope_dim:], k[..., rope_dim:]) if rest else (None, None)
    where = [x.to(device) for x in (table.indices, table.indptr, requests, slots)]
    results = rope.rope_quantize_fp8_append_paged_kv_cache(
        q[..., :rope_dim], k[..., :rope_dim], *nope, None if layout == "mla" else v, cache, positions, tuple(pages),
        *where, True, fp8, 0.5, 2.0, page_size, "NHD" if layout == "mla" else layout,
    )  # fmt: skip
    expected_q, expected_k = expected_turned(q, angles, False), expected_turned(k, angles, False)
    check_rounded(results[0], expected_q[..., :rope_dim], 0.5, fp8, exact=False)
    check_rounded(results[1], expected_q[..., rope_dim:], 0.5, fp8)
    first, second = (x.cpu().float().transpose(1, 2) if layout == "HND" else x.cpu().float() for x in pages)
    stored_k, stored_v = (torch.cat([second, first], -1), None) if layout == "mla" else (first, second)
    kept = requests >= 0
    page = table.indices[table.indptr[requests[kept].long()] + slots[kept] // page_size].long()
    slot = (slots[kept] % page_size).long()
    check_rounded(stored_k[page, slot][..., :rope_dim], expected_k[kept][..., :rope_dim], 2.0, fp8, exact=False)
    check_rounded(stored_k[page, slot][..., rope_dim:], expected_k[kept][..., rope_dim:], 2.0, fp8)
    if stored_v is not None:
        check_rounded(stored_v[page, slot], v.cpu()[kept], 2.0, fp8)
    stored_k[page, slot] = torch.nan
    assert stored_k.isnan().all(), "nothing else was written"


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_rope_quantize_equals_eager(device, rng):
    q, k, v, cache, positions, _ = batch(rng, device, False, 8, 8, 5)
    table = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((1, 0), (0, 2), (0,) * 5, range(5))]

    def step(q, k, v, k_cache, v_cache):
        parts = (q[..., :8], k[..., :8], q[..., 8:], k[..., 8:])
        out = rope.rope_quantize_fp8(*parts, cache, positions)
        appended = rope.rope_quantize_fp8_append_paged_kv_cache(
            *parts, v, cache, positions, (k_cache, v_cache), *table, page_size=4
        )
        return *out, *appended

    def pages():
        return [torch.zeros(2, 4, *v.shape[1:], device=device).to(torch.float8_e4m3fn) for _ in range(2)]

    torch.compiler.reset()
    here, there = pages(), pages()
    expected, results = step(q, k, v, *here), torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, *there)
    for a, b in zip((*expected, *here), (*results, *there), strict=True):
        assert torch.equal(a.float(), b.float())
    assert here[0].float().any()


@pytest.mark.parametrize("device", DEVICES)
def test_rotate_quantized_passes_opcheck(device, rng):
    q, k, _, cache, positions, _ = batch(rng, device, False, 8, 8, 5)
    ins = (q[..., :8].contiguous(), q[..., 8:].contiguous(), k[..., :8].contiguous(), k[..., 8:].contiguous())
    outs = [torch.zeros(x.shape, device=device).to(torch.float8_e5m2) for x in ins]
    args = (*outs, None, *ins, None, positions, cache, None, None, None, None, True, 1.0, 1.0)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # the other sums up fp8
    torch.library.opcheck(torch.ops.quire.rotate_quantized.default, args, test_utils=checks)


@pytest.mark.gpu
def test_rope_quantize_append_with_tables_that_lead_outside_writes_nothing(rng):
    q, k, v, cache, positions, _ = batch(rng, "cuda", False, 8, 8, 5)
    pages = tuple(torch.zeros(2, 4, *v.shape[1:], device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    table = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((1, 1 << 30), (0, 2))]
    requests, places = torch.tensor([0, 1, 1 << 30, 0, 0]).int().cuda(), torch.tensor([8, 0, 0, -1, 4]).int().cuda()
    rope.rope_quantize_fp8_append_paged_kv_cache(
        q[..., :8],
        k[..., :8],
        q[..., 8:],
        k[..., 8:],
        v,
        cache,
        positions,
        pages,
        *table,
        requests,
        places,
        page_size=4,
    )
    assert not pages[0].float().any()
    assert not pages[1].float().any()


BAD = [
    ({"q_nope": torch.zeros(3, 1, 4)}, r"q_nope has shape \[3, 1, 4\]: it must be \[3, 2, any\]"),
    ({"k_nope": torch.zeros(3, 1, 2)}, r"k_nope has shape \[3, 1, 2\]: it must be \[3, 1, 4\]"),
    ({"k_rope": torch.zeros(3, 1, 4)}, r"k_rope has shape \[3, 1, 4\]"),
    ({"cos_sin_cache": torch.zeros(5, 6)}, r"cos_sin_cache has shape \[5, 6\]: it must be \[any, rope_dim = 8\]"),
    ({"cos_sin_cache": torch.zeros(5, 8).double()}, r"cos_sin_cache is torch.float64"),
    ({"pos_ids": torch.tensor([0, 1, 5])}, r"positions\[2\] = 5 is out of range"),
    ({"quantize_dtype": torch.float16}, r"quantize_dtype = torch.float16 is not supported"),
    ({"q_rope_out": torch.zeros(3, 2, 8)}, r"quantize_dtype = torch.float32 is not supported"),
    ({"q_nope_out": torch.zeros(3, 2, 8).to(torch.float8_e5m2)}, r"q_nope_out has shape \[3, 2, 8\]"),
]


def good():
    heads = {"q_rope": torch.ones(3, 2, 8), "k_rope": torch.ones(3, 1, 8), "q_nope": torch.ones(3, 2, 4)}
    return {**heads, "k_nope": torch.ones(3, 1, 4), "cos_sin_cache": torch.ones(5, 8), "pos_ids": torch.arange(3)}


@pytest.mark.parametrize(("change", "message"), [*BAD, ({"backend": "cuitle"}, r"backend = 'cuitle'")])
def test_rope_quantize_with_wrong_arguments_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rope.rope_quantize_fp8(**{**good(), **change})


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *BAD,
        ({"v": None}, r"v is None"),
        ({"v": torch.ones(2, 1, 12)}, r"v has shape \[2, 1, 12\]: it must be \[3, 1, any\]"),
        ({"page_size": 8}, r"k_cache has shape \[2, 4, 1, 12\]: it must be \[any, 8, 1, 12\]"),
        ({"kv_layout": "HDN"}, r"kv_layout = 'HDN'"),
        ({"paged_kv_cache": torch.ones(2, 2)}, r"paged_kv_cache must be a pair"),
        ({"quantize_dtype": torch.float8_e5m2}, r"k_cache is torch.float8_e4m3fn: it must be torch.float8_e5m2"),
        ({"k_rope": torch.ones(3, 8), "k_nope": torch.ones(3, 4)}, r"v has shape .* it must be None"),
        ({"positions": ints(0, 8, 1)}, r"positions\[1\] = 8 .* request 0, which has pages for 8"),
        ({"batch_indices": ints(0, 0, 1)}, r"names request 1: there are 1"),
        ({"kv_indices": ints(1, 2)}, r"kv_indices\[1\] = 2 of request 0"),
    ],
)
def test_rope_quantize_append_with_wrong_arguments_is_refused_and_writes_nothing(change, message):
    pages = tuple(torch.zeros(2, 4, 1, 12).to(torch.float8_e4m3fn) for _ in range(2))
    given = {**good(), "v": torch.ones(3, 1, 12), "paged_kv_cache": pages, "kv_indices": ints(1, 0), "page_size": 4}
    given |= {"kv_indptr": ints(0, 2), "batch_indices": ints(0, 0, 0), "positions": ints(0, 1, 2)}
    with pytest.raises(ValueError, match=message):
        rope.rope_quantize_fp8_append_paged_kv_cache(**{**given, **change})
    assert not any(x.float().any() for x in pages)


def test_rope_module_is_an_attribute_of_quire():
    assert quire.rope is rope
