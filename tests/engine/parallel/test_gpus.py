"""Engines of several ranks, each on a GPU: the tokens of one GPU, and what happens when a rank ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

pytest.importorskip("transformers")

from helpers.ranks import check_completions, random_params, random_prompts
from quire.engine import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
EXACT = {"device": "cuda", "dtype": "float32", "num_pages": 400}


EAGER = {"compile": False, "cuda_graphs": False}


@pytest.mark.parametrize("options", [{}, EAGER], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", ["tensor_parallel_size", "context_parallel_size"])
def test_llm_on_two_gpus_has_the_tokens_of_one(kind, options, rng):
    with LLM(**EXACT, **EAGER) as one, LLM(**EXACT, **options, **{kind: 2}) as two:
        assert (two._engine.runner.step_graphs is None) == (options == EAGER)
        for _ in range(3):
            check_completions(one, two, random_prompts(rng, 20), random_params(rng, 20))


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGKILL, "rank 1 was ended by SIGKILL"), (signal.SIGSTOP, "rank 1 has not answered for 4 s")],
)
def test_llm_whose_rank_ends_frees_its_gpu(number, ending):
    with LLM(**EXACT, compile=False, tensor_parallel_size=2, tensor_parallel_timeout=4) as llm:
        (follower,) = llm._engine.runner.leader._followers
        threading.Timer(0.3, os.kill, (follower.process.pid, number)).start()
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        for _ in range(100):
            completion = llm.generate(["def f("] * 8, params)[0]
            if completion.finish_reason == "error":
                break
        assert completion.error == f"RankError: {ending}"
        assert torch.ones(3, device="cuda:0").sum().item() == 3
        with pytest.raises(RuntimeError, match="has ended by an error"):
            llm.generate("x")
    assert follower.process.poll() is not None
