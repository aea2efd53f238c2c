"""Heads normalised, rotated and appended in one operation, against the definitions of its parts in float64."""

from __future__ import annotations

import pytest
import torch

from helpers.rotary import turned
from helpers.rounding import check_fp8, check_rounded
from quire.bench.batches import random_table
from quire.norm import fused_qk_rmsnorm_rope_append_paged_kv_cache as fused

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = 1e-6  # of float32
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
devices = pytest.mark.parametrize("device", DEVICES)


class Case:
    """q, k and v, views of one projection, pages of NaN, and where each token goes."""

    def __init__(self, rng, device, dtype, cache_dtype, layout, heads=None, dims=None):
        q_heads, kv_heads = heads or rng.choice([(4, 2), (7, 1), (3, 5), (16, 16), (28, 4)])
        dim, dim_v, rotary_dim = dims or rng.choice(
            [(64, 64, 64), (128, 128, 128), (80, 40, 48), (96, 96, 32), (24, 8, 2)]
        )
        lengths, page_size = [rng.randrange(1, 40) for _ in range(4)], rng.choice((1, 4, 16))
        self.table, pool = random_table(lengths, page_size)
        places = [(b, p) for b, n in enumerate(lengths) for p in rng.sample(range(n), min(n, 3))] + [(-1, 0), (-1, 5)]
        rng.shuffle(places)
        self.requests, self.positions = torch.tensor(places, dtype=torch.int32).T.contiguous()
        widths = [q_heads * dim, kv_heads * dim, kv_heads * dim_v]
        packed = torch.randn(len(places), sum(widths) + 8).to(device, dtype)
        parts = packed.split([*widths, 8], -1)[:3]
        self.q, self.k, self.v = (
            x.unflatten(-1, (n, -1)) for x, n in zip(parts, (q_heads, kv_heads, kv_heads), strict=True)
        )
        self.angles = torch.rand(50, rotary_dim // 2, dtype=torch.float64) * 7
        self.cos_sin = torch.cat([self.angles.cos(), self.angles.sin()], 1).float().to(device)
        self.pos_ids = torch.randint(50, (len(places),), dtype=rng.choice((torch.int32, torch.int64)))
        shapes = [(pool, page_size, kv_heads, dim), (pool, page_size, kv_heads, dim_v)]
        self.pages = [torch.full(x, torch.nan, device=device).to(cache_dtype) for x in shapes]
        self.cache = tuple(x.transpose(1, 2).contiguous() if layout == "HND" else x for x in self.pages)
        self.layout, self.page_size, self.device = layout, page_size, device

    def slots(self):
        """Of each token; negative for those that are not appended."""
        entry = self.table.indptr[self.requests.clamp(min=0).long()] + self.positions // self.page_size
        found = self.table.indices[entry.clamp(max=len(self.table.indices) - 1).long()] * self.page_size
        return torch.where(self.requests >= 0, found + self.positions % self.page_size, -1 - self.positions)

    def where(self, by_slots, dtype):
        if by_slots:
            return {"slots": self.slots().to(self.device, dtype)}
        tables = {"batch_indices": self.requests, "positions": self.positions}
        tables |= {"kv_indices": self.table.indices, "kv_indptr": self.table.indptr}
        return {name: x.to(self.device, dtype) for name, x in tables.items()}

    def stored(self):
        """Keys and values of the tokens that have a slot; and check that nothing else was written."""
        caches = [x.transpose(1, 2) if self.layout == "HND" else x for x in self.cache]
        kept = self.requests >= 0
        slots = self.slots()[kept].long()
        found = []
        for cache in caches:
            flat = cache.cpu().float().flatten(0, 1)
            found.append(flat[slots])
            flat[slots] = torch.nan
            assert flat.isnan().all(), "nothing else was written"
        return *found, kept

    def exact(self, x, weight, bias, eps, interleave):
        x = x.double().cpu()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double().cpu() + bias)
        return turned(x, self.angles[self.pos_ids.long()], interleave)


