"""Options of the engine's memory and attention, and its statistics."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from helpers.engines import until_idle
from quire.engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["import os\n", "def add(a, b):\n    return", "class Stack:\n    def push(self, item):\n", "for i in range("]


@pytest.fixture(scope="module")
def expected():
    with LLM(page_size=4, num_pages=200) as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_llm_with_an_fp8_cache_begins_with_the_tokens_of_float32(expected, name):
    kind = "float16" if name == "fp8_e5m2" else "bfloat16"  # other tests compile the kernels of these dtypes, too
    with LLM(page_size=4, num_pages=200, dtype=kind, kv_cache_dtype=name) as llm:
        dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
        assert all(x.dtype == dtype for cache in llm._engine.runner.caches for x in cache)
        done = llm.generate(PROMPTS, GREEDY)
    assert sum(a.token_ids[:3] == b.token_ids[:3] for a, b in zip(done, expected, strict=True)) >= len(PROMPTS) // 2


def test_page_bytes_of_fp8_are_a_quarter_of_those_of_float32():
    with LLM(num_pages=8) as llm:
        runner = llm._engine.runner
        assert runner.page_bytes(llm.model, 16) == 4 * runner.page_bytes(llm.model, 16, "fp8")
        held = sum(x.nbytes for cache in runner.caches for x in cache)
        assert held == 8 * runner.page_bytes(llm.model, runner.page_size)


def test_llm_with_batch_invariant_has_equal_tokens(expected):
    with LLM(page_size=4, num_pages=200, batch_invariant=True) as llm:
        assert all(wrapper.invariant for wrapper in llm._engine.runner.wrappers.values())
        done = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]


@pytest.mark.parametrize("value", [0, -0.5, 1.01, 90])
def test_llm_with_an_invalid_gpu_memory_utilization_names_it(value):
    with pytest.raises(ValueError, match=f"gpu_memory_utilization = {value}: it must be above 0"):
        LLM(gpu_memory_utilization=value)


def test_llm_with_an_unknown_kv_cache_dtype_names_it():
    with pytest.raises(ValueError, match="kv_cache_dtype = 'int4' is not known"):
        LLM(kv_cache_dtype="int4")


def test_stats_during_generate_are_those_of_the_moment():
    with LLM(page_size=4, num_pages=100, max_num_seqs=2) as llm:
        assert (llm.stats.running, llm.stats.waiting, llm.stats.free_pages, llm.stats.hit_rate) == (0, 0, 100, 0.0)
        seen = []
        llm.generate(PROMPTS, GREEDY, on_update=lambda i, part: seen.append(llm.stats))
        assert max(s.running for s in seen) == 2
        assert max(s.waiting for s in seen) > 0
        assert min(s.free_pages for s in seen) < 100
        until_idle(llm)
        end = llm.stats
        assert (end.running, end.waiting, end.pages) == (0, 0, 100)
        assert end.free_pages + end.cached_pages == 100
        again = llm.generate(PROMPTS, GREEDY)
        after = llm.stats
        assert after.cached_tokens == sum(c.num_cached_tokens for c in again) + end.cached_tokens
        assert after.hit_rate == after.cached_tokens / after.prompt_tokens > 0
