"""`LLM` with adapters: which are known, what is refused, and whose weights a request is computed with."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM

from helpers.adapters import change_config, save_adapter
from helpers.engines import pages_add_up, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.runner import Runner

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NAMES = [None, "attention", "all", "patterns"]


def merged_folder(root, name):
    return root / ("base" if name is None else f"{name}-merged")


@pytest.fixture(scope="module")
def expected(adapted):
    """The tokens of a prompt by the merged weights of each adapter."""

    def tokens(name, prompt, params=GREEDY):
        return engines[name].generate([prompt], params)[0].token_ids

    engines = {name: LLM(merged_folder(adapted, name), num_pages=64) for name in NAMES}
    yield tokens
    for llm in engines.values():
        llm.close()


def slots_add_up(llm):
    """Whether, with nothing running, no adapter is held and each slot and rank page is free or of one adapter."""
    slots = llm._engine.scheduler.adapters
    residents = slots._residents.values()
    tables = llm._engine.runner.adapters.tables
    used = [r.slot for r in residents] + slots._free_slots
    pages = [page for r in residents for page in r.pages] + slots._free_pages
    assert slots.num_held == sum(r.holders for r in residents) == 0
    assert sorted(used) == list(range(tables.num_slots))
    return sorted(pages) == list(range(llm.config.adapter_rank_pages or llm.config.max_adapters))


def test_llm_mixed_batch_gives_each_request_its_own_weights(adapted, expected, rng):
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    names = [rng.choice(NAMES) for _ in prompts]
    with LLM(adapted / "base", max_adapters=3, adapter_rank_pages=6, num_pages=64) as llm:
        for name in NAMES[1:]:
            llm.load_adapter(name, adapted / name)
        assert [info.name for info in llm.adapters] == NAMES[1:]
        assert [info.rank for info in llm.adapters] == [4, 20, 33]
        done = llm.generate(prompts, GREEDY, adapter=names)
        assert pages_add_up(llm)
        assert slots_add_up(llm)
    assert [c.token_ids for c in done] == [expected(n, p) for n, p in zip(names, prompts, strict=True)]


def test_llm_of_one_slot_serves_all_adapters_in_turn(adapted, expected):
    prompt = [5, 6, 7, 8]
    adapters = {name: adapted / name for name in NAMES[1:]}
    with LLM(adapted / "base", max_adapters=1, adapter_rank_pages=3, adapters=adapters, num_pages=64) as llm:
        done = llm.generate([prompt] * 8, GREEDY, adapter=NAMES * 2)
        assert slots_add_up(llm)
        assert llm._engine.scheduler.adapters.num_loads >= 3
    assert [c.token_ids for c in done] == [expected(name, prompt) for name in NAMES * 2]


def test_llm_stream_and_start_take_an_adapter(adapted, expected):
    prompt, done, tokens = [3, 1, 4], threading.Event(), []

    def sink(index, part):
        tokens.extend(part.token_ids)
        if part.finish_reason:
            done.set()

    async def streamed(llm):
        return [token async for part in llm.stream(prompt, GREEDY, adapter="all") for token in part.token_ids]

    with LLM(adapted / "base", max_adapters=2, adapters={"all": adapted / "all"}, num_pages=64) as llm:
        llm.start([prompt], GREEDY, sink, adapter="all")
        assert done.wait(60)
        assert tokens == asyncio.run(streamed(llm)) == expected("all", prompt)


def test_llm_embed_takes_an_adapter(adapted):
    with LLM(adapted / "base", max_adapters=2, adapters={"all": adapted / "all"}, num_pages=64) as llm:
        own, base = llm.embed([[1, 2, 3], [1, 2, 3]], adapter=["all", None])
        with pytest.raises(ValueError, match=r"adapter = 'al' is not known: 'all' are"):
            llm.embed([1, 2, 3], adapter="al")
    with LLM(adapted / "all-merged", num_pages=64) as llm:
        (expected,) = llm.embed([1, 2, 3])
    assert own.values == pytest.approx(expected.values, abs=1e-5)
    assert base.values != pytest.approx(expected.values, abs=1e-2)


def test_llm_prefix_is_shared_by_contents_and_not_by_name(adapted, expected):
    prompt = list(range(1, 40))
    with LLM(adapted / "base", max_adapters=2, adapters={"a": adapted / "all"}, num_pages=64, page_size=4) as llm:
        llm.load_adapter("same", adapted / "all")
        llm.load_adapter("b", adapted / "attention")
        for name in (None, "a", "b"):
            (first,) = llm.generate([prompt], GREEDY, adapter=name)
            assert first.num_cached_tokens == 0
        for name, of in ((None, None), ("a", "all"), ("same", "all"), ("b", "attention")):
            (done,) = llm.generate([prompt], GREEDY, adapter=name)
            assert done.num_cached_tokens == 36
            assert done.token_ids == expected(of, prompt)
        digests = {info.name: info.digest for info in llm.adapters}
        assert digests["a"] == digests["same"]
        assert set(llm._engine.scheduler.tree.namespaces) == {None, *digests.values()}


def test_llm_adapter_of_an_old_name_with_other_contents_is_computed_anew(adapted, expected):
    prompt = list(range(1, 40))
    with LLM(adapted / "base", max_adapters=1, adapter_rank_pages=3, num_pages=64, page_size=4) as llm:
        for name in ("all", "patterns", "attention"):
            llm.load_adapter("same-name", adapted / name)
            (done,) = llm.generate([prompt], GREEDY, adapter="same-name")
            assert (done.token_ids, done.num_cached_tokens) == (expected(name, prompt), 0)
            llm.unload_adapter("same-name")
        assert llm.adapters == ()
        until_idle(llm)
        llm.generate([prompt], GREEDY)
        assert len(llm._engine.scheduler.adapters) == 0


def test_llm_load_adapter_of_a_known_name_keeps_equal_contents_and_refuses_others(adapted):
    with LLM(adapted / "base", max_adapters=1, num_pages=64) as llm:
        first = llm.load_adapter("a", adapted / "attention")
        assert llm.load_adapter("a", adapted / "attention") == first
        assert llm.adapters == (first,)
        assert first.folder == str(adapted / "attention")
        assert first.base_model_name == str(adapted / "base")
        with pytest.raises(ValueError, match=r"name = 'a': it names the adapter of .*attention.*unload it first"):
            llm.load_adapter("a", adapted / "all")
        for name in ("", 3):
            with pytest.raises(ValueError, match="an adapter's name must be a string that is not empty"):
                llm.load_adapter(name, adapted / "all")


def test_llm_unloaded_adapter_ends_its_requests_and_takes_no_new_ones(adapted, expected):
    prompt, running, tokens = [9, 8, 7], threading.Event(), []
    done = threading.Event()

    def sink(index, part):
        tokens.extend(part.token_ids)
        running.set()
        if part.finish_reason:
            done.set()

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(adapted / "base", max_adapters=1, adapter_rank_pages=2, adapters={"all": adapted / "all"}) as llm:
        llm.start([prompt], params, sink, adapter="all")
        assert running.wait(60)
        llm.unload_adapter("all")
        with pytest.raises(ValueError, match="adapter = 'all' is not known: no adapter has been loaded"):
            llm.generate([prompt], GREEDY, adapter="all")
        with pytest.raises(ValueError, match="adapter = 'all' is not known"):
            llm.unload_adapter("all")
        assert done.wait(60)
        until_idle(llm)
        assert len(llm._engine.scheduler.adapters) == 0
        assert slots_add_up(llm)
    assert tokens == expected("all", prompt, params)


def test_llm_without_slots_refuses_adapters_by_name(adapted):
    with pytest.raises(ValueError, match=r"max_adapters = 0: adapter 'all' of .*/all needs an engine with 1 or more"):
        LLM(adapted / "base", adapters={"all": adapted / "all"}, num_pages=64)
    with LLM(adapted / "base", num_pages=64) as llm, pytest.raises(ValueError, match="no adapter has been loaded"):
        llm.generate([1], GREEDY, adapter="all")


def test_llm_adapter_that_does_not_fit_is_refused_and_nothing_else_notices(adapted, tmp_path, expected):
    model = AutoModelForCausalLM.from_pretrained(adapted / "base")
    save_adapter(model, tmp_path / "large", r=65, target_modules=["q_proj"])
    save_adapter(model, tmp_path / "wide", r=33, target_modules=["q_proj"])
    change_config(save_adapter(model, tmp_path / "dora", r=4, target_modules=["q_proj"]), use_dora=True)
    with LLM(
        adapted / "base", max_adapters=2, max_adapter_rank=64, adapters={"all": adapted / "all"}, num_pages=64
    ) as llm:
        known = llm.adapters
        messages = {
            "large": "its rank is 65: max_adapter_rank = 64 is the largest",
            "wide": "its rank of 33 needs 3 rank pages of 16: adapter_rank_pages = 2 is all that there are",
            "dora": "use_dora",
        }
        for name, message in messages.items():
            with pytest.raises(ValueError, match=f"{tmp_path / name} can't be used as an adapter: .*{message}"):
                llm.load_adapter(name, tmp_path / name)
        with pytest.raises(FileNotFoundError, match="no such"):
            llm.load_adapter("none", tmp_path / "no such")
        assert llm.adapters == known
        assert llm.generate([[1, 2]], GREEDY, adapter="all")[0].token_ids == expected("all", [1, 2])


def test_llm_refuses_a_runner_that_computes_without_adapters(adapted):
    class Own(Runner):
        def run(self, chunks, last_tokens=None):
            return super().run(chunks, last_tokens)

    class Declared(Own):
        supports_adapters = True

    with pytest.raises(ValueError, match="max_adapters = 1: Own computes steps without the adapters of requests"):
        LLM(adapted / "base", max_adapters=1, num_pages=64, runner=Own)
    with LLM(adapted / "base", max_adapters=1, num_pages=64, runner=Declared) as llm:
        assert llm.info.max_adapters == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["all"], "there are 1 adapters for 2 prompts: give one, or one each"),
        (3, "adapter = 3: it must be the name of an adapter, a list of names, or None"),
        ([None, 3], "adapter = 3: it must be the name of an adapter, or None"),
        ("", "adapter = '' is not known"),
    ],
)
def test_llm_generate_refuses_adapters_that_are_none(adapted, given, message):
    with LLM(adapted / "base", num_pages=64) as llm, pytest.raises(ValueError, match=message):
        llm.generate([[1], [2]], GREEDY, adapter=given)


def test_llm_pool_without_memory_names_the_option(adapted):
    with pytest.raises(ValueError, match=r"adapter_rank_pages = 1000000000: they take \d+\.\d GiB, and cpu does not"):
        LLM(adapted / "base", max_adapters=1, adapter_rank_pages=10**9, num_pages=64)
