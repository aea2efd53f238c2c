"""Engines whose ranks divide the cache among them: the tokens of one rank."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import save
from helpers.engines import pages_add_up, same, until_idle
from helpers.ranks import check_completions, random_params, random_prompts
from helpers.server_processes import children_of
from quire.engine import LLM, EmbeddingParams, EngineConfig, SamplingParams
from quire.engine.parallel.context import ContextParallelRunner

SMALL = {"device": "cpu", "max_batched_tokens": 48, "page_size": 4}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")


def check_tokens(folder, rng, size, num_pages=1000, **options):
    """Compare the completions of an engine of several ranks with those of one rank."""
    prompts, params = random_prompts(rng, 8, 96), random_params(rng, 8)
    options |= {**SMALL, "num_pages": num_pages}
    with LLM(folder, **options) as one, LLM(folder, **options, context_parallel_size=size) as several:
        for _ in range(2):
            # Pages of the prefix tree serve the second time.
            check_completions(one, several, prompts, params)
        runner = several._engine.runner
        assert all(len(cache[0]) == -(-num_pages // size) for cache in runner.caches)


def test_llm_with_a_divided_cache_has_the_outputs_of_one(rng):
    prompts = ["def add(a, b):", "import os\nimport sys\n" * 20, "class A", "x"]
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=1, prompt_logprobs=1)
    options = {**SMALL, "num_pages": 301}
    with LLM(**options) as one, LLM(**options, context_parallel_size=2, speculative_tokens=3) as two:
        assert children_of(os.getpid())
        expected, found = one.generate(prompts, params), two.generate(prompts, params)
        same(found, expected, one, prompts, [params] * len(prompts))
        for a, b in zip(found, expected, strict=True):
            for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
                assert x == pytest.approx(y, abs=1e-4)
        assert two.stats.accepted_tokens > 0
        (a,), (b,) = (llm.embed(["import os"], EmbeddingParams("mean")) for llm in (two, one))
        assert list(a.values) == pytest.approx(list(b.values), abs=1e-4)
        until_idle(two)
        assert pages_add_up(two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "num_pages"),
    # With few pages, requests are preempted. Mixtral's experts are chosen by rank 0.
    [("llama", 3, 1000), ("llama", 2, 40), ("qwen3", 4, 999), ("mixtral", 2, 1000), ("olmo2", 2, 1000)],
)
def test_llm_with_a_divided_cache_has_the_tokens_of_one(name, size, num_pages, tmp_path, rng):
    options = {"sliding_window": None} if name == "mixtral" else {}
    check_tokens(save(name, tmp_path, vocab_size=96, **options), rng, size, num_pages)


@pytest.mark.slow
def test_llm_with_a_divided_cache_and_compiled_layers_has_the_tokens_of_one(tmp_path, rng):
    check_tokens(save("llama", tmp_path, vocab_size=96), rng, 2, compile=True)


@pytest.mark.slow
def test_llm_with_a_divided_cache_and_adapters_has_the_tokens_of_one(tmp_path, rng):
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from helpers.adapters import save_adapter

    base = save("llama", tmp_path / "base", vocab_size=96)
    network = AutoModelForCausalLM.from_pretrained(base)
    folder = save_adapter(network, tmp_path / "adapter", r=5, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    prompts, params = random_prompts(rng, 6, 96), random_params(rng, 6)
    options = {**SMALL, "num_pages": 300, "max_adapters": 1, "adapters": {"own": folder}}
    names = ["own", None] * 3
    with LLM(base, **options) as one, LLM(base, **options, context_parallel_size=3) as several:
        check_completions(one, several, prompts, params, adapter=names)


@pytest.mark.slow
def test_llm_with_a_divided_cache_whose_rank_is_killed_ends_requests():
    before = set(children_of(os.getpid()))
    with LLM(**SMALL, num_pages=300, context_parallel_size=2, tensor_parallel_timeout=30) as llm:
        (process,) = set(children_of(os.getpid())) - before

        def kill(index, update):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

        params = SamplingParams(max_tokens=300, ignore_eos=True)
        (completion,) = llm.generate(["x"], params, on_update=kill)
        assert completion.error == "RankError: rank 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8"}, {"batch_invariant": True}], ids=str
)
def test_divided_cache_with_what_it_does_not_support_is_refused(options):
    with pytest.raises(ValueError, match=f"context_parallel_size = 2 is not supported with {next(iter(options))}"):
        EngineConfig(context_parallel_size=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), [("mistral", "of its layers have a window"), ("gpt-oss", "have a window")])
def test_model_with_windows_is_not_run_with_a_divided_cache(name, reason, tmp_path):
    folder = save(name, tmp_path)
    with pytest.raises(ValueError, match=f"{folder} can't be run with context_parallel_size = 2: .*{reason}"):
        LLM(folder, **SMALL, num_pages=100, context_parallel_size=2)


@pytest.mark.parametrize("width", [None, 40])
def test_pages_of_all_ranks_have_each_visible_token_once(width, rng):
    """Of requests of random lengths and pages, and of steps with one new token each or several; in tables of their
    pages alone, and in tables with as many entries for each request.
    """
    size, page_size = rng.randint(1, 5), rng.randint(1, 5)
    lengths = [rng.randint(1, 40) for _ in range(6)]
    visible = [length - rng.choice((0, 1, length)) for length in lengths]
    pages = np.array(rng.sample(range(500), 6 * 40), dtype=np.int32).reshape(6, 40)
    used = [-(-length // page_size) for length in lengths]
    indices = np.concatenate([row[: width or n] for row, n in zip(pages, used, strict=True)])
    widths = [width or n for n in used]
    last = [length - (n - 1) * page_size for length, n in zip(lengths, widths, strict=True)]
    table = SimpleNamespace(
        indptr=int_tensor([0, *accumulate(widths)]), indices=int_tensor(indices), last_page_len=int_tensor(last)
    )
    found = [[] for _ in lengths]
    for rank in range(size):
        own_pages = rank_table(rank, size, page_size, table, int_tensor(visible))
        offsets, own_indices, own_last = (
            x.tolist() for x in (own_pages.indptr, own_pages.indices, own_pages.last_page_len)
        )
        for request, own in enumerate(found):
            first, end = offsets[request : request + 2]
            for place in range(first, end):
                count = own_last[request] if place == end - 1 else page_size
                own += [(own_indices[place] * size + rank, offset) for offset in range(count)]
    for own, row, count in zip(found, pages, visible, strict=True):
        assert sorted(own) == sorted((int(row[i // page_size]), i % page_size) for i in range(count))


def int_tensor(values):
    return torch.tensor(values, dtype=torch.int32)


def rank_table(rank, size, page_size, pages, visible):
    """The pages that a rank has of requests."""

    class Part(ContextParallelRunner):
        def __init__(self):
            self.ranks = type("Ranks", (), {"rank": rank, "size": size})
            self.page_size = page_size

    return Part()._own_pages(pages, visible)
