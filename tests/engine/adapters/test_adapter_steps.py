"""Requests with adapters in steps of all kinds: in chunks, preempted, with known prefixes, drafts, padding and graphs,
after errors, and in compiled layers. Their tokens are always those of the weights that PEFT merges.
"""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM

from helpers.adapters import assert_greedy
from helpers.engines import captured_on_the_host, pages_add_up
from quire.engine import LLM, SamplingParams

NAMES = ["attention", "all", "patterns"]
SLOTS = {"max_adapters": 2, "adapter_rank_pages": 4}


@pytest.fixture(scope="module")
def networks(adapted):
    """The model with the weights of each adapter, by Transformers."""
    folders = {None: adapted / "base"} | {name: adapted / f"{name}-merged" for name in NAMES}
    return {name: AutoModelForCausalLM.from_pretrained(folder) for name, folder in folders.items()}


def adapters(root):
    return {name: root / name for name in NAMES}


def requests(rng, count=12):
    """Prompts, of which many begin with the same tokens, the names of their adapters, and parameters."""
    starts = [[rng.randrange(97) for _ in range(16)] for _ in range(2)]
    prompts = [
        rng.choice(starts)[: rng.randint(1, 16)] + [rng.randrange(97) for _ in range(rng.randint(1, 9))]
        for _ in range(count)
    ]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 9), ignore_eos=True) for _ in range(count)]
    return prompts, [rng.choice([None, *NAMES]) for _ in range(count)], params


def check(llm, networks, rng, count=12):
    """Generate twice, so that prefixes are known the second time, and compare all tokens."""
    prompts, names, params = requests(rng, count)
    for _ in range(2):
        done = llm.generate(prompts, params, adapter=names)
        for prompt, name, completion in zip(prompts, names, done, strict=True):
            assert completion.error is None
            assert_greedy(networks[name], prompt, completion.token_ids)
    assert pages_add_up(llm)
    assert llm._engine.scheduler.adapters.num_held == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_batched_tokens": 5, "page_size": 2, "num_pages": 200},
        {"speculative_tokens": 4, "page_size": 4, "num_pages": 100},
        {"batch_invariant": True, "page_size": 4, "num_pages": 100},
        pytest.param({"compile": True, "page_size": 4, "num_pages": 100}, marks=pytest.mark.slow),
    ],
    ids=["chunks", "drafts", "batch_invariant", "compiled"],
)
def test_llm_steps_with_adapters_have_the_tokens_of_merged_weights(adapted, networks, rng, options):
    with LLM(adapted / "base", **SLOTS, adapters=adapters(adapted), **options) as llm:
        check(llm, networks, rng)
        assert llm.stats.cached_tokens > 0
        assert llm.model.compiled == options.get("compile", False)


def test_llm_preempted_requests_with_adapters_have_the_tokens_of_merged_weights(adapted, networks, rng):
    prompts = [[rng.randrange(97) for _ in range(4)] for _ in range(9)]
    names = [None, *NAMES] * 2 + ["all"]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = {"page_size": 2, "num_pages": 16, "max_adapters": 3, "adapter_rank_pages": 6}
    with LLM(adapted / "base", adapters=adapters(adapted), **options) as llm:
        done = llm.generate(prompts, params, adapter=names)
        assert llm.stats.preemptions > 0
        assert pages_add_up(llm)
    for prompt, name, completion in zip(prompts, names, done, strict=True):
        assert_greedy(networks[name], prompt, completion.token_ids)


def test_llm_captured_steps_with_adapters_and_without_in_turns_have_the_tokens_of_merged_weights(
    adapted, networks, rng
):
    with LLM(adapted / "base", **SLOTS, adapters=adapters(adapted), num_pages=100, max_num_seqs=6) as llm:
        captured_on_the_host(llm, 40)
        graphs = llm._engine.runner.step_graphs
        assert {shape.has_adapters for shape in graphs.shapes} == {True, False}
        check(llm, networks, rng)
        assert graphs.replays > 0
        used = []
        run = graphs.run

        def noted(batch, has_adapters=False):
            used.append(has_adapters)
            return run(batch, has_adapters)

        graphs.run = noted
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        for name in (None, "all", None, "attention"):
            (done,) = llm.generate([[1, 2, 3]], params, adapter=name)
            assert_greedy(networks[name], [1, 2, 3], done.token_ids)
            assert set(used) == {name is not None}
            used.clear()


def test_llm_step_that_raises_is_computed_request_by_request_with_their_adapters(adapted, networks, rng, monkeypatch):
    with LLM(adapted / "base", **SLOTS, adapters=adapters(adapted), num_pages=100) as llm:
        runner = llm._engine.runner
        run, failed = runner.run, []

        def run_one(chunks, last_tokens=None):
            if len(chunks) > 1:
                failed.append(len(chunks))
                raise RuntimeError("too many")
            return run(chunks, last_tokens)

        monkeypatch.setattr(runner, "run", run_one)
        with pytest.warns(RuntimeWarning, match="none of them did alone"):
            check(llm, networks, rng, 6)
        assert failed


def test_llm_prompt_logprobs_with_an_adapter_are_those_of_merged_weights(adapted):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    prompt = list(range(5, 45))
    with LLM(adapted / "base", **SLOTS, adapters=adapters(adapted), num_pages=64, max_batched_tokens=16) as llm:
        done = llm.generate([prompt] * 3, params, adapter=["all", None, "patterns"])
    for name, ours in (("all-merged", done[0]), ("base", done[1]), ("patterns-merged", done[2])):
        with LLM(adapted / name, num_pages=64) as llm:
            (theirs,) = llm.generate([prompt], params)
        for x, y in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert x == pytest.approx(y, abs=1e-4)


def test_llm_batch_invariant_request_without_an_adapter_keeps_its_bits_beside_adapters(adapted, rng):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    prompt = [rng.randrange(97) for _ in range(9)]
    with LLM(adapted / "base", **SLOTS, adapters=adapters(adapted), num_pages=64, batch_invariant=True) as llm:
        for name in (None, "all"):
            (alone,) = llm.generate([prompt], params, adapter=name)
            mixed = llm.generate([[1, 2, 3], prompt, [4, 5]], params, adapter=["patterns", name, "all"])[1]
            assert (mixed.token_ids, mixed.logprobs) == (alone.token_ids, alone.logprobs)


def test_llm_steps_without_adapters_add_nothing_and_ask_no_request(adapted, monkeypatch):
    """A step of base requests runs no product of adapters, and a repeated one does not look at its requests."""
    with LLM(adapted / "base", **SLOTS, adapters=adapters(adapted), num_pages=64) as llm:
        runner = llm._engine.runner
        added, seen = [], []
        monkeypatch.setattr("quire.engine.adapters.step.AdapterStep.add", lambda *args: added.append(args))
        are_in = runner.adapters.are_in

        def noted(requests):
            before = runner.adapters._requests
            seen.append(requests is before)
            return are_in(requests)

        monkeypatch.setattr(runner.adapters, "are_in", noted)
        llm.generate([[1, 2], [3, 4]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert added == []
    assert seen.count(False) <= 3
    assert seen.count(True) >= 5
