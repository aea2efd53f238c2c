"""Merging states, and attention in levels, against softmax over all keys in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import quire as flashinfer
from quire import cascade
from quire.bench.batches import random_batch, random_table, relative_error
from quire.definition import RaggedLayout, attention_spec
from quire.definition.oracle import attend
from quire.kernels import merge

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}
devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_states(tokens, n, heads, dim, dtype, device):
    """Some without keys, whose v is NaN; some so far apart that only one counts."""
    v = torch.randn(tokens, n, heads, dim + 8, device=device).to(dtype)[..., :dim]
    s = torch.randn(tokens, n, heads, device=device) * 5
    s[torch.rand_like(s) < 0.2] = -torch.inf
    s[torch.rand_like(s) < 0.1] = -60000.0
    s[0] = -torch.inf
    v[s == -torch.inf] = torch.nan
    return v, s


def union(v, s):
    """The state of a union of sets, by the softmax over the sets in float64."""
    weight = torch.softmax(torch.cat([s, torch.full_like(s[:, :1], -torch.inf)], 1).double() * 0.6931471805599453, 1)
    weight = weight[:, :-1].nan_to_num(0.0)[..., None]
    out = torch.where(weight == 0, 0.0, weight * v.double()).sum(1)
    return out, torch.logsumexp(s.double() * 0.6931471805599453, 1) / 0.6931471805599453


def assert_is(result, exact, dtype):
    (out, lse), (v, s) = result, exact
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), v, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), s, rtol=1e-6, atol=1e-5)
    assert not out[s == -torch.inf].any()


@pytest.mark.interpret(dtype=[torch.float32, torch.float16])
@devices
@dtypes
def test_merge_state_is_the_union_of_two_states(device, dtype, rng):
    v, s = random_states(rng.randrange(1, 40), 2, rng.choice((1, 3, 8)), rng.choice((8, 64, 80, 256)), dtype, device)
    assert_is(flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), union(v, s), dtype)
    wide = s.double()
    assert_is(flashinfer.merge_state(v[:, 0], wide[:, 0], v[:, 1], wide[:, 1]), union(v, s), dtype)


@pytest.mark.interpret(dtype=[torch.float32, torch.float16])
@devices
@dtypes
@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_merge_states_is_the_union_of_many_states(device, dtype, n, rng):
    v, s = random_states(rng.randrange(1, 20), n, 3, rng.choice((64, 96)), dtype, device)
    assert_is(flashinfer.merge_states(v, s), union(v, s), dtype)


@pytest.mark.interpret(dtype=[torch.float32, torch.float16])
@devices
@dtypes
@pytest.mark.parametrize("stride", [None, 0, 1, 3])
def test_merge_state_in_place_with_a_mask_changes_masked_rows_alone(device, dtype, stride):
    v, s = random_states(17, 2, 2, 64, dtype, device)
    exact_v, exact_s = union(v, s)
    kept_v, kept_s = v[:, 0].clone(), s[:, 0].contiguous()
    own_v, own_s = v[:, 0], s[:, 0].contiguous()
    mask = None
    if stride is not None:
        bits = torch.rand(50, device=device) < 0.5
        mask = bits[1:2].expand(17) if stride == 0 else bits[1::stride][:17]
    flashinfer.merge_state_in_place(own_v, own_s, v[:, 1], s[:, 1], mask)
    merged = torch.ones(17, dtype=torch.bool, device=device) if mask is None else mask
    assert_is((own_v[merged], own_s[merged]), (exact_v[merged], exact_s[merged]), dtype)
    torch.testing.assert_close(own_v[~merged], kept_v[~merged], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(own_s[~merged], kept_s[~merged])


@pytest.mark.interpret
@devices
def test_merge_states_into_strided_outputs_writes_nothing_else(device):
    v, s = random_states(9, 2, 4, 40, torch.float32, device)
    room, room_s = torch.full((9, 2, 4, 48), torch.nan, device=device), torch.full((9, 2, 4), torch.nan, device=device)
    merge.merge_states(v, s, room[:, 1, :, :40], room_s[:, 1])
    assert_is((room[:, 1, :, :40], room_s[:, 1]), union(v, s), torch.float32)
    assert room[:, 0].isnan().all()
    assert room[:, 1, :, 40:].isnan().all()
    assert room_s[:, 0].isnan().all()


@pytest.mark.interpret
@devices
def test_merge_state_of_no_tokens_is_empty(device):
    v, s = random_states(3, 2, 2, 16, torch.float32, device)
    out, lse = flashinfer.merge_state(v[:0, 0], s[:0, 0], v[:0, 1], s[:0, 1])
    assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))


@devices
def test_compiled_merges_equal_eager_and_pass_opcheck(device):
    v, s = random_states(5, 2, 2, 16, torch.float32, device)
    v = v.nan_to_num(0.0)
    pair = (v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
    mask = torch.rand(5, device=device) < 0.5

    def all_three(v, s, pair, mask):
        a, b = pair[0].clone(), pair[1].clone()
        flashinfer.merge_state_in_place(a, b, *pair[2:], mask)
        return a, b, *flashinfer.merge_state(*pair), *flashinfer.merge_states(v, s)

    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(v, s, pair, mask), all_three(v, s, pair, mask), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    outputs = torch.empty_like(pair[0]), torch.empty_like(pair[1])
    for op, arguments in (
        (torch.ops.quire.merge_state, (*pair, *outputs)),
        (torch.ops.quire.merge_state_in_place, (*pair, mask)),
        (torch.ops.quire.merge_state_in_place, (*pair, None)),
        (torch.ops.quire.merge_states, (v, s, *outputs)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_b": torch.zeros(4, 2, 9)}, r"v_b has shape \[4, 2, 9\]: it must be \[4, 2, 8\]"),
        ({"v_b": torch.zeros(4, 2, 8).half()}, "v_b is torch.float16: it must be torch.float32"),
        ({"v_a": torch.zeros(4, 2)}, r"v_a has shape \[4, 2\]"),
        ({"v_a": torch.zeros(4, 8, 2).transpose(1, 2)}, "v_a has strides"),
        ({"s_a": torch.zeros(4, 3)}, r"s_a has shape \[4, 3\]"),
        ({"s_b": torch.zeros(2, 4).T}, "s_b has strides"),
    ],
)
def test_merge_state_with_wrong_arguments_is_refused(change, message):
    given = {
        "v_a": torch.zeros(4, 2, 8),
        "s_a": torch.zeros(4, 2),
        "v_b": torch.zeros(4, 2, 8),
        "s_b": torch.zeros(4, 2),
    }
    with pytest.raises(ValueError, match=message):
        flashinfer.merge_state(**{**given, **change})


@pytest.mark.parametrize(
    ("s", "mask", "message"),
    [
        (torch.zeros(4, 2).double(), None, "s is torch.float64: it must be torch.float32"),
        (torch.zeros(4, 2), torch.ones(4), r"mask is torch.float32 of shape \[4\] on cpu: it must be torch.bool"),
        (torch.zeros(4, 2), torch.ones(3) > 0, r"mask is torch.bool of shape \[3\]"),
    ],
)
def test_merge_state_in_place_with_wrong_arguments_is_refused(s, mask, message):
    v = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=message):
        flashinfer.merge_state_in_place(v, s, v, torch.zeros(4, 2), mask)


class Levels:
    """Four requests; in a level of three all share their keys, in one of two each half does, in the last one none."""

    def __init__(self, rng, device, dtype=torch.float32, q_lens=(3, 1, 2, 4), levels=3, layout="NHD"):
        self.spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=dtype, causal=False)
        self.page_size, self.layout, self.device = rng.choice((1, 4, 16)), layout, device
        groups = [[(0, 4)], [(0, 2), (2, 4)], [(i, i + 1) for i in range(4)]][-levels:]
        begins = RaggedLayout.from_lengths(torch.tensor(q_lens, dtype=torch.int32)).indptr.tolist()
        lengths = [[rng.randrange(q_lens[0] + 4, 40) for _ in level] for level in groups]
        self.pages, pool = random_table([n for level in lengths for n in level], self.page_size)
        self.q = torch.randn(sum(q_lens), 4, 32, device=device).to(dtype)
        shape = (pool, 2, self.page_size, 2, 32) if layout == "NHD" else (pool, 2, 2, self.page_size, 32)
        self.cache = torch.randn(shape, device=device).to(dtype)
        nhd = self.cache if layout == "NHD" else self.cache.transpose(2, 3)
        self.plans, keys, first = [], [[] for _ in q_lens], 0
        for level, level_lengths in zip(groups, lengths, strict=True):
            qo = torch.tensor([0, *(begins[end] for _, end in level)], dtype=torch.int32)
            indptr = self.pages.indptr[first : first + len(level) + 1]
            self.plans.append([qo, indptr, self.pages.indices, self.pages.last_page_len[first : first + len(level)]])
            for i, ((begin, end), length) in enumerate(zip(level, level_lengths, strict=True)):
                own = self.pages.indices[int(indptr[i]) : int(indptr[i + 1])].long().to(device)
                for request in range(begin, end):
                    keys[request].append(nhd[own].transpose(0, 1).flatten(1, 2)[:, :length])
            first += len(level)
        self.keys = [torch.cat(parts, 1) for parts in keys]  # [2, tokens, heads, dim] of each request
        self.rows = [slice(a, b) for a, b in pairwise(begins)]

    def exact(self, causal=False):
        spec = self.spec.replace(causal=causal)
        return torch.cat([attend(self.q[rows], *kv, spec)[0] for rows, kv in zip(self.rows, self.keys, strict=True)])

    def assert_rounded_once(self, out, causal=False):
        """The error is that of one call over all keys; rounded at each level, it would be 1.4 times as large."""
        calls = [(self.q[rows], *keys) for rows, keys in zip(self.rows, self.keys, strict=True)]
        options = {"causal": causal, "sm_scale": self.spec.sm_scale}
        one_call = torch.cat([flashinfer.single_prefill_with_kv_cache(*call, **options) for call in calls])
        assert out.dtype == self.q.dtype
        exact = self.exact(causal)
        assert relative_error(out, exact) <= 1.2 * relative_error(one_call, exact)

    def tables(self):
        return [list(column) for column in zip(*[[x.to(self.device) for x in p] for p in self.plans], strict=True)]


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_multi_level_cascade_matches_the_oracle(levels, causal, layout, device, rng):
    batch = Levels(rng, device, levels=levels, layout=layout)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(levels, torch.empty(0, device=device), layout)
    wrapper.plan(*batch.tables(), 4, 2, 32, batch.page_size, causal=causal, q_data_type=torch.float32)
    wrapper.prewarm_paged_kv_stride_variant()
    assert relative_error(wrapper.run(batch.q, batch.cache), batch.exact(causal)) < 2e-6
    pair = tuple(batch.cache.unbind(1))
    assert relative_error(wrapper.forward(batch.q, pair), batch.exact(causal)) < 2e-6


@devices
def test_multi_level_cascade_with_graph_buffers_fills_them(device, rng):
    batch = Levels(rng, device, levels=2)
    tables = batch.tables()
    buffers = [[torch.zeros_like(x) for x in column] for column in tables]
    buffers[2] = [x.new_zeros(len(x) + 7) for x in tables[2]]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0, device=device), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*tables, 4, 2, 32, batch.page_size, q_data_type=torch.float32)
    assert torch.equal(buffers[0][1], tables[0][1])
    assert relative_error(wrapper.run(batch.q, batch.cache), batch.exact()) < 2e-6


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_multi_level_cascade_in_16_bits_is_rounded_once(levels, dtype, device, rng):
    batch = Levels(rng, device, dtype, (1, 1, 1, 1), levels)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(levels, torch.empty(0, device=device))
    wrapper.plan(*batch.tables(), 4, 2, 32, batch.page_size, q_data_type=dtype)
    batch.assert_rounded_once(wrapper.run(batch.q, batch.cache))


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_shared_prefix_wrappers_match_the_oracle(stage, layout, device, rng):
    q_lens = (1, 1, 1, 1) if stage == "decode" else (3, 1, 2, 4)
    batch = Levels(rng, device, torch.bfloat16, q_lens, levels=1, layout=layout)
    k, v = torch.randn(2, rng.randrange(1, 50), 2, 32, device=device).bfloat16()
    batch.keys = [torch.cat([torch.stack([k, v]), own], 1) for own in batch.keys]
    (qo,), (indptr,), (indices,), (last,) = batch.tables()
    shared = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    if stage == "decode":
        wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(0, device=device), layout)
        wrapper.begin_forward(indptr, indices, last, 4, 2, 32, batch.page_size, torch.bfloat16)
        batch.assert_rounded_once(wrapper.forward(batch.q, *shared, batch.cache))
    else:
        wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(0, device=device), layout)
        wrapper.begin_forward(qo, indptr, indices, last, 4, 2, 32, batch.page_size, torch.bfloat16)
        wrapper.prewarm_paged_kv_stride_variant("independent")
        for causal in (True, False):
            out = wrapper.forward(batch.q, *shared, batch.cache, causal=causal)
            batch.assert_rounded_once(out, causal)
        scaled = wrapper.forward(batch.q, *shared, batch.cache, sm_scale=0.5)
        batch.spec = batch.spec.replace(sm_scale=0.5)
        batch.assert_rounded_once(scaled)
    wrapper.reset_workspace_buffer(
        torch.empty(1 << 20, device=device), torch.empty(8 << 20, dtype=torch.uint8, device=device)
    )


def test_multi_level_cascade_with_wrong_arguments_is_refused(rng):
    batch = Levels(rng, "cpu", levels=2)
    with pytest.raises(ValueError, match="num_levels = 0 is not supported"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, torch.empty(0))
    with pytest.raises(ValueError, match=r"len\(qo_indptr_buf_arr\) = None .* num_levels = 2"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0), use_cuda_graph=True)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0))
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
        wrapper.run(batch.q, batch.cache)
    tables = batch.tables()
    with pytest.raises(ValueError, match=r"len\(paged_kv_indices_arr\) = 1 .* num_levels = 2"):
        wrapper.plan(*tables[:2], tables[2][:1], tables[3], 4, 2, 32, batch.page_size)
    with pytest.raises(ValueError, match="variant = 'shared' is not supported: independent"):
        wrapper.prewarm_paged_kv_stride_variant("shared")
    with pytest.raises(ValueError, match=r"len\(int_workspace_buffers\) = 1"):
        wrapper.reset_workspace_buffer(torch.empty(0), [torch.empty(0)])


@pytest.mark.interpret(dtype=[torch.float32, torch.float16])
@devices
@dtypes
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_variable_length_merge_states_is_the_union_of_each_row(device, dtype, index, rng):
    counts = [rng.choice((0, 1, 2, 17)) for _ in range(rng.randrange(1, 30))]
    v, s = random_states(1, sum(counts) + 5, 3, rng.choice((8, 64, 80)), dtype, device)  # 5 before and after the rows
    v, s = v[0], s[0]
    s[rng.randrange(len(s)) :] = 0.5
    v[s == 0.5] = 0.25
    ends = torch.tensor([2, *counts]).cumsum(0).to(device)
    result = cascade.variable_length_merge_states(v, s, ends.to(index))
    assert result[0].shape == (len(counts), *v.shape[1:])
    for i, (begin, end) in enumerate(pairwise(ends.tolist())):
        one = union(v[None, begin:end].nan_to_num(), s[None, begin:end])
        assert_is([x[i : i + 1] for x in result], one, dtype)


@pytest.mark.interpret
@devices
def test_variable_length_merge_states_of_no_states_is_empty(device):
    v, s = torch.zeros(0, 2, 8, device=device), torch.zeros(0, 2, device=device)
    for rows in (0, 3):
        out, lse = cascade.variable_length_merge_states(v, s, torch.zeros(rows + 1, dtype=torch.int32, device=device))
        assert (out.shape, lse.shape) == ((rows, 2, 8), (rows, 2))
        assert not out.any()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([0, 3, 2], "falls at request 1"),
        ([0, 5], r"indptr\[-1\] = 5 is beyond the number of sets = 4"),
        ([-1, 2], r"indptr\[0\] = -1"),
        ([], "indptr is empty"),
        ([0.0, 2.0], "indptr is torch.float32"),
    ],
)
def test_variable_length_merge_states_with_a_wrong_indptr_is_refused(indptr, message):
    with pytest.raises(ValueError, match=message):
        cascade.variable_length_merge_states(
            torch.zeros(4, 2, 8), torch.zeros(4, 2), torch.tensor(indptr, dtype=None if indptr else torch.int32)
        )


@pytest.mark.gpu
def test_variable_length_merge_states_does_not_wait_for_the_device():
    v, s = (x[0] for x in random_states(1, 40, 3, 64, torch.float16, "cuda"))
    indptr = torch.tensor([0, 7, 7, 40], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cascade.variable_length_merge_states(v, s, indptr)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_end_forward_of_each_wrapper_does_nothing():
    for name in (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "PODWithPagedKVCacheWrapper",
        "BatchPODWithPagedKVCacheWrapper",
    ):
        assert getattr(flashinfer, name)(torch.empty(0, dtype=torch.uint8)).end_forward() is None


def test_merge_of_states_over_parts_of_the_keys_equals_the_whole(rng):
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=torch.float32, causal=False)
    batch = random_batch(spec, [6], [50], 16)
    k, v, _ = batch.rows()
    whole = flashinfer.single_prefill_with_kv_cache(batch.q, k, v, return_lse=True)
    cuts = sorted(rng.sample(range(1, 50), 2))
    parts = [
        flashinfer.single_prefill_with_kv_cache(batch.q, a, b, return_lse=True)
        for a, b in zip(k.tensor_split(cuts), v.tensor_split(cuts), strict=True)
    ]
    merged = flashinfer.merge_state(*flashinfer.merge_state(*parts[0], *parts[1]), *parts[2])
    stacked = flashinfer.merge_states(torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1))
    for result in (merged, stacked):
        for a, b in zip(result, whole, strict=True):
            torch.testing.assert_close(a, b)
    v_a, s_a = parts[0][0].clone(), parts[0][1].clone()
    mask = torch.tensor([True, False, True, True, False, True])
    flashinfer.merge_state_in_place(v_a, s_a, *parts[1], mask=mask)
    both = flashinfer.merge_state(*parts[0], *parts[1])
    assert torch.equal(v_a[mask], both[0][mask])
    assert torch.equal(v_a[~mask], parts[0][0][~mask])
    assert torch.equal(s_a[~mask], parts[0][1][~mask])
    with pytest.raises(ValueError, match=r"s_b has shape \[3, 4\]"):
        flashinfer.merge_state(*parts[0], parts[1][0], parts[1][1][:3])
    with pytest.raises(ValueError, match=r"v has shape \[6, 4, 32\]"):
        flashinfer.merge_states(parts[0][0], parts[0][1])