@pytest.mark.interpret
@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("by_slots", [False, True], ids=["table", "slots"])
def test_norm_rope_append_equals_its_parts_in_turn(by_slots, layout, dtype, device, rng):
    case, is_neox = Case(rng, device, dtype, dtype, layout), rng.random() < 0.5
    weights = [rng.choice((None, torch.randn(case.q.shape[-1]).to(rng.choice(DTYPES)).to(device))) for _ in "qk"]
    bias, eps = rng.choice((0.0, 1.0)), rng.choice((1e-6, 0.1))
    expected = [case.exact(x, w, bias, eps, not is_neox) for x, w in zip((case.q, case.k), weights, strict=True)]
    values, k = case.v.cpu().double(), case.k.clone()
    q_out = rng.choice((None, case.q, torch.full_like(case.q, torch.nan)))
    result = fused(
        case.q, case.k, case.v, *weights, case.cos_sin, case.pos_ids.to(device), case.cache, is_neox=is_neox, eps=eps,
        weight_bias=bias, kv_layout=layout, q_out=q_out, **case.where(by_slots, rng.choice((torch.int32, torch.int64))),
    )  # fmt: skip
    assert q_out is None or result is q_out
    check_rounded(result, expected[0], dtype, PRECISION)
    stored_k, stored_v, kept = case.stored()
    check_rounded(stored_k.to(dtype), expected[1][kept], dtype, PRECISION)
    torch.testing.assert_close(stored_v.double(), values[kept], rtol=0, atol=0)
    assert torch.equal(case.k, k)


@pytest.mark.interpret
@devices
@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("by_slots", [False, True], ids=["table", "slots"])
def test_norm_rope_append_to_an_fp8_cache_matches_float64(by_slots, fp8, device, rng):
    case = Case(rng, device, rng.choice(DTYPES), fp8, rng.choice(("NHD", "HND")))
    weight = torch.randn(case.q.shape[-1], device=device)
    numbers = rng.choice((0.01, 1.0, 3.0)), rng.choice((0.01, 1.0, 3.0))
    scales = [rng.choice((x, torch.tensor(x, device=device), torch.tensor([x], device=device))) for x in numbers]
    fused(
        case.q, case.k, case.v, weight, weight, case.cos_sin, case.pos_ids.to(device), case.cache,
        k_scale=scales[0], v_scale=scales[1], kv_layout=case.layout, **case.where(by_slots, torch.int32),
    )  # fmt: skip
    stored_k, stored_v, kept = case.stored()
    check_fp8(stored_k.to(fp8), case.exact(case.k, weight, 0.0, 1e-6, False)[kept], numbers[0])
    check_fp8(stored_v.to(fp8), case.v.cpu().double()[kept], numbers[1])


