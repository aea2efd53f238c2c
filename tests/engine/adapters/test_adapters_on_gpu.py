"""Adapters on a GPU: graphs with and without them in turns, copies beside the steps, and no wait for the device."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM

from helpers.adapters import assert_greedy
from helpers.engines import pages_add_up, until_idle
from quire.engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu
NAMES = ["attention", "all", "patterns"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"device": "cuda", "dtype": "float32", "num_pages": 160, "page_size": 8}
SLOTS = {"max_adapters": 2, "adapter_rank_pages": 4}
# The largest difference of logits between devices, whose sums of float32 have other orders.
TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def networks(adapted):
    folders = {None: adapted / "base"} | {name: adapted / f"{name}-merged" for name in NAMES}
    return {name: AutoModelForCausalLM.from_pretrained(folder) for name, folder in folders.items()}


def served(adapted, **options):
    adapters = {name: adapted / name for name in NAMES}
    return LLM(adapted / "base", adapters=adapters, **OPTIONS, **SLOTS, **options)


@contextmanager
def refusing_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"cuda_graphs": False, "compile": False}])
def test_llm_on_a_gpu_mixes_adapters_and_waits_for_no_step(adapted, networks, rng, options):
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 60))] for _ in range(40)]
    names = [rng.choice([None, *NAMES]) for _ in prompts]
    with served(adapted, max_num_seqs=16, max_batched_tokens=128, **options) as llm:
        runner = llm._engine.runner
        assert (runner.step_graphs is None) == ("cuda_graphs" in options)
        # The first steps compile kernels.
        llm.generate(prompts, GREEDY, adapter=names)
        forward = runner.forward

        def checked(batch, last_tokens):
            with refusing_waits():
                return forward(batch, last_tokens)

        runner.forward = checked
        done = llm.generate(prompts, GREEDY, adapter=names)
        until_idle(llm)
        assert pages_add_up(llm)
    for prompt, name, completion in zip(prompts, names, done, strict=True):
        assert completion.error is None
        assert_greedy(networks[name], prompt, completion.token_ids, TOLERANCE)


def test_llm_on_a_gpu_replays_graphs_with_adapters_and_without_in_turns(adapted, networks):
    with served(adapted, max_num_seqs=8) as llm:
        graphs = llm._engine.runner.step_graphs
        assert {shape.has_adapters for shape in graphs.shapes} == {True, False}
        used, run = [], graphs.run

        def noted(batch, has_adapters=False):
            output = run(batch, has_adapters)
            used.append((has_adapters, output is not None))
            return output

        graphs.run = noted
        for name in (None, "all", None, "attention", "all", None):
            (done,) = llm.generate([[1, 2, 3]], GREEDY, adapter=name)
            until_idle(llm)
            assert_greedy(networks[name], [1, 2, 3], done.token_ids, TOLERANCE)
            assert set(used) == {(name is not None, True)}
            used.clear()


def test_llm_on_a_gpu_copies_an_adapter_beside_the_steps_of_others(adapted, networks):
    order, ended = [], threading.Event()

    def sink(name):
        def add(index, part):
            if part.finish_reason:
                order.append((name, part.error))
                if len(order) == 2:
                    ended.set()

        return add

    with served(adapted, max_num_seqs=8) as llm:
        pool = llm._engine.runner.adapters
        # The copies come after some tenths of a second on their stream.
        with torch.cuda.stream(pool._stream):
            torch.cuda._sleep(10**9)
        llm.start([[1, 2, 3]], GREEDY, sink("all"), adapter="all")
        llm.start([[1, 2, 3]], GREEDY, sink(None))
        assert ended.wait(60)
        assert order == [(None, None), ("all", None)]
        (done,) = llm.generate([[1, 2, 3]], GREEDY, adapter="all")
    assert_greedy(networks["all"], [1, 2, 3], done.token_ids, TOLERANCE)


def test_pool_begins_a_copy_from_pinned_memory_without_a_wait(adapted):
    with served(adapted) as llm:
        until_idle(llm)
        adapter, pool = llm._engine.adapters.get("all"), llm._engine.runner.adapters
        assert all(values.elements.is_pinned() for values in adapter.contents)
        assert adapter.product_pages.is_pinned()
        pool.slots.begin_pass()
        with refusing_waits():
            pool.slots.is_ready(adapter)
        resident = pool.slots._residents[adapter.digest]
        pool._stream.synchronize()
        assert resident.is_loaded()
        for values in adapter.contents:
            page = pool._memory[resident.pages[values.page]]
            found = page[values.start : values.start + len(values.elements)]
            assert torch.equal(found.cpu(), values.elements)
        assert pool.tables.rank_pages[resident.slot, : adapter.num_pages].tolist() == resident.pages
        assert pool.tables.num_rank_pages[:, resident.slot].tolist() == adapter.product_pages.tolist()


def test_num_pages_beside_adapters_fill_the_utilization(adapted):
    """The memory of adapters is taken before pages are counted."""
    total = torch.cuda.mem_get_info()[1]
    options = {"device": "cuda", "page_size": 64, "max_num_seqs": 10**6, "cuda_graphs": False}
    with LLM(adapted / "base", gpu_memory_utilization=0.5, max_adapters=4, adapter_rank_pages=20_000, **options) as llm:
        pool = llm._engine.runner.adapters
        assert pool._memory.nbytes > total // 100
        assert 0.3 * total < total - torch.cuda.mem_get_info()[0] < 0.55 * total
        assert llm.num_pages > 1000
