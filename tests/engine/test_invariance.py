"""Batch-invariant engines: a request's tokens and log-probabilities have the same bits whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import CONFIGS, VOCAB, save
from helpers.engines import captured_on_the_host, pages_add_up, until_idle
from quire.engine import LLM, SamplingParams

ROOM = {"page_size": 4, "num_pages": 600, "max_num_seqs": 8, "max_batched_tokens": 24}
CROWD = {**ROOM, "num_pages": 20}  # so few pages that requests are preempted


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(17)
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


def random_requests(rng, count):
    """Requests that sample and report, of which many begin alike, the first two for three pages."""
    prefix = [rng.randrange(VOCAB) for _ in range(24)]
    prompts, params = [], []
    for _ in range(count):
        start = prefix[: rng.choice((0, 8, 24))]
        prompts.append(start + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))])
        options = {"temperature": rng.choice((0, 1.0)), "max_tokens": rng.randint(1, 20), "seed": rng.randrange(1000)}
        asked = {"logprobs": 2, "prompt_logprobs": rng.choice((None, 1))}
        params.append(SamplingParams(**options, **asked))
    prompts[:2] = [[rng.randrange(VOCAB) for _ in range(13)]] * 2
    params[1] = replace(params[1], prompt_logprobs=None)  # else its prompt would be computed again
    return prompts, params


def outcome(done):
    return done.token_ids, done.logprobs, done.prompt_logprobs, done.finish_reason


def outcomes(llm, prompts, params, alone):
    """What comes of requests that run one by one, each without the prefixes of others, or together."""
    if not alone:
        return [outcome(done) for done in llm.generate(prompts, params)]
    found = []
    for prompt, p in zip(prompts, params, strict=True):
        llm._engine.scheduler.tree.clear()
        found.append(outcome(llm.generate([prompt], p)[0]))
        until_idle(llm)
    return found


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gemma2", "qwen3") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(set(CONFIGS) - {"gpt-oss"})
    ],
)
def test_batch_invariant_requests_beside_others_have_equal_bits(folders, rng, name, dtype):
    prompts, params = random_requests(rng, 24)
    with LLM(folders[name], **ROOM, dtype=dtype, batch_invariant=True) as llm:
        expected = outcomes(llm, prompts, params, alone=True)
    with LLM(folders[name], **CROWD, dtype=dtype, batch_invariant=True) as llm:
        assert outcomes(llm, prompts, params, alone=False) == expected
        assert llm.stats.preemptions > 0
        assert llm.stats.cached_tokens > 0
        until_idle(llm)
        assert pages_add_up(llm)


@pytest.mark.slow
def test_batch_invariant_requests_with_drafts_and_graphs_have_equal_bits(folders, rng):
    prompts = [[rng.randrange(VOCAB) for _ in range(3)] * rng.randint(1, 9) for _ in range(24)]
    params = [SamplingParams(temperature=0.1, max_tokens=20, seed=i, logprobs=1) for i in range(24)]
    with LLM(folders["llama"], **ROOM, dtype="bfloat16", batch_invariant=True) as llm:
        expected = outcomes(llm, prompts, params, alone=True)
    with LLM(folders["llama"], **CROWD, dtype="bfloat16", batch_invariant=True, speculative_tokens=3) as llm:
        captured_on_the_host(llm, max_tokens=24)
        assert outcomes(llm, prompts, params, alone=False) == expected
        assert llm.stats.accepted_tokens > 0
        assert llm._engine.runner.step_graphs.replays > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "llama", "qwen3"])
def test_batch_invariant_requests_on_a_gpu_have_equal_bits(folders, rng, name, dtype, graphs):
    prompts, params = random_requests(rng, 18)
    options = {"dtype": dtype, "device": "cuda", "batch_invariant": True, "cuda_graphs": graphs}
    with LLM(folders[name], **ROOM, **options) as llm:
        expected = outcomes(llm, prompts, params, alone=True)
    with LLM(folders[name], **CROWD, **options) as llm:
        assert outcomes(llm, prompts, params, alone=False) == expected


def test_batch_invariant_model_whose_logits_vary_is_refused(folders):
    """Each expert multiplies as many rows as it has tokens in the step."""
    with pytest.raises(ValueError, match="can't be run with batch_invariant: its logits depend on the other requests"):
        LLM(folders["gpt-oss"], **ROOM, batch_invariant=True)


def test_batch_invariant_with_hopper_is_refused():
    with pytest.raises(ValueError, match="backend = 'hopper' is not supported with batch_invariant"):
        LLM(backend="hopper", batch_invariant=True)