@devices
def test_norm_rope_append_of_no_tokens_is_empty(device):
    q, k = torch.zeros(0, 4, 8, device=device), torch.zeros(0, 2, 8, device=device)
    cache, none = torch.zeros(3, 2, 4, 2, 8, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    assert fused(q, k, k, None, None, torch.ones(5, 8, device=device), none, cache, slots=none).shape == q.shape


@devices
def test_compiled_norm_rope_append_equals_eager(device, rng):
    case = Case(rng, device, torch.float32, torch.float32, "NHD", (4, 2), (16, 16, 16))
    weight, where, packed = (
        torch.randn(16, device=device),
        case.where(False, torch.int32),
        torch.randn(len(case.q), 8, 16),
    )

    def step(packed, pos_ids, k_cache, v_cache):
        q, k, v = packed.split((4, 2, 2), 1)
        return fused(q, k, v, weight, weight, case.cos_sin, pos_ids, (k_cache, v_cache), **where)

    given = packed.to(device), case.pos_ids.to(device)
    here, there = ([torch.zeros_like(x) for x in case.cache] for _ in range(2))
    torch.compiler.reset()
    expected, result = step(*given, *here), torch.compile(step, fullgraph=True, backend="aot_eager")(*given, *there)
    for a, b in zip((expected, *here), (result, *there), strict=True):
        assert torch.equal(a, b)
    assert here[0].any()


@devices
def test_norm_rope_append_passes_opcheck(device, rng):
    case = Case(rng, device, torch.float32, torch.float32, "NHD", (4, 2), (16, 16, 16))
    pages, inputs = [torch.zeros_like(x) for x in case.cache], [x.contiguous() for x in (case.q, case.k, case.v)]
    weight, where = torch.randn(16, device=device), case.slots().to(device)
    args = (torch.zeros_like(inputs[0]), *pages, *inputs, weight, weight, case.cos_sin, case.pos_ids.to(device), where)
    args += (None,) * 6 + (1.0, 1.0, 1e-6, 0.0, False)
    torch.library.opcheck(torch.ops.quire.norm_rotate_append.default, args)


@pytest.mark.gpu
def test_norm_rope_append_with_places_outside_writes_nothing(rng):
    case = Case(rng, "cuda", torch.bfloat16, torch.bfloat16, "NHD", (4, 2), (64, 64, 64))
    given = (case.q, case.k, case.v, None, None, case.cos_sin, case.pos_ids.cuda(), case.cache)
    fused(*given, slots=torch.full((len(case.q),), len(case.cache[0]) * case.page_size, device="cuda"))
    where = case.where(False, torch.int32)
    fused(*given, **where | {"kv_indices": torch.full_like(where["kv_indices"], 1 << 30)})
    fused(*given, **where | {"positions": torch.full_like(where["positions"], 1 << 30)})
    assert all(x.isnan().all() for x in case.cache)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(3, 2, 8).double()}, r"q.dtype = torch.float64"),
        ({"q": torch.ones(3, 2, 8, requires_grad=True)}, r"q requires grad"),
        ({"k": torch.ones(3, 1, 6)}, r"k has shape \[3, 1, 6\]: it must be \[3, any, 8\]"),
        ({"k": torch.ones(3, 1, 8).half()}, r"k is torch.float16: it must be torch.float32"),
        ({"v": torch.ones(3, 2, 8)}, r"v has shape \[3, 2, 8\]: it must be \[3, 1, any\]"),
        ({"q_weight": torch.ones(7)}, r"q_weight has shape \[7\]: it must be \[8\]"),
        ({"k_weight": torch.ones(8).double()}, r"k_weight.dtype = torch.float64"),
        ({"cos_sin_cache": torch.ones(5, 10)}, r"rotary_dim = 10 is not supported: an even number, 2 to head_dim = 8"),
        ({"cos_sin_cache": torch.ones(5, 8).half()}, r"cos_sin_cache is torch.float16"),
        ({"pos_ids": ints(0, 5, 1)}, r"positions\[1\] = 5 is out of range"),
        ({"pos_ids": ints(0, 1)}, r"pos_ids has shape \[2\]: it must be \[3\]"),
        ({"eps": float("nan")}, r"eps = nan is not supported"),
        ({"paged_kv_cache": torch.zeros(2, 2, 4, 2, 8)}, r"paged_kv_cache's keys has shape \[2, 4, 2, 8\]"),
        ({"paged_kv_cache": torch.zeros(2, 2, 4, 1, 8).half()}, r"paged_kv_cache's keys is torch.float16"),
        ({"k_scale": 2.0}, r"k_scale = 2.0 is not supported: None for a cache of torch.float32"),
        ({"kv_layout": "HDN"}, r"kv_layout = 'HDN'"),
        ({"q_out": torch.ones(3, 2, 8).half()}, r"q_out is torch.float16"),
        ({"slots": ints(0, 8, 1)}, r"slots\[1\] = 8 is out of range: the cache has 8 slots"),
        ({"slots": None}, r"batch_indices is None: either slots or batch_indices, positions, kv_indices, kv_indptr"),
        ({"positions": ints(0, 1, 2)}, r"slots = \[3\] is not supported: None, where positions is given"),
        (
            {"slots": None, "batch_indices": ints(0, 0, 0), "positions": ints(0, 8, 1), "kv_indices": ints(1, 0),
             "kv_indptr": ints(0, 2)},
            r"positions\[1\] = 8 .* request 0, which has pages for 8",
        ),
    ],
)  # fmt: skip
def test_norm_rope_append_with_wrong_arguments_is_refused_and_writes_nothing(change, message):
    cache, q_out = torch.zeros(2, 2, 4, 1, 8), torch.zeros(3, 2, 8)
    given = {"q": torch.ones(3, 2, 8), "k": torch.ones(3, 1, 8), "v": torch.ones(3, 1, 8)}
    given |= {"q_weight": None, "k_weight": None, "cos_sin_cache": torch.ones(5, 8), "pos_ids": ints(0, 1, 2)}
    given |= {"paged_kv_cache": cache, "slots": ints(1, 2, 3), "q_out": q_out}
    with pytest.raises(ValueError, match=message):
        fused(**{**given, **change})
    assert not cache.any()
    assert not q_out.any()


def test_norm_rope_append_with_a_wrong_fp8_scale_is_refused():
    cache, heads = torch.zeros(2, 2, 4, 1, 8).to(torch.float8_e4m3fn), torch.ones(3, 1, 8)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"v_scale = .* is not supported: a positive number"):
            fused(heads, heads, heads, None, None, heads[0], ints(0, 0, 0), cache, slots=ints(0, 1, 2), v_scale=scale)
