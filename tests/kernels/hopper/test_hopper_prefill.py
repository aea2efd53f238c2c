"""Prefill on Hopper GPUs against the oracle; elsewhere the kernel is compiled, and the family says what it declines."""

from __future__ import annotations

import re
from dataclasses import astuple, replace

import pytest
import torch

import quire
from helpers.families import check, compute, draw_scales, oracle_result, spoil
from helpers.hopper import Recorded, gpu, on_host, ragged_tables, shifted
from quire.bench.batches import random_batch, relative_error
from quire.definition import RaggedLayout, attention_spec
from quire.kernels import registry
from quire.kernels.call import Call

hopper = pytest.importorskip("quire.kernels.hopper.host")
host = hopper.prefill_host

from quire.kernels.hopper.config import TileConfig  # noqa: E402
from quire.kernels.hopper.mask import MaskConfig  # noqa: E402
from quire.kernels.hopper.schedule import ScheduleConfig  # noqa: E402
from quire.kernels.hopper.tile_scheduler import TileSchedulerConfig  # noqa: E402

LAYERS = {
    "default": {},
    "not causal": {"causal": False},
    "window": {"window_left": 70},
    "window to the right": {"window_right": 5, "causal": False},
    "window not causal": {"window_left": 300, "causal": False},
    "no window but itself": {"window_left": 0},
    "soft cap": {"logits_soft_cap": 5.0},
    "alibi": {"pos_encoding": "ALIBI"},
    "sinks": {"sinks": True},
    "mask": {"custom_mask": True, "causal": False},
    "all": {
        "logits_soft_cap": 3.0, "window_left": 300, "sinks": True, "custom_mask": True, "pos_encoding": "ALIBI",
    },
}  # fmt: skip
DIMS = ((64, 64), (128, 128), (128, 128), (192, 128), (256, 256))


def layer(rng, dtype, fp8=True, **changes):
    kv_heads, (dim, dim_vo) = rng.choice((1, 2, 3)), rng.choice(DIMS)
    kv_dtype = rng.choice((dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2)) if fp8 else dtype
    given = {"num_kv_heads": kv_heads, "head_dim_qk": dim, "head_dim_vo": dim_vo, "kv_dtype": kv_dtype}
    return attention_spec(num_qo_heads=kv_heads * rng.choice((1, 2, 3, 4, 7, 16)), **given, q_dtype=dtype, **changes)


def lengths(rng):
    """Query and key tokens of a few requests: some have no query tokens, no keys, or fewer keys than query tokens."""
    kv_lens = [rng.choice((0, 1, 5, 64, 200, 700, 3000)) for _ in range(rng.randint(1, 7))]
    return [rng.choice((0, 1, 4, 40, 129, rng.randint(1, 900))) for _ in kv_lens], kv_lens


@gpu
@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prefill_of_random_batches_matches_the_oracle(dtype, name, rng):
    """Any heads, pages, layouts and scales. Unused slots of pages are NaN."""
    for spec, page_size in [(layer(rng, dtype, **LAYERS[name]), rng.choice((1, 3, 8, 16, 64, 256))) for _ in range(2)]:
        per_head = rng.random() < 0.3, rng.random() < 0.3
        for _ in range(4):
            given = draw_scales(rng, spec, per_head) | {"kv_layout": rng.choice(("NHD", "HND")), "padding": 2}
            q_lens, kv_lens = lengths(rng)
            batch = random_batch(spec, q_lens, kv_lens, page_size, **given)
            out, lse = compute(batch, "hopper")
            check(batch, out, lse, "hopper")
            assert (out[sum(q_lens) :] == 0).all()
            assert (lse[sum(q_lens) :] == -torch.inf).all()


