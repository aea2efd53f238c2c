"""torch.compile over the wrappers: one graph, the same bits as without, and no second compilation for other tables."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import quire as flashinfer
from helpers.interpret import INTERPRETED
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import attention_spec
from quire.definition.oracle import attend

HEADS = (8, 2, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OVERRIDES = {
    "default": {},
    "lse": {"return_lse": True},
    "window": {"window_left": 5},
    "scale": {"sm_scale": 0.3, "return_lse": True},
    "cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 8), "return_lse": True},
    "factors": {"k_scale": 0.5, "v_scale": torch.tensor([0.5, 2.0])},
}


@pytest.fixture(autouse=True)
def forgotten():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def moved(values, device):
    return {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in values.items()}


def decode(device: str, lengths: list[int]):
    """A planned wrapper, and the arguments of a run."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    batch = random_batch(spec, [1] * len(lengths), lengths, 16, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(*tables(batch), *HEADS, 16, q_data_type=torch.float32)
    return wrapper, (batch.q, (batch.k, batch.v))


def paged(device: str, lengths: list[int]):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    batch = random_batch(spec, [5, 1, 40], lengths, 16, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(batch.qo.indptr, *tables(batch), *HEADS, 16, causal=True, q_data_type=torch.float32)
    return wrapper, (batch.q, torch.stack((batch.k, batch.v), 1))


def ragged(device: str, lengths: list[int]):
    indptr = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    k, v = torch.randn(2, int(indptr[-1]), 2, 64, device=device)
    qo_indptr = torch.tensor([0, 5, 6, 46], dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(qo_indptr, indptr, *HEADS, causal=True, q_data_type=torch.float32)
    return wrapper, (torch.randn(46, 8, 64, device=device), k, v)


def tables(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len


def compare(function, *args):
    """The compiled function gives the same as the function."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", OVERRIDES)
@pytest.mark.parametrize("make", [decode, paged, ragged])
def test_compiled_run_equals_eager(make, given, device):
    wrapper, args = make(device, [30, 7, 40])
    options = moved(OVERRIDES[given], device)
    compare(lambda *args: wrapper.run(*args, **options), *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [decode, paged, ragged])
def test_compiled_run_with_out_and_lse_writes_to_them(make, device):
    wrapper, args = make(device, [30, 7, 40])
    expected = wrapper.run_return_lse(*args)
    out, lse = (torch.full_like(x, torch.nan) for x in expected)

    def into(*args):
        return wrapper.run(*args, out=out, lse=lse) * 2

    doubled = torch.compile(into, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)
    torch.testing.assert_close(doubled, expected[0] * 2)
    compare(lambda *args: wrapper.run_return_lse(*args), *args)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_run_with_lse_base_and_layout_equals_eager(device):
    wrapper, args = paged(device, [30, 7, 40])
    compare(lambda *args: wrapper.run(*args, return_lse=True, lse_base="ln", lse_layout="HN"), *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "return_lse": True},
        {"window_left": 3, "sm_scale": 0.2},
        {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 3.0},
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 500.0},
        {"scale_k": torch.tensor([0.5, 2.0]), "v_scale": 3.0},
        {"custom_mask": torch.arange(7 * 46).view(7, 46) % 3 > 0},
        {"kv_layout": "HND", "o_dtype": torch.bfloat16},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_compiled_single_request_equals_eager(options, device):
    q, k = torch.randn(7, 8, 64, device=device), torch.randn(46, 2, 64, device=device)
    options = moved(options, device)
    if options.get("kv_layout") == "HND":
        k = k.transpose(0, 1).contiguous()
    compare(lambda q, k, v: flashinfer.single_prefill_with_kv_cache(q, k, v, **options), q, k, k * 2)
    decoding = {k: x for k, x in options.items() if k in ("window_left", "sm_scale", "kv_layout", "return_lse")}
    compare(lambda q, k, v: flashinfer.single_decode_with_kv_cache(q, k, v, **decoding), q[0], k, k * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_run_with_changed_tables_is_not_recompiled(device):
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 64, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device), *buffers)
    counter = CompileCounter()
    compiled = torch.compile(lambda q, k, v: wrapper.run(q, (k, v)), fullgraph=True, backend=counter)
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    for lengths in ([30, 7, 40], [1, 33, 60], [16, 16, 16]):
        batch = random_batch(spec, [1] * 3, lengths, 16, device=device)
        k, v = torch.zeros(2, 40, 16, 2, 64, device=device)
        k[: len(batch.k)], v[: len(batch.v)] = batch.k, batch.v
        wrapper.plan(*tables(batch), *HEADS, 16, q_data_type=torch.float32)
        torch.testing.assert_close(compiled(batch.q, k, v), wrapper.run(batch.q, (k, v)), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [decode, paged, ragged])
def test_compiled_run_after_another_eager_plan_equals_eager(make, device):
    wrapper, _ = make(device, [30, 7, 40])
    counter = CompileCounter()
    compiled = torch.compile(lambda *args: wrapper.run(*args), fullgraph=True, backend=counter)
    for lengths in ([30, 7, 40], [30, 20, 41], [16, 16, 90], [100, 100, 100]):
        other, args = make(device, lengths)
        vars(wrapper).update(vars(other))  # as if this one had been planned
        torch.testing.assert_close(compiled(*args), wrapper.run(*args), rtol=0, atol=0)
    assert counter.frame_count <= 2  # the second is for tables of any length


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [decode, paged, ragged])
def test_attend_passes_opcheck(make, device, monkeypatch):
    wrapper, args = make(device, [30, 7, 40])
    calls = caught(monkeypatch, "quire.attend.default", lambda: wrapper.run_return_lse(*args))
    assert len(calls) == 1
    torch.library.opcheck(torch.ops.quire.attend.default, *calls[0])


@pytest.mark.parametrize("device", DEVICES)
def test_attend_one_passes_opcheck(device, monkeypatch):
    q, k = torch.randn(7, 8, 64, device=device), torch.randn(46, 2, 64, device=device)
    mask = torch.rand(7, 46, device=device) < 0.5
    calls = caught(
        monkeypatch,
        "quire.attend_one.default",
        lambda: flashinfer.single_prefill_with_kv_cache_return_lse(q, k, k, custom_mask=mask, scale_k=2.0),
    )
    assert len(calls) == 1
    torch.library.opcheck(torch.ops.quire.attend_one.default, *calls[0])


@pytest.mark.slow
@pytest.mark.interpret(backend=["aot_eager"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_wrappers_over_one_workspace_match_the_oracle(backend, device):
    """A graph gets no overlapping tensors that are written to, which Inductor cannot compile; sizes of plans differ."""
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace)
    decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    if INTERPRETED:  # Triton's kernels use the workspace, the CPU's do not
        for wrapper in (*cascade._batch_prefill_wrappers, decode_wrapper):
            wrapper._family = "triton"
    written = {x.name for x in torch.ops.quire.attend.default._schema.arguments if x.alias_info is not None}
    assert written == {"out", "lse"}

    def step(q, cache):
        return cascade.run(q, cache), decode_wrapper.run(q, cache)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    for requests in (3, 5, 2):
        batch = random_batch(spec, [1] * requests, [10 + 16 * i for i in range(requests)], 16, device=device)
        indptr, indices, last = tables(batch)
        # Levels: keys that nobody else has, then those of the first request for all, and for all once more.
        alone = torch.arange(requests + 1, dtype=torch.int32, device=device)
        together = [x.int() for x in (alone[[0, -1]], indptr[:2])]
        qo, kv, lasts = [together[0]] * 2 + [alone], [together[1]] * 2 + [indptr], [last[:1]] * 2 + [last]
        cascade.plan(qo, kv, [indices] * 3, lasts, *HEADS, 16, q_data_type=torch.float32)
        decode_wrapper.plan(indptr, indices, last, *HEADS, 16, q_data_type=torch.float32)
        cache = torch.stack([batch.k, batch.v], 1)
        k, v, ends = batch.rows()
        shared, exact = slice(0, int(ends[1])), []
        for i in range(requests):
            own = slice(int(ends[i]), int(ends[i + 1]))
            rows = [torch.cat([x[shared], x[shared], x[own]]) for x in (k, v)]
            exact.append(attend(batch.q[i : i + 1], *rows, spec)[0])
        levels, decoded = compiled(batch.q, cache)
        assert relative_error(levels, torch.cat(exact)) < 2e-6
        assert relative_error(decoded, batch.exact()[0]) < 2e-6
        torch.testing.assert_close((levels, decoded), step(batch.q, cache), rtol=0, atol=0)


def caught(monkeypatch, name, run):
    """The arguments with which an operation is called, when calls go through torch's dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Catch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func) == name:
                calls.append((args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("quire.kernels.ops.traced", lambda x: True)
    monkeypatch.setattr("quire.kernels.attention.traced", lambda x: True)
    with Catch():
        run()
    return calls
