"""Decode on Hopper GPUs against the oracle; elsewhere the kernel is compiled, and the family says what it declines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import quire
from helpers.families import check, compute, draw_scales, oracle_result, spoil
from helpers.hopper import Recorded, gpu, host_class, on_host, ragged_tables, shifted
from quire.bench.batches import random_batch, relative_error
from quire.definition import RaggedLayout, attention_spec
from quire.kernels import registry
from quire.kernels.call import Call

hopper = pytest.importorskip("quire.kernels.hopper.host")
LAYERS = {
    "default": {},
    "not causal": {"causal": False},
    "window": {"window_left": 70},
    "window to the right": {"window_right": 5, "causal": False},
    "no window but itself": {"window_left": 0},
    "soft cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
    "mask": {"custom_mask": True, "causal": False},
    "all": {"logits_soft_cap": 3.0, "window_left": 300, "sinks": True, "custom_mask": True},
}


def layer(rng, dtype, **changes):
    kv_heads, dim = rng.choice((1, 2, 3)), rng.choice((64, 128, 256))
    heads = kv_heads * rng.choice((1, 2, 3, 4, 7, 16))
    kv_dtype = rng.choice((dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2)) if dim > 64 else dtype
    given = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim_qk": dim, "kv_dtype": kv_dtype}
    return attention_spec(**given, q_dtype=dtype, **changes)


@gpu
@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_of_random_batches_matches_the_oracle(dtype, name, rng):
    """Requests of one or a few query tokens, or none; without keys, or with many; any heads, pages, layouts, scales."""
    layers = [(layer(rng, dtype, **LAYERS[name]), rng.choice((1, 3, 16, 64))) for _ in range(2)]
    per_head = rng.random() < 0.3, rng.random() < 0.3
    for spec, page_size in layers * 3:
        longest = rng.choice((1, 1, min(4, 64 // spec.group_size)))
        kv_lens = [rng.choice((0, 1, 5, 64, 200, 700, 3000)) for _ in range(rng.randint(1, 7))]
        q_lens = [rng.choice((0, 1, longest, longest)) for _ in kv_lens]
        given = draw_scales(rng, spec, per_head) | {"kv_layout": rng.choice(("NHD", "HND")), "padding": 2}
        batch = random_batch(spec, q_lens, kv_lens, page_size, **given)
        out, lse = compute(batch, "hopper", max_q_len=longest)
        check(batch, out, lse, "hopper")
        tokens = sum(q_lens)
        assert (out[tokens:] == 0).all()
        assert (lse[tokens:] == -torch.inf).all()


@gpu
@pytest.mark.parametrize("heads", [(16, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("shape", [(1, 16384), (3, 5000), (40, 300), (700, 40), (1100, 3)], ids=str)
def test_decode_of_split_requests_matches_the_oracle_with_equal_bits(shape, heads, rng):
    """Long requests that many programs share, and many short ones: the same bits each time, and right."""
    count, length = shape
    spec = attention_spec(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim_qk=128, q_dtype=torch.bfloat16)
    kv_lens = [rng.randint(length // 2, length) for _ in range(count)]
    batch = random_batch(spec, [1] * count, kv_lens, 16)
    first = compute(batch, "hopper", max_q_len=1)
    check(batch, *first, "hopper")
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, compute(batch, "hopper", max_q_len=1), strict=True))


def test_combine_of_random_spans_reads_each_partial_state_once(monkeypatch, rng):
    """Whoever leaves a part has a place of its own, which one program of its tile looks at, and only one."""
    from quire.kernels.hopper.decode import combine

    gl, left = MagicMock(), []
    taken, written = [], []
    gl.minimum, gl.where, gl.num_programs = min, lambda x, a, b: a if x else b, lambda axis: 264

    def merge_slots(state, first, end, count, row):
        taken.extend(range(first, min(first + count - 1, end) + 1))
        return state

    stubs = {"gl": gl, "FAN_IN": 8, "MAX_ROWS": 16, "one_per_row": lambda state: state}
    stubs |= {name: getattr(combine, name).fn for name in ("_two_levels", "slot_of")}
    for name, stub in stubs.items():
        monkeypatch.setattr(combine, name, stub)
    partials = host_class(combine.DecodePartials)(None, None, 264, rows=4, dim=128)
    partials._merge_slots, partials.store = merge_slots, lambda state, slot, *rows: left.append(slot)
    output = SimpleNamespace(store_rows=lambda *given: written.append(given))
    request = SimpleNamespace(q_start=0, rows=lambda: 4)
    for _ in range(300):
        costs = [rng.choice((1, 5, 30, 200, rng.randint(1, 1000))) for _ in range(rng.randint(1, 6))]
        size, begin, cut = max(-(-sum(costs) // 264), rng.randint(1, 9)), 0, 0
        left.clear(), taken.clear(), written.clear()
        for cost in costs:
            owner, last = begin // size, (begin + cost - 1) // size
            for program in range(owner, last + 1) if owner < last else ():
                if combine.combines.fn(program, owner, last):
                    # The pipeline's shared memory is used, so no tile may follow.
                    assert begin + cost > (program + 1) * size
                    partials.combine(MagicMock(), output, request, 0, program, owner, last)
                else:
                    left.append(combine.slot_of(program, owner, last))
            begin, cut = begin + cost, cut + (owner < last)
            assert sorted(left) == sorted(taken)
        assert len(written) == cut
        assert len(set(left)) == len(left)
        assert all(0 <= place < 264 for place in left)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_spans_cover_all_work_units(off, monkeypatch, rng):
    """Spans have all work units and quotients are exact, however divisions of floats are rounded."""
    from quire.kernels.hopper import schedule

    def about(a, b):
        # Four roundings of float32, one of which is that of an approximate reciprocal, are off by less than 2**-21.
        error = torch.randint(0, 2, a.shape) * off
        return (a // b + error * (a // (b << 21) + 1)).clamp(min=0)

    gl = SimpleNamespace(int32=torch.int32, where=torch.where)
    gl.maximum = lambda a, b: torch.maximum(a, torch.as_tensor(b))
    stubs = {
        "gl": gl,
        "_approximate_quotient": about,
        "quotient": schedule.quotient.fn,
        "_min_span": lambda longest, c: least,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(schedule, name, stub)
    bits, programs = torch.randint(0, 26, (100_000,)), torch.randint(1, 265, (100_000,))
    total = (2.0**bits * (1 + torch.rand(100_000))).long()
    longest = (total * torch.rand(100_000) ** 3).long().clamp(min=1)
    longest[::7] = total[::7] // programs[::7].clamp(max=9).clamp(min=1)  # tiles that spans fit, or nearly
    longest, least = longest.clamp(min=1), torch.randint(1, 9, (100_000,))
    size = schedule._span_size.fn(total, longest, programs, None)
    fair = torch.maximum(-(-total // programs), least)
    assert (size >= fair).all()
    assert (size * 16 <= (fair + 2 * (fair >> 20) + 2) * 17).all()
    whole = -(-fair // longest) * longest
    if off == 0:
        assert torch.equal(size[usual := fair < 1 << 20], torch.where(whole * 16 <= fair * 17, whole, fair)[usual])
    a, b = torch.randint(0, 1 << 30, (100_000,)), torch.randint(1 << 10, 1 << 24, (100_000,))
    assert torch.equal(schedule.quotient(a, b), a // b)


def test_find_span_of_programs_that_start_first_is_last(monkeypatch, rng):
    """A program waits for partial states of later spans alone. Where programs start in the order of their numbers,
    those that have these have started, so that no program waits forever.
    """
    from quire.kernels.hopper import mask, schedule
    from quire.kernels.hopper.config import TileConfig

    on_host(monkeypatch, schedule, mask)
    for name in ("FEW_BLOCKS", "WARP_SCAN", "MAX_SCAN"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).value)
    for name in ("quotient", "_approximate_quotient"):
        monkeypatch.setattr(schedule, name, lambda a, b: a // b)
    monkeypatch.setattr(schedule, "leading_zeros", lambda x: 32)
    config = TileConfig(heads=2, group=4, rows=0, block_n=64, unit_size=64)
    configs = mask.MaskConfig(config, 0, False, False, False), schedule.ScheduleConfig(config, 0, False, False)
    span_config = schedule.SpanConfig(scan=32, programs=2)
    for _ in range(20):
        kv_lens = [rng.choice((0, 1, 64, 300, rng.randint(1, 20_000))) for _ in range(rng.randint(1, 9))]
        tables, programs = ragged_tables([1] * len(kv_lens), kv_lens, -1, *configs), torch.tensor(2 * 8)
        spans = [tables.find_span(torch.tensor(p), programs, torch.tensor(8), span_config) for p in range(16)]
        units = [unit for span in reversed(spans) for unit in range(int(span.start), int(span.end))]
        assert units == list(range(sum(2 * max(-(-n // 64), 1) for n in kv_lens)))


@gpu
def test_decode_of_many_partial_states_per_tile_matches_the_oracle(rng):
    """Tiles that many programs have, which begin and end anywhere in their spans."""
    zeros = torch.zeros(8 << 18, dtype=torch.int32, device="cuda")
    for i in range(40):
        group, dim = ((8, 128), (2, 128), (20, 64), (8, 256))[i % 4]
        spec = attention_spec(num_qo_heads=group, num_kv_heads=1, head_dim_qk=dim, q_dtype=torch.bfloat16)
        kv_lens = [rng.choice((rng.randint(1, 12000), 64 * rng.randint(17, 200))) for _ in range(rng.randint(2, 5))]
        batch = random_batch(spec, [1] * len(kv_lens), kv_lens, 16)
        check(batch, *compute(batch, "hopper", max_q_len=1, int_workspace=zeros), "hopper")
        assert not zeros.any()


@gpu
def test_decode_on_several_streams_at_once_has_equal_bits(rng):
    """Programs wait for others of their launch, while half of the machine is taken by another launch's."""
    spec = attention_spec(num_qo_heads=16, num_kv_heads=4, head_dim_qk=128, q_dtype=torch.bfloat16)
    wrappers, streams = [], [torch.cuda.Stream() for _ in range(3)]
    for kv_lens in ([60000], [9000, 20000, 3], [700] * 40):
        batch = random_batch(spec, [1] * len(kv_lens), kv_lens, 16, device="cuda")
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(None)
        table = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
        wrapper.plan(*table, 16, 4, 128, 16, q_data_type=torch.bfloat16)
        assert wrapper.backend == "hopper"
        wrappers.append((wrapper, batch, wrapper.run(batch.q, (batch.k, batch.v))))
    torch.cuda.synchronize()
    outs = []
    for _ in range(100):
        for stream, (wrapper, batch, first) in zip(streams, wrappers, strict=True):
            with torch.cuda.stream(stream):
                outs.append((wrapper.run(batch.q, (batch.k, batch.v)), first))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out, first in outs)