@gpu
@pytest.mark.parametrize("name", ["default", "window", "all"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_prefill_of_fp8_queries_matches_the_oracle(dtype, name, rng):
    """Products of fp8 by fp8 are added up in fewer bits than float32 has."""
    spec, page_size = layer(rng, dtype, False, o_dtype=torch.bfloat16, **LAYERS[name]), rng.choice((1, 16, 256))
    for _ in range(4):
        batch = random_batch(spec, *lengths(rng), page_size, v_scale=0.5, k_scale=rng.choice((1.0, 2.0)))
        out, lse = compute(batch, "hopper")
        exact, exact_lse = oracle_result(batch)
        assert relative_error(out, exact) < 5e-3
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-2)


@gpu
@pytest.mark.parametrize("name", ["default", "window", "mask", "all"])
def test_prefill_over_ragged_rows_matches_the_oracle(name, rng):
    """Rows of other requests, and those behind the last one, count for nothing, even if they are NaN."""
    for _ in range(3):
        spec = layer(rng, torch.bfloat16, **LAYERS[name])
        batch = random_batch(spec, *lengths(rng), 16)
        k, v, indptr = batch.rows()
        out, lse = compute(batch, "hopper", k=k, v=v, kv=RaggedLayout(indptr))
        check(batch, out, lse, "hopper")
        b = rng.randrange(len(indptr) - 1)
        rows = slice(int(indptr[b]), int(indptr[b + 1]))
        if indptr[b] < indptr[b + 1]:
            k[rows] = v[rows] = torch.nan
            again, _ = compute(batch, "hopper", k=k, v=v, kv=RaggedLayout(indptr))
            other = torch.ones(len(out), dtype=torch.bool)
            other[int(batch.qo.indptr[b]) : int(batch.qo.indptr[b + 1])] = False
            assert torch.equal(again[other], out[other])


@gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill_with_keys_of_no_probability_has_equal_bits(dim, rng):
    """As long as no maximum grows, states are multiplied by exactly 1, not by what a product and a sum round to."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=dim, q_dtype=torch.bfloat16, causal=False)
    batch = random_batch(spec, [rng.randint(200, 400)], [128 * 20], 16)
    k, v, indptr = batch.rows()
    start = 128 * rng.randrange(20)
    seen, q = slice(start, start + 128), batch.q.clone()
    q[..., 0] = 1
    seen_keys = k[seen].clone()
    k[..., 0] = -30_000
    k[seen] = seen_keys
    among = compute(batch, "hopper", q=q, k=k, v=v, kv=RaggedLayout(indptr))
    alone = compute(batch, "hopper", q=q, k=k[seen], v=v[seen], kv=RaggedLayout(indptr.new_tensor([0, 128])))
    assert all(torch.equal(a, b) for a, b in zip(among, alone, strict=True))


@gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_with_a_window_reads_no_pages_before_it(page_size, rng):
    spec = layer(rng, torch.bfloat16, window_left=rng.choice((5, 100, 128, 333)))
    q_len = rng.randint(1, 300)
    batch = random_batch(spec, [q_len], [2000], page_size)
    spare = batch.kv.indices[: (2000 - q_len - spec.mask.window_left) // page_size].long()
    expected = oracle_result(batch)
    for x in (batch.k, batch.v):
        x[spare] = torch.full((), torch.nan).to(x.dtype)
    out, _ = compute(batch, "hopper")
    assert relative_error(out, expected[0]) < 3e-3


@gpu
@pytest.mark.parametrize("shape", [(1, 1, 70000), (1, 64, 33000), (3, 40, 9000), (2, 130, 20000)], ids=str)
def test_prefill_of_split_requests_matches_the_oracle_with_equal_bits(shape, rng):
    """Few tiles with many keys: the same bits each time, and right, whatever the workspace has from before."""
    count, q_len, kv_len = shape
    spec = layer(rng, torch.bfloat16)
    q_lens, kv_lens = [rng.randint(1, q_len) for _ in range(count)], [rng.randint(kv_len // 2, kv_len)] * count
    batch = random_batch(spec, q_lens, kv_lens, 16)
    floats = torch.full((64 << 20,), torch.nan, device="cuda")
    zeros = torch.zeros(2 << 20, dtype=torch.int32, device="cuda")
    first = compute(batch, "hopper", float_workspace=floats, int_workspace=zeros)
    check(batch, *first, "hopper")
    for _ in range(5):
        again = compute(batch, "hopper", float_workspace=floats, int_workspace=zeros)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not zeros.any()
    assert not floats[: 132 * 128].isnan().all(), "nothing was split"


@gpu
@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("count", [33, 700, 2100])
def test_prefill_of_many_requests_matches_the_oracle(count, window, rng):
    """More requests than a warp looks at together, of lengths that differ by powers of two; with a window, tiles of one
    block that has unused slots on both sides, of which one consumer may be several ahead.
    """
    dim = rng.choice((64, 128))
    spec = attention_spec(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=dim, q_dtype=torch.bfloat16, window_left=window
    )  # fmt: skip
    kv_lens = [rng.choice((0, 1, rng.randint(1, 20), rng.randint(1, 400))) for _ in range(count)]
    kv_lens[rng.randrange(count)] = 5000
    batch = random_batch(spec, [rng.choice((0, 1, 2, 30)) for _ in kv_lens], kv_lens, 16)
    check(batch, *compute(batch, "hopper"), "hopper")


@gpu
def test_prefill_with_invalid_tables_reads_inside_the_tensors(rng):
    for page_size in (1, 16):
        spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
        batch = random_batch(spec, [70, 100], [640, 64], page_size)
        expected = spoil(batch)
        check(expected, *compute(batch, "hopper"), "hopper")


@gpu
def test_captured_prefill_replayed_reads_changed_tables(rng):
    """A captured plan and run compute what the tables say when they are replayed, over caches in any layout."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    batches = [
        random_batch(spec, [300, 1, 20], kv_lens, 16, device="cuda") for kv_lens in ([400, 900, 70], [900, 400, 70])
    ]
    tables = [x.clone() for x in (batches[0].kv.indptr, batches[0].kv.indices, batches[0].kv.last_page_len)]
    q, kv = batches[0].q.clone(), torch.stack([batches[0].k, batches[0].v], 1)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"))

    def step():
        wrapper.plan(batches[0].qo.indptr, *tables, 8, 2, 128, 16, causal=True, q_data_type=torch.bfloat16)
        return wrapper.run(q, kv)

    step()
    assert wrapper.backend == "hopper"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for batch in batches:
        for held, new in zip(tables, (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len), strict=True):
            held.copy_(new)
        q.copy_(batch.q)
        kv.copy_(torch.stack([batch.k, batch.v], 1))
        graph.replay()
        assert relative_error(out, oracle_result(batch)[0]) < 3e-3


