"""Decode whose requests share their first pages, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire
from helpers.interpret import INTERPRETED
from helpers.page_tables import rows, table
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import AttentionSpec, PageTable, RaggedLayout, attention_spec
from quire.wrappers import shared_prefix
from quire.wrappers.prefixes import shared_prefixes

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def eager(monkeypatch):
    """Make plans share every common page, however little that saves."""
    monkeypatch.setattr(
        shared_prefix, "shared_prefixes", lambda table, q_len, least, worth: shared_prefixes(table, q_len, 1, 1)
    )


def random_tree(rng, size: int, depth: int = 3) -> tuple[list[int], list[list[int]]]:
    """Nodes' lengths in tokens, whole pages for those that are shared; and for each request the nodes on its path, of
    which the last one is its own.
    """
    lengths: list[int] = []
    paths: list[list[int]] = []

    def node(tokens: int) -> int:
        lengths.append(tokens)
        return len(lengths) - 1

    def grow(path: list[int], depth: int) -> None:
        for _ in range(rng.randint(1, 3)):
            if depth and rng.random() < 0.6:
                grow([*path, node(size * rng.randint(1, 60 // size + 1))], depth - 1)
            else:
                paths.append([*path, node(rng.randint(0 if path else 1, 3 * size + 5))])

    while len(paths) < 4:
        grow([node(size * rng.randint(1, 3))], depth)
        if rng.random() < 0.3:
            paths.append([node(0)])  # an empty request
    return lengths, paths


def tree_batch(rng, spec: AttentionSpec, size: int, q_len: int, device: str, layout: str = "NHD") -> Batch:
    """A batch over a random tree of prefixes. Slots that no request has are NaN."""
    lengths, paths = random_tree(rng, size)
    scales = [rng.choice((0.5, torch.rand(spec.num_kv_heads, device=device) + 0.5)) for _ in range(2)]
    scales = scales if spec.kv_dtype == FP8 else [1.0, 1.0]
    nodes = random_batch(
        spec, [0] * len(lengths), lengths, size, kv_layout=layout, k_scale=scales[0], v_scale=scales[1], device=device
    )
    pages, last = rows(nodes.kv), nodes.kv.last_page_len.tolist()
    kv = table([[page for node in path for page in pages[node]] for path in paths], size)
    lasts = torch.tensor([last[path[-1]] or size for path in paths], dtype=torch.int32)
    kv = PageTable(kv.indptr, kv.indices, lasts, size).to(device)
    qo = RaggedLayout.from_lengths(torch.full((len(paths),), q_len, dtype=torch.int32, device=device))
    q = torch.randn(len(paths) * q_len, spec.num_qo_heads, spec.head_dim_qk, device=device).to(spec.q_dtype)
    return replace(nodes, q=q, qo=qo, kv=kv)


def plan(batch: Batch, wrapper=None, layout: str = "NHD", **options):
    """A decode wrapper with the batch's plan; shared_prefix is True unless `options` have it."""
    spec, q_len = batch.spec, int(batch.qo.lengths()[0])
    if wrapper is None:
        backend = "triton" if INTERPRETED else "auto"
        own = torch.empty(0, device=batch.q.device)
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(own, layout, backend=backend)
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk)
    kinds = {"q_data_type": spec.q_dtype, "kv_data_type": spec.kv_dtype, "o_data_type": spec.o_dtype}
    kinds |= {"head_dim_vo": spec.head_dim_vo, "logits_soft_cap": spec.logits_soft_cap, "is_causal": spec.mask.causal}
    tables = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
    given = {"q_len_per_req": q_len, "shared_prefix": True, **kinds, **options}
    wrapper.plan(*tables, *heads, batch.kv.page_size, **given)
    return wrapper


def run(wrapper, batch: Batch, layout: str = "NHD", **options):
    """Output and lse, in tensors that were NaN."""
    spec = batch.spec
    out = torch.full((len(batch.q), spec.num_qo_heads, spec.head_dim_vo), torch.nan, device=batch.q.device)
    out, lse = out.to(spec.o_dtype), torch.full(out.shape[:2], torch.nan, device=batch.q.device)
    cache = (batch.k, batch.v) if layout == "NHD" else (batch.k.transpose(1, 2), batch.v.transpose(1, 2))
    given = {"k_scale": batch.k_scale, "v_scale": batch.v_scale, "sinks": batch.sinks, **options}
    done = wrapper.run(batch.q, cache, out=out, lse=lse, return_lse=True, **given)
    assert done[0] is out
    assert done[1] is lse
    return out, lse


