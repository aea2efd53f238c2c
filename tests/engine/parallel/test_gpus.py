"""Engines of several ranks, each on a GPU: the tokens of one GPU, and what happens when a rank ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import save
from helpers.ranks import check_completions, random_params, random_prompts, torchrun
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


def check_tokens(folder, rng, kind="tensor_parallel_size", **options):
    """Compare the completions of an engine on two GPUs, with CUDA graphs, with those of one on one GPU."""
    prompts, params = random_prompts(rng, 20, 96), random_params(rng, 20)
    names = [None, *options.get("adapters", {})]
    with LLM(folder, **EXACT, **options) as one, LLM(folder, **EXACT, **options, **{kind: 2}) as two:
        assert two._engine.runner.step_graphs is not None
        check_completions(one, two, prompts, params, adapter=[rng.choice(names) for _ in prompts])


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("options", [{}, EAGER], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", ["tensor_parallel_size", "context_parallel_size"])
def test_llm_on_four_gpus_has_the_tokens_of_one(kind, options, rng):
    with LLM(**EXACT, **EAGER) as one, LLM(**EXACT, **options, **{kind: 4}) as four:
        for _ in range(3):
            check_completions(one, four, random_prompts(rng, 20), random_params(rng, 20))


# Experts, outputs that are gathered, and a norm over all heads.
@pytest.mark.parametrize("name", ["mixtral", "phi3", "olmo2"])
def test_llm_on_two_gpus_has_the_tokens_of_one_for_architectures(name, tmp_path, rng):
    check_tokens(save(name, tmp_path, vocab_size=96), rng, compile=False)


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "context_parallel_size"])
def test_llm_on_two_gpus_with_drafts_has_the_tokens_of_one(kind, tmp_path, rng):
    check_tokens(save("qwen3", tmp_path, vocab_size=96), rng, kind, speculative_tokens=3)


def test_llm_on_two_gpus_with_adapters_has_the_tokens_of_one(tmp_path, rng):
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from helpers.adapters import save_adapter

    base, adapters = save("llama", tmp_path / "base", vocab_size=96), {}
    for name, rank, modules in [
        ("all", 18, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("some", 5, ["q_proj", "down_proj"]),
    ]:
        own = AutoModelForCausalLM.from_pretrained(base)
        adapters[name] = save_adapter(own, tmp_path / name, r=rank, lora_alpha=rank, target_modules=modules)
    check_tokens(base, rng, adapters=adapters, max_adapters=2)


@pytest.mark.parametrize(("model", "name"), [("llama", "awq"), ("llama", "fp8 block"), ("mixtral", "fp8 block")])
def test_llm_on_two_gpus_with_quantized_weights_has_the_tokens_of_one(model, name, tmp_path, rng, request):
    pytest.importorskip("compressed_tensors")
    from helpers import quantized

    folder, _ = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    check_tokens(folder, rng, compile=False)


def test_torchrun_processes_on_two_gpus_are_the_ranks_of_one_llm(tmp_path):
    program = """
from quire.engine import LLM, SamplingParams
with LLM(device="cuda", dtype="float32", num_pages=99, compile=False, tensor_parallel_size=2) as llm:
    print(llm.generate("import os", SamplingParams(temperature=0, max_tokens=9))[0].token_ids)
"""
    code, printed, errors = torchrun(tmp_path, 2, program)
    assert code == 0, errors
    with LLM(**EXACT, **EAGER) as one:
        (expected,) = one.generate("import os", SamplingParams(temperature=0, max_tokens=9))
    assert printed == f"{expected.token_ids}\n"


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