@gpu
def test_auto_for_prefill_on_hopper_chooses_hopper(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    device = torch.device("cuda", 0)
    assert registry.choose(spec, device) is registry.choose(spec, device, max_q_len=999) is registry.family("hopper")
    assert registry.choose(spec.replace(pos_encoding="ROPE_LLAMA"), device).name == "triton"
    batch = random_batch(spec, [100, 1], [640, 64], 16, device="cuda")
    k, v, indptr = batch.rows()
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device="cuda"))
    wrapper.plan(batch.qo.indptr, indptr, 8, 2, 128, causal=True, q_data_type=torch.bfloat16)
    assert wrapper.backend == "hopper"
    for _ in range(2):  # the second run repeats the first one's launch
        assert relative_error(wrapper.run(batch.q, k, v), oracle_result(batch)[0]) < 3e-3
    with pytest.warns(UserWarning, match="hopper does not compute a call"):
        out = wrapper.run(batch.q, shifted(k), v)
    assert relative_error(out, oracle_result(batch)[0]) < 3e-3


def test_prefill_launch_passes_the_arguments_of_the_kernel(monkeypatch, rng):
    """Caches that TMA reads as matrices of tokens, in any layout, and those whose keys are copied one by one."""
    monkeypatch.setattr(host, "Launcher", Recorded)
    host._launcher.cache_clear()
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    for page_size, layout, box, stride in (
        (16, "NHD", 16, 256), (16, "HND", 16, 128), (256, "NHD", 128, 256), (0, "NHD", 128, 256), (4, "NHD", 0, 0),
        (24, "NHD", 0, 0),
    ):  # fmt: skip
        batch = random_batch(spec, [90, 1], [640, 64], page_size or 16, kv_layout=layout, padding=1)
        k, v, kv = batch.k, batch.v, batch.kv
        if page_size == 0:
            k, v, indptr = batch.rows()
            kv = RaggedLayout(indptr)
        call = Call(q=batch.q, qo=batch.qo, spec=spec, k=k, v=v, kv=kv)
        assert host.refuses(call) is None
        host.launch(call, batch.q, None, 132)
        given = Recorded.last
        assert (given["programs"], given["c"].box, given["pages"]) == (132, box, len(k))
        assert (given["matrices"] is None) == (box == 0)
        for x, m in zip((k, v), given["matrices"] or (), strict=False):
            assert m[2:] == (stride, box, 128)
            extent = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
            assert (m.rows - 1) * m.stride + m.columns == extent  # nothing outside the tensor is read
        call.k = shifted(k)
        assert "aligned to 16 bytes" in host.refuses(call)
    far = torch.empty(2, 1 << 17, 128, dtype=torch.bfloat16, device="meta")[:, :2]
    call = Call(far, batch.k, batch.v, batch.qo, batch.kv, spec)
    assert "strides of queries must be below 16777216" in host.refuses(call)
    host._launcher.cache_clear()


