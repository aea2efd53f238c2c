"""Log-probabilities of prompts: those of Transformers' logits in float64, whatever the steps that compute them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from helpers.checkpoints import VOCAB, save
from helpers.engines import captured_on_the_host, pages_add_up, same, until_idle
from quire.engine import LLM, SamplingParams, scheduler
from quire.engine.runner import Runner

SIZES = {"page_size": 4, "num_pages": 24, "max_num_seqs": 8, "max_batched_tokens": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(13)
    return save("llama", tmp_path_factory.mktemp("llama"))


def random_requests(rng, count):
    """Requests of which half want log-probabilities of their prompts, and many begin alike. The first two decode side
    by side until they would have more tokens than the cache, so that one of them is preempted.
    """
    prefix = [rng.randrange(VOCAB) for _ in range(30)]
    prompts = [[rng.randrange(VOCAB)] for _ in range(2)]
    params = [SamplingParams(1.0, max_tokens=60, seed=rng.randrange(1000), ignore_eos=True) for _ in prompts]
    for _ in range(count):
        prompt = prefix[: rng.choice((0, 8, 30))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        asked = {"prompt_logprobs": rng.choice((None, None, 0, 1, 5)), "logprobs": rng.choice((None, 2))}
        temperature = rng.choice((0, 1.0))
        prompts.append(prompt)
        most = rng.choice((0, rng.randint(1, 20)))
        params.append(SamplingParams(temperature, max_tokens=most, seed=rng.randrange(1000), **asked))
    return prompts, params


def check(model, prompt, params, done):
    """Compare the report of a prompt with logits in float64."""
    report, count = done.prompt_logprobs, params.prompt_logprobs
    if params.max_tokens == 0:
        assert (done.token_ids, done.text, done.finish_reason) == ([], "", "length")
    if count is None:
        assert report is None
        assert done.prompt_ranks is None
        return
    assert done.num_cached_tokens == 0
    assert done.prompt_ranks[0] is None
    assert len(done.prompt_ranks) == len(prompt)
    assert report[0] is None
    assert len(report) == len(prompt)
    with torch.inference_mode():
        exact = model(torch.tensor([prompt], device=model.device)).logits[0].log_softmax(-1)
    for token, values, given, rank in zip(prompt[1:], exact, report[1:], done.prompt_ranks[1:], strict=False):
        more_likely, as_likely = (int((values > values[token] + error).sum()) for error in (1e-4, -1e-4))
        assert more_likely + 1 <= rank <= as_likely
        least = values.topk(max(count, 1)).values[-1] - 1e-4
        assert token in given
        assert count <= len(given) <= count + 1
        assert all(values[other] >= least for other in given if other != token)
        assert list(given.values()) == pytest.approx([float(values[other]) for other in given], abs=1e-4)


def exact_model(folder, device="cpu"):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).to(device)


@pytest.mark.parametrize("how", ["eager", "inputs of graphs", "drafts"])
def test_prompt_logprobs_are_those_of_transformers(folder, rng, monkeypatch, how):
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGPROBS", rng.choice((1, 5, 256)))
    prompts, params = random_requests(rng, 30)
    model = exact_model(folder)
    with LLM(folder, **SIZES) as llm:
        expected = llm.generate(prompts, [replace(p, prompt_logprobs=None) for p in params])
    with LLM(folder, **SIZES, speculative_tokens=3 * (how == "drafts")) as llm:
        if how == "inputs of graphs":
            captured_on_the_host(llm, max_tokens=48)
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert pages_add_up(llm)
        assert llm.stats.preemptions > 0
        assert how != "inputs of graphs" or llm._engine.runner.step_graphs.replays
        same(done, expected, llm, prompts, params)
    for case in zip(prompts, params, done, strict=True):
        check(model, *case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_prompt_logprobs_on_a_gpu_are_those_of_transformers(folder, rng, graphs):
    prompts, params = random_requests(rng, 40)
    model = exact_model(folder, "cuda")
    with LLM(folder, **SIZES, device="cuda", dtype="float32", backend="triton", cuda_graphs=graphs) as llm:
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert pages_add_up(llm)
    for case in zip(prompts, params, done, strict=True):
        check(model, *case)


def test_prompt_logprobs_of_a_preempted_request_end_after_its_output_is_in_the_tree(folder):
    """With pages for one copy of its output, which several steps would compute again."""
    sizes = {"page_size": 4, "num_pages": 16, "max_batched_tokens": 4}
    params = SamplingParams(max_tokens=45, ignore_eos=True, prompt_logprobs=0)
    with LLM(folder, **sizes) as llm:
        first, second = (llm.generate([5, 6, 7], params)[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert len(second.token_ids) == 45


def test_prompt_logprobs_of_a_stream_are_in_each_element(folder):
    with LLM(folder, **SIZES) as llm:
        parts = []
        params = SamplingParams(max_tokens=3, prompt_logprobs=1)
        (done,) = llm.generate([[5, 6, 7]], params, on_update=lambda i, part: parts.append(part))
    assert len(parts) == 3
    assert all(part.prompt_logprobs == done.prompt_logprobs for part in parts)


@pytest.mark.parametrize("asked", [None, 1])
@pytest.mark.parametrize("depth", [0, 1])
def test_request_without_output_ends_when_its_prompt_is_computed(folder, rng, asked, depth):
    """Alone and beside others, in one chunk or in several, of one token, of a cached prefix, and of the whole context;
    the pages that it leaves in the prefix tree are right.
    """
    only = SamplingParams(max_tokens=0, prompt_logprobs=asked)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(folder, page_size=4, num_pages=100, max_batched_tokens=16) as llm:
        llm._engine.depth = depth
        for size in (1, 2, 4, 5, 9, 17, 40, llm.max_len):
            prompt = [rng.randrange(VOCAB) for _ in range(size)]
            expected = llm.generate([prompt[:40]], greedy)
            llm._engine.scheduler.tree.clear()
            steps = llm.stats.steps
            done = llm.generate([prompt] * 2, only)
            assert llm.stats.steps - steps <= 2 * -(-size // 16)
            for completion in done:
                assert (completion.token_ids, completion.finish_reason) == ([], "length")
                assert asked is None or len(completion.prompt_logprobs) == size
            assert llm.generate([prompt, [3, 4]], [only, greedy])[1].finish_reason == "length"
            again = llm.generate([prompt[:40]], greedy)
            assert again[0].num_cached_tokens == (min(size, 40) - 1) // 4 * 4
            until_idle(llm)
            same(again, expected, llm, [prompt[:40]], [greedy])
        assert pages_add_up(llm)
        generated = llm.stats.generated_tokens
        llm.generate([[1, 2, 3]], only)
        assert llm.stats.generated_tokens == generated
        with pytest.raises(ValueError, match="leaves no room"):
            llm.generate([[1] * llm.max_len], greedy)
        with pytest.raises(ValueError, match="leaves no room"):
            llm.generate([[1] * (llm.max_len + 1)], only)


def test_prompt_logprobs_of_a_runner_without_all_logits_are_refused():
    class Own(Runner):
        supports_all_logits = False

    with LLM(page_size=4, num_pages=20, runner=Own) as llm, pytest.raises(ValueError, match="prompt_logprobs = 0: Own"):
        llm.generate(["a"], SamplingParams(prompt_logprobs=0))


@pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
def test_params_with_invalid_prompt_logprobs_name_them(value):
    with pytest.raises(ValueError, match=r"^prompt_logprobs = "):
        SamplingParams(prompt_logprobs=value)
