"""The plug-in of vLLM on a GPU: all that vLLM asks of a layer, and its CUDA graphs, against the definition."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helpers.vllm_steps import Steps
from quire.bench.batches import relative_error
from quire.definition import attention_spec

pytestmark = pytest.mark.gpu
BOUND = 4e-3  # of bf16 outputs over an fp8 cache, whose products Hopper's kernels round to fp16


def steps(**options: Any) -> Steps:
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128}
    spec = attention_spec(**{**heads, "q_dtype": torch.bfloat16, **options.pop("changes", {})})
    sinks = torch.randn(spec.num_qo_heads, device="cuda").bfloat16() if options.pop("sinks", False) else None
    return Steps(spec, device="cuda", sinks=sinks, **options)


def check(computed: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, exact = computed
    assert relative_error(out, exact) < BOUND


@contextmanager
def no_waiting():
    """Raise where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "HND"},
        {"layout": "layers"},
        {"kv_cache_dtype": "fp8", "scales": (0.3, 2.0)},
        {"kv_cache_dtype": "fp8_e5m2", "scales": (0.3, 2.0), "measured": True, "layout": "HND"},
        {"changes": {"window_left": 40, "logits_soft_cap": 30.0}},
        {"changes": {"head_dim_qk": 64, "num_qo_heads": 16, "window_left": 63}, "sinks": True},
        {"changes": {"head_dim_qk": 256, "num_kv_heads": 4, "logits_soft_cap": 50.0}},
        {"changes": {"num_qo_heads": 7, "num_kv_heads": 1}, "block_size": 32},
        {"changes": {"head_dim_qk": 96}},
        {"changes": {"num_qo_heads": 64, "num_kv_heads": 1}, "spec_tokens": 1},
        {"spec_tokens": 3},
        {"changes": {"causal": False}},
    ],
    ids=str,
)
def test_forward_of_all_steps_gives_the_oracles_output(options, rng):
    run = steps(num_blocks=400, max_blocks=40, **options)
    drafts = 1 + run.spec_tokens
    run.start(3)
    check(run.step([200, 1, rng.randrange(2, 300)]))
    check(run.step([drafts, drafts, drafts], pad_reqs=2, pad_tokens=2 * drafts))
    run.start(2, run.sequences[0], 3)
    check(run.step([1, drafts, 1, 70, 33], pad_tokens=5))
    check(run.step([1, 1, 1, 1, 1]))


def test_forward_of_a_shared_prefix_gives_the_oracles_output(rng):
    run = steps(num_blocks=400, max_blocks=40, sinks=True)
    first = run.start(1)[0]
    check(run.step([16 * 30]))
    run.start(9, first, 30)
    check(run.step([1, *(rng.randrange(1, 40) for _ in range(9))], prefix=480))
    check(run.step([1] * 10, prefix=480))


def test_steps_never_wait_for_the_device(rng):
    run = steps(num_blocks=400, max_blocks=40)
    run.start(3)
    for q_lens in ([200, 1, 40], [1, 1, 1], [1, 90, 1], [1, 1, 1]):
        slots = run.write(q_lens)
        common, q = run.metadata(q_lens, slots=slots), run.queries(q_lens)
        out = torch.empty_like(q)
        with no_waiting():
            metadata = run.builder.build(0, common)
            for _ in range(2):
                run.impl.forward(run.layer, q, q, q, run.cache, metadata, out)
        check((out.cpu(), run.exact(q, q_lens)))


class CapturedStep:
    """A full CUDA graph of a layer, over tensors that vLLM writes before each replay."""

    def __init__(self, run: Steps, q_lens: list[int]) -> None:
        self.run, self.tokens, self.count = run, sum(q_lens), len(q_lens)
        self.common = run.metadata(q_lens)
        self.q = torch.zeros(self.tokens, run.spec.num_qo_heads, run.spec.head_dim_qk, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self._forward()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        metadata = self.run.builder.build_for_cudagraph_capture(self.common)
        self.run.impl.forward(self.run.layer, self.q, self.q, self.q, self.run.cache, metadata, self.out)

    def replay(self, q_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step of at most as many requests and tokens."""
        self.run.write(q_lens)
        common, used = self.run.metadata(q_lens, self.count - len(q_lens)), sum(q_lens)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
            getattr(self.common, name).copy_(getattr(common, name))
        self.q[:used] = self.run.queries(q_lens)
        self.out.fill_(torch.nan)
        self.run.builder.build(0, common)
        self.graph.replay()
        return self.out[:used].cpu(), self.run.exact(self.q[:used], q_lens)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("spec_tokens", [0, 3])
def test_graph_of_decodes_computes_later_steps(spec_tokens, kv_cache_dtype, rng):
    run = steps(num_blocks=400, max_blocks=40, spec_tokens=spec_tokens, kv_cache_dtype=kv_cache_dtype)
    run.start(5)
    check(run.step([rng.randrange(1, 200) for _ in range(5)]))
    graph = CapturedStep(run, [1 + spec_tokens] * 8)
    for _ in range(3):
        check(graph.replay([1 + spec_tokens] * 5))
        check(run.step([1, 1, 30, 1, 1]))
    check(graph.replay([1] * 5))


def test_graph_of_mixed_steps_computes_any_batch_of_as_many_tokens(rng):
    run = steps(num_blocks=400, max_blocks=40, mixed_mode="FULL")
    run.start(4)
    check(run.step([150, 1, 30, 7]))
    graph = CapturedStep(run, [1] * 64)
    for q_lens in ([1, 1, 1, 1], [1, 40, 1, 9], [61, 1, 1, 1], [1, 1, 1, 1]):
        check(graph.replay(q_lens))