def scheduled(patch, configs, q_lens, kv_lens, window, programs, slots):
    """All work tiles of a batch in the order in which programs take them, by the kernel's own code. configs: a
    MaskConfig, a ScheduleConfig and a TileSchedulerConfig.
    """
    from quire.kernels.hopper import mask, schedule
    from quire.kernels.hopper import tile_scheduler as scheduler

    gl = on_host(patch, schedule, scheduler, mask)
    gl.num_programs = lambda axis: torch.tensor(programs)
    gl.program_id = lambda axis: torch.tensor(0)
    for name in ("LANES", "UNSPLIT", "TILE_COST", "SPLIT_COST", "END"):
        patch.setattr(scheduler, name, getattr(scheduler, name).value)
    patch.setattr(scheduler, "_level", lambda x: x.clamp(min=1).double().log2().floor().long())
    patch.setattr(scheduler, "quotient", lambda a, b: a // torch.as_tensor(b).clamp(min=1))
    tables = ragged_tables(q_lens, kv_lens, window, *configs[:2])
    found = scheduler.tile_scheduler(tables, None, torch.tensor(slots), configs[2])
    it, tiles = found.begin(), []
    for index in range(int(found.num_tiles) + 1):
        it, tile = found.find(replace(it, index=torch.tensor(index)))
        tiles.append(type(tile)(*(int(x) for x in astuple(tile))))
    assert tiles[-1].h == -1
    return tiles[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False])
