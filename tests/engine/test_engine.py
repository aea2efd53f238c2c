"""The engine as its users see it: options, streams, cancellation, limits, mistakes, and no page lost."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import shutil
import threading
import time

import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import VOCAB, save
from helpers.engines import pages_add_up, until_idle
from quire.engine import LLM, SamplingParams, request, shipped_model

Update = request.Update
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["import os\n", "def add(a, b):\n    return", "class Stack:\n    def push(self, item):\n", "for i in range("]


@pytest.fixture(scope="module")
def llm():
    with LLM(page_size=4) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(7)
    return save("llama", tmp_path_factory.mktemp("llama"))


def test_generate_with_one_params_or_one_for_each_prompt_is_equal(llm):
    many = llm.generate(PROMPTS, GREEDY)
    each = llm.generate(PROMPTS, [GREEDY] * len(PROMPTS))
    assert [c.text for c in many] == [c.text for c in each]
    assert [c.text for c in many] == [llm.generate(p, GREEDY)[0].text for p in PROMPTS]
    with pytest.raises(ValueError, match="3 params for 4 prompts"):
        llm.generate(PROMPTS, [GREEDY] * 3)
    assert llm.generate([], GREEDY) == []


def test_generate_with_strings_or_their_token_ids_is_equal(llm):
    ids = [llm.model.tokenizer(p)["input_ids"] for p in PROMPTS]
    by_text, by_ids = llm.generate(PROMPTS, GREEDY), llm.generate(ids, GREEDY)
    assert [c.token_ids for c in by_text] == [c.token_ids for c in by_ids]
    assert [c.prompt_token_ids for c in by_text] == ids
    assert llm.generate(ids[0], GREEDY)[0].text == by_text[0].text
    assert llm.generate(torch.tensor(ids[1]).numpy(), GREEDY)[0].text == by_text[1].text


def test_completion_has_the_text_of_its_tokens(llm):
    for completion in llm.generate(PROMPTS, GREEDY):
        decode = llm.model.tokenizer.decode
        both = decode(completion.prompt_token_ids + completion.token_ids, skip_special_tokens=True)
        assert both == decode(completion.prompt_token_ids, skip_special_tokens=True) + completion.text


def test_generate_with_a_seed_in_another_batch_repeats_its_tokens(llm):
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=20)
    alone = llm.generate(PROMPTS[1], params)[0].token_ids
    others = [SamplingParams(temperature=1.5, max_tokens=30)] * 3
    assert llm.generate([*PROMPTS[:3], PROMPTS[1]], [*others, params])[3].token_ids == alone
    assert llm.generate(PROMPTS[1], SamplingParams(temperature=1.0, seed=12, max_tokens=20))[0].token_ids != alone
    free = SamplingParams(temperature=1.0, max_tokens=20)
    assert llm.generate(PROMPTS[1], free)[0].token_ids != llm.generate(PROMPTS[1], free)[0].token_ids


def test_generate_without_max_tokens_ends_at_the_context(llm):
    for count in (1, 2, 17):
        done = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))[0]
        assert (len(done.token_ids), done.finish_reason) == (count, "length")
    long = [5] * (llm.model.context - 3)
    done = llm.generate(long, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert (len(done.token_ids), done.finish_reason) == (3, "length")


def test_generate_with_stop_strings_or_stop_tokens_ends_there(llm):
    free = llm.generate(PROMPTS[1], GREEDY)[0]
    stop = free.text[5:8]
    done = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=24, stop=stop))[0]
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.find(stop)]
    token = free.token_ids[4]
    done = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token]))[0]
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: free.token_ids.index(token) + 1]


def test_generate_with_ignore_eos_goes_on_after_end_tokens(folder):
    with LLM(folder, page_size=4) as llm:
        llm.model.end_ids = frozenset(range(0, VOCAB, 3))
        done = llm.generate([[5, 6]], SamplingParams(temperature=1.0, seed=1, max_tokens=100))[0]
        assert done.finish_reason == "stop"
        assert done.token_ids[-1] % 3 == 0
        assert all(t % 3 for t in done.token_ids[:-1])
        done = llm.generate([[5, 6]], SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True))[0]
        assert (done.finish_reason, len(done.token_ids)) == ("length", 100)


def test_generate_with_logprobs_reports_those_of_transformers(llm):
    from transformers import AutoModelForCausalLM

    done = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=8, logprobs=2))[0]
    network = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32)
    with torch.inference_mode():
        logits = network(torch.tensor([done.prompt_token_ids + done.token_ids])).logits[0]
    exact = torch.log_softmax(logits[len(done.prompt_token_ids) - 1 : -1], -1)
    assert len(done.logprobs) == len(done.token_ids)
    for row, token, report in zip(exact, done.token_ids, done.logprobs, strict=True):
        assert token in report
        assert list(report) == row.topk(2).indices.tolist()
        for t, value in report.items():
            assert value == pytest.approx(float(row[t]), abs=1e-4)


def test_generate_with_on_update_reports_the_parts_of_completions(llm):
    parts = {i: [] for i in range(len(PROMPTS))}
    done = llm.generate(PROMPTS, GREEDY, on_update=lambda i, part: parts[i].append(part))
    for i, completion in enumerate(done):
        assert "".join(p.text for p in parts[i]) == completion.text
        assert [t for p in parts[i] for t in p.token_ids] == completion.token_ids
        assert [p.finish_reason for p in parts[i]] == [None] * (len(parts[i]) - 1) + [completion.finish_reason]


def test_generate_without_on_update_makes_updates_of_ends_alone(llm, monkeypatch):
    made = []

    def update(*args):
        made.append(Update(*args))
        return made[-1]

    seen = llm.generate(PROMPTS, GREEDY, on_update=lambda i, part: None)
    monkeypatch.setattr(request, "Update", update)
    done = llm.generate(PROMPTS, GREEDY)
    assert [(c.text, c.token_ids) for c in done] == [(c.text, c.token_ids) for c in seen]
    assert [u.finish_reason for u in made] == [c.finish_reason for c in done] == ["length"] * len(PROMPTS)


def test_generate_with_a_common_prefix_shares_its_pages(folder):
    start = [(7 * i) % VOCAB for i in range(40)]
    with LLM(folder, page_size=4, num_pages=64) as llm:
        done = llm.generate([[*start, i] for i in range(10)], GREEDY)
        assert [c.num_cached_tokens for c in done] == [0] + [40] * 9
        assert llm.stats.cached_tokens == 360
        assert llm.stats.peak_pages <= 10 + 10 * 7


def stream_all(llm, prompts, params):
    async def one(prompt):
        return [part async for part in llm.stream(prompt, params)]

    async def every():
        return await asyncio.gather(*(one(p) for p in prompts))

    return asyncio.run(every())


def test_stream_has_the_parts_of_the_completion(llm):
    done = llm.generate(PROMPTS, GREEDY)
    for parts, completion in zip(stream_all(llm, PROMPTS, GREEDY), done, strict=True):
        assert "".join(p.text for p in parts) == completion.text
        assert [t for p in parts for t in p.token_ids] == completion.token_ids
        assert parts[-1].finish_reason == completion.finish_reason
        assert len(parts) > 1


def test_stream_that_is_left_cancels_its_request(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    async def some():
        stream = llm.stream(PROMPTS[0], params)
        async for _ in stream:
            break
        await stream.aclose()

    before = llm.stats.generated_tokens
    asyncio.run(some())
    until_idle(llm)
    assert llm.stats.generated_tokens - before < 100
    assert pages_add_up(llm)


def test_generate_with_a_callback_that_raises_cancels_its_requests(llm):
    class Stop(Exception):
        pass

    def stop(i, part):
        raise Stop

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with pytest.raises(Stop):
        llm.generate(PROMPTS, params, on_update=stop)
    until_idle(llm)
    assert pages_add_up(llm)


def test_generate_in_many_threads_shares_steps(llm):
    expected = [c.text for c in llm.generate(PROMPTS, GREEDY)]
    results = {}

    def call(i):
        results[i] = llm.generate(PROMPTS[i % 4], GREEDY)[0].text

    threads = [threading.Thread(target=call, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(12)] == expected * 3


@pytest.mark.slow
def test_pages_after_1000_requests_add_up(folder, rng):
    with LLM(folder, page_size=4, num_pages=24, max_num_seqs=12, max_batched_tokens=24) as llm:
        starts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(6)]
        cancelled = 0

        async def one():
            nonlocal cancelled
            prompt = rng.choice(starts)[: rng.randint(1, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
            params = SamplingParams(temperature=rng.choice((0, 1.0)), max_tokens=rng.randint(1, 20))
            patience = rng.choice((math.inf, math.inf, 0, 1, 5))
            stream = llm.stream(prompt, params)
            seen = 0
            async for part in stream:
                assert part.finish_reason in (None, "stop", "length")
                seen += 1
                if seen > patience:
                    break
            cancelled += part.finish_reason is None
            await stream.aclose()

        async def every():
            gate = asyncio.Semaphore(30)

            async def gated():
                async with gate:
                    await one()

            await asyncio.gather(*(gated() for _ in range(1000)))

        asyncio.run(every())
        until_idle(llm)
        assert cancelled > 50
        assert llm.stats.preemptions > 0
        assert llm.stats.cached_tokens > 0
        assert pages_add_up(llm)


def test_step_that_raises_ends_its_requests_alone(folder):
    with LLM(folder, page_size=4) as llm:
        good = llm.generate([[1, 2, 3]], GREEDY)[0]
        logits, llm.model.logits = llm.model.logits, lambda *a: 1 / 0
        done = llm.generate([[1, 2, 3], [4]], GREEDY)
        assert [c.finish_reason for c in done] == ["error"] * 2
        assert "ZeroDivisionError" in done[0].error
        llm.model.logits = logits
        assert pages_add_up(llm)
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids == good.token_ids


def test_logits_that_are_not_finite_end_their_request_alone(folder):
    with LLM(folder, page_size=4) as llm:
        prompts = [[1, 2, 3], [9, 8, 7, 6], [4, 5]]
        good = llm.generate(prompts, GREEDY)
        embed = llm.model.network.get_input_embeddings().weight
        with torch.inference_mode():
            embed[9] = torch.nan
        llm._engine.scheduler.tree.clear()
        done = llm.generate(prompts, GREEDY)
        assert done[1].finish_reason == "error"
        assert "not finite" in done[1].error
        for i in (0, 2):
            if 9 not in good[i].token_ids:
                assert done[i].token_ids == good[i].token_ids


@pytest.mark.parametrize("name", ["page_size", "num_pages", "max_num_seqs", "max_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_llm_with_an_invalid_size_names_it(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        LLM(**{name: value})


def test_llm_with_an_unknown_device_dtype_or_backend_names_it(folder):
    with pytest.raises(ValueError, match="backend = 'fast' is unknown"):
        LLM(folder, backend="fast")
    with pytest.raises(ValueError, match="float12"):
        LLM(folder, dtype="float12")
    with pytest.raises(ValueError, match="device = 'nowhere' can't be used"):
        LLM(folder, device="nowhere")
    with pytest.raises(ValueError, match="no kernels for this attention on meta"):
        LLM(folder, device="meta")


def broken(folder, tmp_path, spoil):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    spoil(copy)
    return copy


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_weight(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_a_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))


SPOILT = {
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "no \\*.safetensors"),
    "truncated": (truncate, ValueError, "model.safetensors could not be loaded"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_text("no"), ValueError, "rs could not be loaded"),
    "not json": (lambda f: (f / "config.json").write_text("{"), ValueError, "config.json could not be loaded"),
    "unknown model": (lambda f: (f / "config.json").write_text('{"model_type": "x"}'), ValueError, "model_type = 'x'"),
    "a weight is missing": (drop_a_weight, ValueError, r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"),
    "another shape": (change_a_shape, ValueError, r"mlp\.down_proj\.weight is \[32, 48\], and \[32, 64\] by config"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ValueError, "tokenizer"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_llm_with_a_broken_checkpoint_names_it(folder, tmp_path, case):
    spoil, error, message = SPOILT[case]
    copy = broken(folder, tmp_path, spoil)
    with pytest.raises(error, match=message) as raised:
        LLM(copy)
    assert str(copy) in str(raised.value)


def test_llm_with_a_missing_folder_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no model folder .*nothing"):
        LLM(tmp_path / "nothing")


def test_llm_with_an_unsupported_model_says_why(tmp_path):
    from transformers import AutoModelForCausalLM, BertConfig, MambaConfig

    tiny = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
    AutoModelForCausalLM.from_config(MambaConfig(**tiny)).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ValueError, match="attention"):
        LLM(tmp_path / "mamba")
    bert = BertConfig(**tiny, num_attention_heads=2, intermediate_size=16, is_decoder=False)
    AutoModelForCausalLM.from_config(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="bert"):
        LLM(tmp_path / "bert")


def test_llm_without_a_tokenizer_takes_token_ids(folder):
    with LLM(folder) as llm:
        assert llm.generate([[1, 2]], GREEDY)[0].text == ""
        with pytest.raises(ValueError, match="has no tokenizer: pass token ids"):
            llm.generate("hello", GREEDY)
        with pytest.raises(ValueError, match="has stop strings, but"):
            llm.generate([[1]], SamplingParams(stop="x"))


def test_llm_after_close_refuses_requests_and_has_no_thread(folder):
    llm = LLM(folder)
    thread = llm._worker.thread
    llm.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], GREEDY)
    llm.close()
    forgotten = LLM(folder)
    thread = forgotten._worker.thread
    del forgotten
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_llm_leaves_the_garbage_collection_of_its_process_as_it_was(folder):
    before = gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()
    with LLM(folder) as llm:
        llm.generate([[1]], GREEDY)
        assert (gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()) == before


def test_close_with_running_requests_cancels_them(folder):
    llm = LLM(folder)
    done = []

    def call():
        done.extend(llm.generate([[1, 2]], SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)))

    caller = threading.Thread(target=call)
    caller.start()
    while llm.stats.generated_tokens == 0:
        time.sleep(0.01)
    llm.close()
    caller.join(10)
    assert done[0].finish_reason in ("cancelled", "length")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_llm_with_another_dtype_runs(dtype):
    with LLM(dtype=dtype) as llm:
        assert llm.model.dtype == getattr(torch, dtype)
        done = llm.generate(PROMPTS, GREEDY)
    assert all(c.finish_reason in ("length", "stop") and c.text for c in done)