@gpu
def test_decode_of_changing_row_counts_leaves_zeros_in_its_workspace(rng):
    """Rounds over one wrapper's memory, which every run must find and leave as zeros: few rows, many, and few again."""
    for dim, kv_heads, group in ((128, 2, 4), (128, 1, 16), (256, 2, 8), (64, 4, 1)):
        spec = attention_spec(
            num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim_qk=dim, q_dtype=torch.bfloat16
        )
        zeros = torch.zeros(8 << 18, dtype=torch.int32, device="cuda")
        for _ in range(4):
            longest = rng.choice((1, 64 // group))
            q_lens = [rng.randint(0, longest) for _ in range(5)]
            kv_lens = [q_len + rng.choice((0, 100, 3000, 9000)) for q_len in q_lens]
            batch = random_batch(spec, q_lens, kv_lens, 16)
            check(batch, *compute(batch, "hopper", max_q_len=longest, int_workspace=zeros), "hopper")
            assert not zeros.any()


@gpu
@pytest.mark.parametrize(("dim", "kv_dtype"), [(64, torch.bfloat16), (128, torch.float8_e4m3fn)], ids=str)
def test_decode_with_nan_in_one_kv_head_leaves_other_heads(dim, kv_dtype, rng):
    """NaN in one KV head's keys or values is seen by its queries alone."""
    spec = attention_spec(
        num_qo_heads=8, num_kv_heads=4, head_dim_qk=dim, q_dtype=torch.bfloat16, kv_dtype=kv_dtype, causal=True
    )
    batch = random_batch(spec, [1, 1], [640, 3000], 16)
    clean = compute(batch, "hopper", max_q_len=1)
    for which, bad in itertools.product("kv", range(4)):
        cache = getattr(batch, which).float()
        cache[:, :, bad] = torch.nan
        out, lse = compute(replace(batch, **{which: cache.to(kv_dtype)}), "hopper", max_q_len=1)
        others = [head for head in range(8) if head // 2 != bad]
        assert out[:, [2 * bad, 2 * bad + 1]].isnan().all()
        assert torch.equal(out[:, others], clean[0][:, others])
        assert torch.equal(lse[:, others], clean[1][:, others])


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_over_ragged_rows_matches_the_oracle(dtype, rng):
    for name in ("default", "window", "mask"):
        spec = layer(rng, dtype, **LAYERS[name])
        kv_lens = [rng.choice((0, 1, 5, 64, 200, 3000)) for _ in range(rng.randint(1, 7))]
        batch = random_batch(spec, [1] * len(kv_lens), kv_lens, 16)
        k, v, indptr = batch.rows()
        out, lse = compute(batch, "hopper", max_q_len=1, k=k, v=v, kv=RaggedLayout(indptr))
        check(batch, out, lse, "hopper")


@gpu
def test_decode_of_queries_of_any_size_over_fp8_matches_the_oracle(rng):
    """Halves hold neither the largest nor the smallest of bf16's numbers."""
    for size in (1e-30, 1e-6, 1e6, 1e30):
        spec = attention_spec(
            num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn,
            sm_scale=0.1 / size,
        )  # fmt: skip
        batch = random_batch(spec, [1, 1], [640, 64], 16)
        batch = replace(batch, q=batch.q * size)
        check(batch, *compute(batch, "hopper", max_q_len=1), "hopper")


@gpu
def test_decode_with_invalid_tables_reads_inside_the_tensors(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    batch = random_batch(spec, [1, 1], [640, 64], 16)
    expected = spoil(batch)
    check(expected, *compute(batch, "hopper", max_q_len=1), "hopper")


@gpu
def test_auto_for_decode_on_hopper_chooses_hopper(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    device = torch.device("cuda", 0)
    assert registry.choose(spec, device, max_q_len=16).name == "hopper"
    assert hopper._hosts(spec, 16) == (hopper.decode_host,)
    assert hopper._hosts(spec, 17) == hopper._hosts(spec, 0) == (hopper.prefill_host,)
    batch = random_batch(spec, [1, 1], [640, 64], 16, device="cuda")
    table = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), backend="hopper")
    wrapper.plan(*table, 8, 2, 128, 16, q_data_type=torch.bfloat16)
    assert wrapper.backend == "hopper"
    assert relative_error(wrapper.run(batch.q, (batch.k, batch.v)), oracle_result(batch)[0]) < 3e-3
    with pytest.raises(ValueError, match="hopper: keys and values must be aligned to 16 bytes"):
        wrapper.run(batch.q, (shifted(batch.k), batch.v))
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cuda"))
    wrapper.plan(*table, 8, 2, 128, 16, q_data_type=torch.bfloat16)
    assert wrapper.backend == "hopper"
    assert relative_error(wrapper.run(batch.q, (batch.k, batch.v)), oracle_result(batch)[0]) < 3e-3
    with pytest.warns(UserWarning, match="hopper does not compute a call"):
        out = wrapper.run(batch.q, (shifted(batch.k), batch.v))
    assert relative_error(out, oracle_result(batch)[0]) < 3e-3


@gpu
def test_tree_masks_of_known_lengths_are_computed_by_decode(rng):
    """A mask over a few query tokens per request, as in speculative decoding."""
    spec = attention_spec(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16, custom_mask=True, causal=False
    )
    batch = random_batch(spec, [5, 16, 1], [640, 64, 3000], 16, device="cuda")
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"))
    table = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
    wrapper.plan(batch.qo.indptr.cpu(), *table, 8, 2, 128, 16, custom_mask=batch.bool_mask, q_data_type=torch.bfloat16)
    assert wrapper.backend == "hopper"
    assert relative_error(wrapper.run(batch.q, (batch.k, batch.v)), oracle_result(batch)[0]) < 3e-3
    given = {"custom_mask": batch.bool_mask, "q_data_type": torch.bfloat16}
    for longest in (None, 17, 16):  # of which the first two are a prefill's
        wrapper.plan(batch.qo.indptr, *table, 8, 2, 128, 16, **given, max_token_per_sequence=longest)
        assert wrapper.backend == "hopper"
        assert relative_error(wrapper.run(batch.q, (batch.k, batch.v)), oracle_result(batch)[0]) < 3e-3
    with pytest.raises(ValueError, match="max_token_per_sequence = 15"):
        wrapper.plan(batch.qo.indptr.cpu(), *table, 8, 2, 128, 16, **given, max_token_per_sequence=15)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_decode_launch_passes_the_arguments_of_the_kernel(kv_dtype, monkeypatch, rng):
    """Launches over pages and over ragged rows pass strides in 16-bit elements."""
    monkeypatch.setattr(hopper.decode_host, "Launcher", Recorded)
    hopper.decode_host._launcher.cache_clear()
    spec = attention_spec(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16, kv_dtype=kv_dtype, custom_mask=True
    )
    batch = random_batch(spec, [1, 1], [640, 64], 16)
    k, v, indptr = batch.rows()
    words = 128 * kv_dtype.itemsize // 2
    for keys, page_size, entries, strides in (
        ({"k": batch.k, "v": batch.v, "kv": batch.kv}, 16, 44, (32 * words, 2 * words, words)),
        ({"k": k, "v": v, "kv": RaggedLayout(indptr)}, 0, 704, (2 * words, 0, words)),
    ):
        call = Call(q=batch.q, qo=batch.qo, spec=spec, mask=batch.mask, max_q_len=1, **keys)
        assert hopper.decode_host.refuses(call) is None
        hopper.decode_host.launch(call, batch.q, None, 132)
        given = Recorded.last
        assert (given["programs"], given["processors"]) == (132, 132)
        assert (given["c"].schedule.page_size, given["entries"], given["pages"]) == (page_size, entries, len(keys["k"]))
        for x in "kv":
            assert tuple(given[f"{x}_{axis}"] for axis in ("page", "token", "head")) == strides
        assert (given["q_token"], given["q_head"], given["mask_size"]) == (1024, 128, 88)
        call.k = shifted(keys["k"].view(torch.uint8)).view(kv_dtype) if kv_dtype.itemsize == 1 else shifted(keys["k"])
        assert "aligned to 16 bytes" in hopper.decode_host.refuses(call)
    hopper.decode_host._launcher.cache_clear()


def test_few_entries_of_small_batches_take_one_program_per_multiprocessor(rng):
    """Only where no table of so many entries can say that there is more."""
    calls, few = hopper.decode_host, 0
    for _ in range(300):
        group, heads, dim = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 8)), rng.choice((64, 128))
        spec = attention_spec(num_qo_heads=heads * group, num_kv_heads=heads, head_dim_qk=dim, q_dtype=torch.bfloat16)
        page_size, counts = rng.choice((1, 16, 64)), [rng.choice((0, 1, rng.randint(1, 200))) for _ in range(9)]
        c = calls.config(spec, page_size, len(counts), 1, (False,) * 6)
        blocks = c.tile.heads * sum(max(-(-n * page_size // c.tile.block_n), 1) for n in counts)
        if sum(counts) <= calls._few_entries(c, 132, len(counts)):
            assert blocks <= 6 * c.span.programs * 132
            few += 1
    assert 0 < few < 300
    assert calls._few_entries(replace(c, schedule=replace(c.schedule, whole_tiles=True)), 132, 1) < 0
    assert calls._few_entries(replace(c, span=replace(c.span, programs=1)), 132, 1) < 0


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_kernels_compile_within_their_memory(dim):
    from helpers.triton_compile import compile_decode

    spec = attention_spec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=dim, q_dtype=torch.bfloat16)
    layers = [(spec, 1)]
    if dim == 128:
        layers.append((spec.replace(window_left=9, logits_soft_cap=1.0, sinks=True, custom_mask=True), 4))
        layers.append((spec.replace(kv_dtype=torch.float8_e5m2), 1))
        layers.append((spec, 16))
    for each, max_q_len in layers:
        usage = compile_decode(each, max_q_len)
        assert hopper.decode_host.tune(each, max_q_len).programs * (usage.shared + 1024) <= 228 << 10
        assert usage.spills <= 128, usage.spills


def test_decode_tuning_of_each_layer_has_two_stages():
    """Pipelines have two stages or more for every layer and number of query rows."""
    for dim, dtype, rows in itertools.product((64, 128, 256), (torch.bfloat16, torch.float8_e4m3fn), range(1, 65)):
        spec = attention_spec(
            num_qo_heads=rows, num_kv_heads=1, head_dim_qk=dim, q_dtype=torch.bfloat16, kv_dtype=dtype
        )
        tuning = hopper.decode_host.tune(spec, 1)
        assert tuning.stages >= 2
        assert tuning.rows >= rows


def test_decode_declines_unsupported_layers_with_a_reason():
    declines = hopper.decode_host.declines
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    assert declines(spec, 1) is None
    assert "head_dim is 64, 128 or 256, not 80" in declines(spec.replace(head_dim_qk=80, head_dim_vo=80), 1)
    narrow = spec.replace(head_dim_qk=64, head_dim_vo=64, kv_dtype=torch.float8_e5m2)
    assert declines(spec.replace(kv_dtype=torch.float8_e5m2), 1) is None
    assert "a head_dim of 128 or 256, not 64" in declines(narrow, 1)
    assert "torch.float32" in declines(spec.replace(q_dtype=torch.float32, kv_dtype=torch.float32), 1)
    assert "at most 64 query rows" in declines(spec, 0)
    assert declines(spec.replace(batch_invariant=True), 0) is None
    assert "nor position encodings" in declines(spec.replace(batch_invariant=True, pos_encoding="ALIBI"), 1)
    assert hopper.FAMILY.declines(spec, torch.device("cpu"), 1) == "it needs a Hopper GPU"


def test_hopper_with_an_untested_triton_declines_and_names_the_tested_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    reason = "it was not tested with triton 3.8.0 (tested: 3.6 to 3.7)"
    for version, expected in (("3.6.0", None), ("3.7.1", None), ("3.8.0", reason)):
        monkeypatch.setattr(hopper.triton, "__version__", version)
        assert hopper.FAMILY.declines(spec, torch.device("cuda"), 1) == expected