def test_work_tiles_cover_all_tiles(split, monkeypatch, rng):
    """Work tiles have each block that a row of their tile sees once; partial states have slots of their own; long
    requests come first. If batch-invariant, no tile is cut, and there are none of requests of few query rows.
    """
    cut = 0
    for _ in range(60):
        group, heads, window = rng.choice((1, 4, 7)), rng.choice((1, 3, 8)), rng.choice((-1, -1, 70, 5000))
        tile_rows, size = rng.choice(((128, 128), (192, 64), (64, 64)))  # rows, and keys of a block
        config, right = TileConfig(heads, group, tile_rows, size, unit_size=size), rng.choice((0, 0, -1))
        configs = (
            MaskConfig(config, right, window >= 0, custom=False, items=False),
            ScheduleConfig(config, 0, False, False, min_q_len=0 if split else 64 // group + 1),
            TileSchedulerConfig.of(1, split, 256),
        )
        count = rng.choice((1, 2, 5, 40, 70))
        kv_lens = [rng.choice((0, 1, 300, rng.randint(1, 3000), 20_000 if count < 9 else 7)) for _ in range(count)]
        q_lens = [rng.choice((0, 1, 4, 130, min(n, 700))) for n in kv_lens]
        slots = rng.choice((0, 264, 1056))
        with monkeypatch.context() as patch:
            found = scheduled(patch, configs, q_lens, kv_lens, window, 132, slots)
        work_tiles = [x for x in found if x.first <= x.last]
        tiles = {}
        for x in work_tiles:
            tiles.setdefault((x.b, x.h, x.row), []).append(x)
        expected = {
            (b, h, row)
            for b, n in enumerate(q_lens)
            if split or n * group > 64
            for h in range(heads)
            for row in range(0, n * group, tile_rows)
        }
        assert tiles.keys() == expected
        for (b, _h, row), parts in tiles.items():
            past, last_row = kv_lens[b] - q_lens[b], min(row + tile_rows, q_lens[b] * group) - 1
            end = kv_lens[b] if right < 0 else min(kv_lens[b], past + last_row // group + 1)
            start = max(past + row // group - window, 0) if window >= 0 else 0
            last = max((end - 1) // size, 0)
            blocks = sorted(j for x in parts for j in range(x.first, x.last + 1))
            assert blocks == list(range(min(start // size, last), last + 1))
            assert sorted(x.split for x in parts) == list(range(parts[0].splits))
            assert len({(x.slot, x.splits) for x in parts}) == 1
        used = [x.slot + x.split for x in work_tiles if x.splits > 1]
        assert len(used) == len(set(used))
        assert not used or max(used) < slots
        levels = [max(-(-kv_lens[x.b] // size), 1).bit_length() for x in work_tiles]
        assert window >= 0 or levels == sorted(levels, reverse=True)
        cut += bool(used)
    assert cut > 3 if split else cut == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p16", "ragged", "p1", "fp8", "fp8 q", "d64", "d192", "d256", "all", "invariant"])
def test_prefill_kernels_compile_without_spills_in_their_loops(name):
    """Registers last in the loop over keys, and the wait for PV stays behind the exponentials: see `_hold`. If
    batch-invariant, exponents alone are fused, a product and a sum for each, with and without a mask.
    """
    from helpers.triton_compile import compile_prefill, disassemble

    page_size = {"ragged": 0, "p1": 1}.get(name, 16)
    dims = {"d64": (64, 64), "d192": (192, 128), "d256": (256, 256)}.get(name, (128, 128))
    spec = attention_spec(
        num_qo_heads=32, num_kv_heads=8, head_dim_qk=dims[0], head_dim_vo=dims[1], o_dtype=torch.bfloat16,
        q_dtype=torch.float8_e4m3fn if name == "fp8 q" else torch.bfloat16, batch_invariant=name == "invariant",
        kv_dtype=torch.float8_e4m3fn if "fp8" in name else torch.bfloat16, **(LAYERS["all"] if name == "all" else {}),
    )  # fmt: skip
    c, usage = compile_prefill(spec, page_size)
    assert usage.shared <= 227 << 10
    text = disassemble(usage)
    order = "".join(re.findall(r"(MUFU\.EX2|FFMA|HGMMA|DEPBAR\.LE gsb0, 0x[01]|STL|LDL)", text))
    assert "setmaxnreg" in usage.asm["ptx"]
    loops = re.findall(r"HGMMADEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", order)
    assert len(loops) >= 2 * c.pipeline.consumers  # blocks with and without a mask
    if name != "all":
        block_n = host.block_size(spec)
        assert all(x.count("MUFU.EX2") >= block_n // 2 for x in loops)
        assert all(len(re.findall("STL|LDL", x)) <= (0 if c.box else 2) for x in loops)
        assert name != "invariant" or all(x.count("FFMA") == block_n // 2 for x in loops)


def test_prefill_declines_unsupported_layers_with_a_reason():
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    assert host.declines(spec, 0) is host.declines(spec.replace(pos_encoding="ALIBI", sinks=True), 5000) is None
    assert host.declines(spec.replace(head_dim_qk=192), 0) is None
    assert "head_dim is 64, 128, 256, or 192 with 128" in host.declines(spec.replace(head_dim_qk=80, head_dim_vo=80), 0)
    assert "no rotary encodings" in host.declines(spec.replace(pos_encoding="ROPE_LLAMA"), 0)
    assert host.declines(spec.replace(items=True), 0) is None
    assert "torch.float32" in host.declines(spec.replace(q_dtype=torch.float32, kv_dtype=torch.float32), 0)
    fp8 = spec.replace(q_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn)
    assert host.declines(fp8, 0) is host.declines(fp8, 17) is None
    assert "requests of more than 16 tokens, not 16" in host.declines(fp8, 16)
    assert "keys of their dtype" in host.declines(fp8.replace(kv_dtype=torch.float8_e5m2), 0)
