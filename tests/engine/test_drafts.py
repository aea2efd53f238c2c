"""Drafts of tokens that are guessed from a request's own: the tokens are those of a model that runs without them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import VOCAB, save
from helpers.engines import captured_on_the_host, pages_add_up, same, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.drafts import PromptLookup
from quire.engine.runner import Runner

SIZES = {"page_size": 4, "num_pages": 16, "max_num_seqs": 12, "max_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(13)
    return save("llama", tmp_path_factory.mktemp("llama"))


def repeating(rng, length, kinds=4):
    """Tokens that repeat themselves often."""
    words = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(kinds)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(words)
    return tokens[:length]


def random_requests(rng, count):
    """Requests of all kinds whose outputs repeat themselves and their prompts, since all but a few tokens are rare."""
    options = [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.3, "logprobs": 2},
        {"temperature": 0, "logprobs": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 3, "presence_penalty": 1.0, "logprobs": 1},
        {"temperature": 0, "logit_bias": dict.fromkeys(range(9), 5.0), "min_tokens": 3},
        {"temperature": 1.0, "top_k": 3, "allowed_token_ids": range(4, VOCAB), "logprobs": 1},
    ]
    prompts, params = [], []
    for _ in range(count):
        prompts.append(repeating(rng, rng.randint(1, 30)))
        ends = {"max_tokens": rng.randint(3, 24), "stop_token_ids": rng.sample(range(VOCAB), rng.choice((0, 0, 8)))}
        params.append(SamplingParams(**rng.choice(options), **ends, seed=rng.randrange(1000)))
    return prompts, params


def test_prompt_lookup_of_repeated_tokens_drafts_what_followed_the_longest_match(rng):
    for _ in range(300):
        tokens, lookup, most = repeating(rng, rng.randint(1, 60)), PromptLookup(), rng.randint(0, 6)
        for end in sorted({rng.randint(1, len(tokens)), len(tokens)}):  # a lookup goes on where the last one ended
            known, expected = tokens[:end], []
            matches = [
                (size, at) for size in (3, 2, 1) for at in range(end - 1, size - 1, -1)
                if known[at - size : at] == known[-size:] and size < end
            ]  # fmt: skip
            if matches and most:
                size, at = matches[0]
                longer = list(known)
                while len(longer) < at + most:
                    longer.append(longer[len(longer) - (end - at)])
                expected = longer[at : at + (most if size > 1 else 1)]
            assert lookup.draft(known, most) == expected


@pytest.mark.parametrize("how", [pytest.param("eager", marks=pytest.mark.slow), "inputs of graphs"])
def test_llm_with_drafts_has_the_tokens_without_them(folder, rng, how):
    accepted = replays = 0
    for most in (1, 3, 7):
        prompts, params = random_requests(rng, 36)
        for _ in range(4):  # the last ones leave room for drafts in their steps
            prompts.append(repeating(rng, 20))
            params.append(SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        with LLM(folder, **SIZES) as llm:
            expected = llm.generate(prompts, params)
        with LLM(folder, **SIZES, speculative_tokens=most) as llm:
            assert llm._engine.depth == 0
            if how != "eager":
                captured_on_the_host(llm, max_tokens=48)
            parts = {i: [] for i in range(len(prompts))}
            done = llm.generate(prompts, params, on_update=lambda i, part, to=parts: to[i].append(part))
            until_idle(llm)
            for i, listed in parts.items():
                assert [t for part in listed for t in part.token_ids] == done[i].token_ids
                if params[i].logprobs is not None:
                    assert all(len(part.logprobs or ()) == len(part.token_ids) for part in listed)
            stats = llm.stats
            assert stats.preemptions > 0
            assert stats.generated_tokens == sum(len(c.token_ids) for c in done)
            assert 0 < stats.accepted_tokens < stats.drafted_tokens
            assert pages_add_up(llm)
            same(done, expected, llm, prompts, params)
            accepted += stats.accepted_tokens
            replays += llm._engine.runner.step_graphs.replays if how != "eager" else 1
    assert accepted
    assert replays


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_llm_with_drafts_on_a_gpu_has_the_tokens_without_them(folder, rng, graphs):
    prompts, params = random_requests(rng, 40)
    options = {**SIZES, "device": "cuda", "dtype": "float32", "backend": "triton", "cuda_graphs": graphs}
    with LLM(folder, **options) as llm:
        expected = llm.generate(prompts, params)
    with LLM(folder, **options, speculative_tokens=3) as llm:
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert 0 < llm.stats.accepted_tokens < llm.stats.drafted_tokens
        assert pages_add_up(llm)
        same(done, expected, llm, prompts, params)


def test_llm_with_drafts_of_repeated_text_takes_fewer_steps(rng):
    text = "def f(x):\n    return [1, 2, 3, 4, 5, 6, 7, 8, 9]\n\n\n" * 2
    for more in ({"max_tokens": 30}, {"max_tokens": 60, "stop": "5, 6"}, {"max_tokens": 31, "temperature": 0.2}):
        params = SamplingParams(**{"temperature": 0, "seed": 1, **more})
        with LLM(page_size=4, num_pages=100) as llm:
            expected = llm.generate([text], params)
            without = llm.stats.steps
        with LLM(page_size=4, num_pages=100, speculative_tokens=4, max_num_seqs=1) as llm:
            done = llm.generate([text], params)
            assert llm.stats.steps < 0.8 * without
            assert llm.stats.accepted_tokens >= without - llm.stats.steps
            again = llm.generate([text], params)
            until_idle(llm)
            assert pages_add_up(llm)
            # What the prefix tree has of the first output is right for those that follow.
            for ours in (done, again):
                same(ours, expected, llm, [text], [params])


@pytest.mark.slow
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 8])
def test_prefix_tree_after_rejected_drafts_has_known_tokens_alone(folder, rng, prompt_len):
    """Prompts that continue an output find only pages with the keys and values of its own tokens."""
    greedy = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    with LLM(folder, page_size=4) as undrafted, LLM(folder, page_size=4, speculative_tokens=5) as llm:
        for _ in range(8):
            prompt = repeating(rng, prompt_len, kinds=2)
            done, expected = llm.generate([prompt], greedy), undrafted.generate([prompt], greedy)
            until_idle(undrafted)
            same(done, expected, undrafted, [prompt], [greedy])
            longer = [*prompt, *done[0].token_ids, 7]
            undrafted._engine.scheduler.tree.clear()
            again = llm.generate([longer], greedy)
            assert again[0].num_cached_tokens >= (len(longer) - 2) // 4 * 4
            expected = undrafted.generate([longer], greedy)
            until_idle(undrafted)
            same(again, expected, undrafted, [longer], [greedy])
        assert llm.stats.drafted_tokens > llm.stats.accepted_tokens


def test_scheduler_with_a_full_batch_makes_no_drafts(folder, rng):
    """As the batch grows, drafts give way to requests."""
    prompts = [repeating(rng, 20, kinds=1) for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    rows = []
    with LLM(folder, page_size=4, max_num_seqs=8, speculative_tokens=3) as llm:
        launch = llm._engine.sampler.launch
        llm._engine.sampler.launch = lambda logits, *more: (rows.append(len(logits)), launch(logits, *more))[1]
        llm.generate(prompts, params)
        assert llm.stats.drafted_tokens == 0
        llm.generate(prompts[:3], params)
        assert llm.stats.drafted_tokens > 0
    assert max(rows) <= 8


@pytest.mark.filterwarnings("ignore:a step of .* raised:RuntimeWarning")
def test_llm_with_drafts_whose_sampling_raised_samples_without_them(folder, rng, monkeypatch):
    from quire import sampling

    prompts = [repeating(rng, 20) for _ in range(6)]
    params = [SamplingParams(temperature=0, logprobs=0, max_tokens=40, ignore_eos=True)] * 6  # outputs that go round
    with LLM(folder) as llm:
        expected = llm.generate(prompts, params)
    sample = sampling.sample

    def failing(logits, *given, **more):
        if len(logits) > 1 and rng.random() < 0.5:
            raise MemoryError("too many")
        return sample(logits, *given, **more)

    monkeypatch.setattr(sampling, "sample", failing)
    with LLM(folder, speculative_tokens=3) as llm:
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert llm.stats.accepted_tokens > 0
        monkeypatch.setattr(sampling, "sample", sample)
        same(done, expected, llm, prompts, params)


@pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
def test_llm_with_an_invalid_number_of_drafts_names_it(value):
    with pytest.raises(ValueError, match="speculative_tokens"):
        LLM(speculative_tokens=value)


def test_llm_with_drafts_and_a_runner_without_all_logits_is_refused():
    class Own(Runner):
        supports_all_logits = False

    with pytest.raises(ValueError, match="Own computes the logits of the last token"):
        LLM(speculative_tokens=2, runner=Own)