def check(batch: Batch, out: torch.Tensor, lse: torch.Tensor, bound: float | None = None) -> None:
    exact, exact_lse = batch.exact()
    assert relative_error(out, exact) < (bound or BOUNDS[batch.spec.q_dtype])
    finite = exact_lse.isfinite()
    assert torch.equal(lse[~finite].double(), exact_lse[~finite])
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], rtol=1e-5, atol=1e-5)


def layer(rng, dtype=torch.float32, **changes) -> AttentionSpec:
    kv_heads, dim = rng.choice((1, 2)), rng.choice((16, 64, 72))
    heads = {"num_qo_heads": kv_heads * rng.choice((1, 4, 7)), "num_kv_heads": kv_heads, "head_dim_qk": dim}
    return attention_spec(**heads, q_dtype=dtype, **{"head_dim_vo": rng.choice((dim, 40)), **changes})


LAYERS = {
    "default": {},
    "soft cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
    "not causal": {"causal": False},
}


@pytest.mark.interpret(size=[16], q_len=[1, 3], name=["default", "sinks"])
@devices
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("size", [1, 16])
def test_run_over_a_tree_of_prefixes_matches_the_oracle(size, q_len, name, device, rng, eager):
    spec = layer(rng, **LAYERS[name])  # of which every level of a tree compiles a kernel on a GPU
    for _ in range(1 if INTERPRETED else 4):
        layout = rng.choice(("NHD", "HND"))
        batch = tree_batch(rng, spec, size, q_len, device, layout)
        wrapper = plan(batch, layout=layout)
        for _ in range(2):  # the second one may repeat launches
            check(batch, *run(wrapper, batch, layout))
            batch = replace(batch, q=torch.randn_like(batch.q))


@devices
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(BF16, {}), (torch.float16, {}), (BF16, {"kv_dtype": FP8}), (BF16, {"o_dtype": torch.float32})],
    ids=["bf16", "fp16", "fp8 cache", "float32 output"],
)
def test_run_over_a_tree_of_prefixes_in_each_dtype_matches_the_oracle(dtype, changes, device, rng, eager):
    spec = layer(rng, dtype, **changes)
    for _ in range(4):
        batch = tree_batch(rng, spec, 16, 1, device)
        check(batch, *run(plan(batch), batch))


@devices
def test_run_over_a_tree_of_prefixes_with_fp8_outputs_matches_the_oracle(device, rng, eager):
    batch = tree_batch(rng, layer(rng, BF16, o_dtype=FP8), 16, 1, device)
    out, lse = run(plan(batch), batch)
    check(batch, out.float(), lse, 0.05)


def prefixed(device: str, requests: int = 6, pages: int = 9, dtype=torch.float32, **changes) -> Batch:
    """Requests that share `pages` pages of 16 tokens, with one or two of their own."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=dtype, **changes)
    batch = random_batch(spec, [1] * requests, [pages * 16 + 5 + 16 * (b % 2) for b in range(requests)], 16)
    indptr = batch.kv.indptr.tolist()
    for begin in indptr[1:-1]:
        unused = batch.kv.indices[begin : begin + pages].long()
        batch.k[unused] = batch.v[unused] = torch.nan
        batch.kv.indices[begin : begin + pages] = batch.kv.indices[:pages]
    tensors = {name: getattr(batch, name).to(device) for name in ("q", "k", "v")}
    sinks = None if batch.sinks is None else batch.sinks.to(device)
    return replace(batch, **tensors, qo=RaggedLayout(batch.qo.indptr.to(device)), kv=batch.kv.to(device), sinks=sinks)


@devices
def test_plan_with_a_shared_prefix_has_its_pages_once(device, rng, eager):
    batch = prefixed(device)
    wrapper = plan(batch)
    found = wrapper.shared_prefix
    assert (found.groups, found.levels, found.tokens_saved) == (1, 1, 5 * 9 * 16)
    assert "groups=1" in repr(found)
    own, prefix = (part.kv for part in found.parts)
    assert int(own.lengths().sum()) + int(prefix.lengths().sum()) + found.tokens_saved == int(batch.kv.lengths().sum())
    assert found.parts[1].max_q_len == 6
    assert prefix.indices.tolist() == batch.kv.indices[:9].tolist()
    assert not set(own.indices.tolist()) & set(prefix.indices.tolist())
    out, lse = run(wrapper, batch)
    check(batch, out, lse)
    assert torch.equal(wrapper.run(batch.q, (batch.k, batch.v)), out)


def test_plan_with_a_prefix_that_saves_too_little_shares_nothing(rng, monkeypatch):
    """128 tokens, and 32 MiB besides the states that a level writes."""
    batch = prefixed("cpu")
    assert plan(batch).shared_prefix is None
    token, states = 2 * 64 * 2 * 4, 6 * 8 * 64 * 8
    for spare, groups in ((0, 1), (1, 0)):
        monkeypatch.setattr(shared_prefix, "MIN_BYTES", 5 * 9 * 16 * token - states + spare)
        assert bool(plan(batch).shared_prefix) == groups
    monkeypatch.setattr(shared_prefix, "MIN_BYTES", 0)
    assert plan(prefixed("cpu", pages=8)).shared_prefix is not None
    assert plan(prefixed("cpu", pages=7)).shared_prefix is None


@devices
def test_plan_without_a_common_prefix_equals_one_without_sharing(device, rng, eager):
    """A wrapper whose last plan had shared prefixes forgets them."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    batch = random_batch(spec, [1] * 4, [90, 5, 0, 33], 16, device=device)
    expected = run(plan(batch, shared_prefix=False), batch)
    wrapper = plan(prefixed(device))
    assert wrapper.shared_prefix is not None
    for asked in (True, False):
        plan(batch, wrapper, shared_prefix=asked)
        assert wrapper.shared_prefix is None
        assert all(torch.equal(a, b) for a, b in zip(run(wrapper, batch), expected, strict=True))


@devices
def test_run_of_an_earlier_plan_does_not_read_the_shared_prefix_of_a_later_one(device, rng, eager):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    batch = random_batch(spec, [1] * 6, [90, 5, 0, 33, 7, 16], 16, device=device)
    later = prefixed(device)
    wrapper = plan(batch, shared_prefix=False)
    earlier = wrapper.planned
    plan(later, wrapper)
    shared = wrapper.planned
    assert wrapper.shared_prefix is not None
    wrapper.planned = earlier
    assert wrapper.shared_prefix is None
    check(batch, *run(wrapper, batch))
    wrapper.planned = shared
    assert wrapper.shared_prefix is not None
    check(later, *run(wrapper, later))


@devices
def test_run_with_a_window_over_a_shared_prefix_matches_the_oracle(device, rng, eager):
    """Layers of a model may differ in this, and share a plan."""
    batch = prefixed(device)
    wrapper = plan(batch)
    with pytest.raises(ValueError, match=r"q.shape = \[5, 8, 64\] is not supported: 6 tokens"):
        wrapper.run(batch.q[:-1], (batch.k, batch.v))
    for window in (20, 150, -1, None):
        layer = replace(batch, spec=batch.spec.replace(window_left=-1 if window is None else window))
        check(layer, *run(wrapper, layer, window_left=window))


@devices
def test_run_with_another_scale_cap_or_sink_matches_the_oracle(device, rng, eager):
    batch = prefixed(device, sinks=True)
    wrapper = plan(batch)
    layer = replace(batch, spec=batch.spec.replace(sm_scale=0.3, logits_soft_cap=2.0))
    check(layer, *run(wrapper, layer, sm_scale=0.3, logits_soft_cap=2.0))
    check(replace(batch, spec=batch.spec.replace(sinks=False), sinks=None), *run(wrapper, batch, sinks=None))
    jit_args = [None] * 11 + ["AttentionSink"]
    by_position = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device), jit_args=jit_args)
    cache = (batch.k, batch.v)
    out = plan(batch, by_position).run(batch.q, cache, batch.sinks, batch.spec.sm_scale)
    assert relative_error(out, batch.exact()[0]) < 2e-6
    doubled = plan(batch).run(batch.q, cache, 2.0, sinks=batch.sinks, k_scale=0.5)
    assert relative_error(doubled, batch.exact()[0]) < 2e-6


@devices
def test_forward_over_a_shared_prefix_computes_without_sharing(device, rng, eager):
    batch = prefixed(device)
    wrapper = plan(batch)
    near = replace(batch, spec=batch.spec.replace(window_left=20))
    assert relative_error(wrapper.forward(batch.q, (batch.k, batch.v), window_left=20), near.exact()[0]) < 2e-6
    assert wrapper.shared_prefix is None


def test_workspace_size_with_a_shared_prefix_suffices_for_all_levels(rng, eager):
    batch = prefixed("cpu")
    wrapper = plan(batch)
    assert wrapper.workspace_size(
        batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len, 8, 2, 64, 16, shared_prefix=True
    ) == (16, 16)
    check(batch, *run(wrapper, batch))


def test_plan_with_a_shared_prefix_checks_its_tables(rng, eager):
    batch = prefixed("cpu")
    checking = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), check=True)
    check(batch, *run(plan(batch, checking), batch))
    batch.kv.indices[:] = len(batch.k) + 3
    with pytest.raises(ValueError, match=r"kv_indices\[0\] = .* is out of range"):
        run(plan(batch), batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_left": 7}, "window_left = 7 is not supported: -1, no window, with shared_prefix"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode = 'ALIBI' is not supported: NONE with shared_prefix"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode = 'ROPE_LLAMA' is not supported"),
        ({"disable_split_kv": True}, "shared_prefix = True is not supported: .* batch-invariant"),
        ({"fixed_split_size": 512}, "shared_prefix = True is not supported: .* batch-invariant"),
    ],
)
def test_plan_with_a_layer_that_depends_on_positions_refuses_a_shared_prefix(options, message, rng):
    batch = prefixed("cpu")
    with pytest.raises(ValueError, match=message):
        plan(batch, **options)


def test_plan_of_an_invariant_or_graph_wrapper_refuses_a_shared_prefix(rng):
    batch = prefixed("cpu")
    invariant = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), batch_invariant=True)
    with pytest.raises(ValueError, match=r"shared_prefix = True is not supported: .* batch-invariant"):
        plan(batch, invariant)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (7, 100, 6)]
    graphs = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(0), *buffers)
    with pytest.raises(ValueError, match="shared_prefix = True is not supported: with use_cuda_graph"):
        plan(batch, graphs)
    assert not buffers[0].any()


@devices
def test_compiled_run_over_a_shared_prefix_equals_eager(device, rng, eager):
    batch = prefixed(device)
    wrapper = plan(batch)
    torch.compiler.reset()
    compiled = torch.compile(lambda q: wrapper.run(q, (batch.k, batch.v)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(batch.q), wrapper.run(batch.q, (batch.k, batch.v)))
    torch.compiler.reset()


@pytest.mark.gpu
def test_captured_run_over_a_shared_prefix_matches_the_oracle(rng, eager):
    batch = prefixed("cuda", dtype=BF16)
    wrapper = plan(batch)
    check(batch, *run(wrapper, batch))
    graph, cache = torch.cuda.CUDAGraph(), (batch.k, batch.v)
    with torch.cuda.graph(graph):
        out = wrapper.run(batch.q, cache)
    batch.q.copy_(torch.randn_like(batch.q))
    graph.replay()
    assert relative_error(out, batch.exact()[0]) < BOUNDS[BF16]
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        plan(batch, wrapper)
    wrapper.forget_cuda_graph()
    check(batch, *run(wrapper, batch))  # not captured, so that plans are allowed afterwards
    check(batch, *run(plan(batch, wrapper), batch))


@pytest.mark.gpu
def test_shared_prefix_of_many_rows_is_computed_by_the_named_family(rng, eager):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it needs a Hopper GPU")
    batch = prefixed("cuda", requests=20, dtype=BF16)
    wrapper = plan(batch, quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), backend="hopper"))
    assert [part.family.name for part in wrapper.shared_prefix.parts] == ["hopper", "hopper"]
    check(batch, *run(wrapper, batch))


@pytest.mark.gpu
def test_plan_of_a_shared_prefix_on_the_host_does_not_wait_for_the_device(rng, eager):
    batch, there = prefixed("cpu", dtype=BF16), {}
    for name in ("q", "k", "v"):
        there[name] = getattr(batch, name).cuda()
    wrapper = plan(batch, quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 24, device="cuda")))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan(batch, wrapper)
        out = wrapper.run(there["q"], (there["k"], there["v"]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wrapper.shared_prefix is not None
    assert relative_error(out.cpu(), batch.exact()[0]) < BOUNDS[BF16]
