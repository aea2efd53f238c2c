"""Engines of several ranks, each in a process of its own: the tokens of one rank, and what happens when one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from array import array

import httpx
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config

from helpers import quantized
from helpers.checkpoints import SHAPE, save
from helpers.engines import pages_add_up, same, until_idle
from helpers.ranks import check_completions, random_params, random_prompts, torchrun
from helpers.server_processes import children_of, is_alive, until_ended
from quire.bench.batches import relative_error
from quire.engine import LLM, EmbeddingParams, SamplingParams, shipped_model
from quire.engine.parallel.channel import RankStep
from quire.engine.runner import Runner

SMALL = {"device": "cpu", "num_pages": 160, "max_batched_tokens": 64}
NINE = SamplingParams(max_tokens=9, ignore_eos=True)
CODE = ["def add(a, b):", "import os\nimport sys\n", "class A", "x"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")


def check_tokens(folder, prompts, rng, size, **options):
    """Compare the completions of an engine of several ranks with those of one rank."""
    options |= SMALL
    with LLM(folder, **options) as one, LLM(folder, **options, tensor_parallel_size=size) as several:
        check_completions(one, several, prompts, random_params(rng, len(prompts)))


def test_llm_of_two_ranks_has_the_outputs_of_one(rng):
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=1, prompt_logprobs=1)
    with LLM(**SMALL) as one, LLM(**SMALL, tensor_parallel_size=2, speculative_tokens=3) as two:
        assert children_of(os.getpid())
        expected, found = one.generate(CODE, params), two.generate(CODE, params)
        same(found, expected, one, CODE, [params] * len(CODE))
        for a, b in zip(found, expected, strict=True):
            for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
                assert x == pytest.approx(y, abs=1e-4)
        constrained = SamplingParams(max_tokens=9, regex="[a-c]{3}", seed=1)
        ours, theirs = ([done.text for done in llm.generate(CODE, constrained)] for llm in (two, one))
        assert ours == theirs
        assert all(len(text) == 3 for text in ours)
        (a,), (b,) = (llm.embed(["import os"], EmbeddingParams("mean")) for llm in (two, one))
        assert list(a.values) == pytest.approx(list(b.values), abs=1e-4)
        until_idle(two)
        assert pages_add_up(two)


def test_llm_whose_rank_is_killed_ends_requests_with_an_error_that_names_it():
    before = set(children_of(os.getpid()))
    with LLM(**SMALL, tensor_parallel_size=2, tensor_parallel_timeout=30) as llm:
        (process,) = set(children_of(os.getpid())) - before

        def kill(index, update):
            if not killed:
                os.kill(process, signal.SIGKILL)
                killed.append(process)

        killed = []
        params = SamplingParams(max_tokens=140, ignore_eos=True)
        (completion,) = llm.generate(["import os\n"], params, on_update=kill)
        assert completion.error == "RankError: rank 1 was ended by SIGKILL"
        with pytest.raises(RuntimeError, match="has ended by an error: rank 1 was ended by SIGKILL"):
            llm.generate("x")
        assert not llm.alive
    assert not is_alive(process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 4),
        ("qwen3", 2),
        ("gemma2", 2),
        ("gemma3", 2),
        ("mistral", 4),
        ("mixtral", 2),
        ("olmo2", 2),
        ("phi3", 4),
    ],
)
def test_llm_of_several_ranks_has_the_tokens_of_one(name, size, tmp_path, rng):
    check_tokens(save(name, tmp_path), random_prompts(rng, 7), rng, size)


@pytest.fixture
def biased(tmp_path):
    """A checkpoint whose linear layers have biases, and whose head is the embedding."""
    return save("llama", tmp_path, attention_bias=True, mlp_bias=True, vocab_size=96, tie_word_embeddings=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compile": True}, {"batch_invariant": True}], ids=str)
def test_llm_of_two_ranks_with_options_has_the_tokens_of_one(options, biased, rng):
    check_tokens(biased, random_prompts(rng, 5, 96), rng, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}], ids=str)
def test_llm_of_two_ranks_with_few_bits_has_the_log_probabilities_of_one_up_to_rounding(options, biased, rng):
    """Sums in another order may be rounded to the next number of 8 or 16 bits, so that tokens may differ."""
    prompts, params = random_prompts(rng, 5, 96), SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for size in (1, 2):
        with LLM(biased, **SMALL, **options, tensor_parallel_size=size) as llm:
            done = llm.generate(prompts, params)
        of_each = [next(iter(part.values())) for one in done for part in one.prompt_logprobs[1:]]
        found.append(torch.tensor(of_each, dtype=torch.float64))
    assert relative_error(found[1], found[0]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [("llama", "fp8 block"), ("llama", "ct int4 asymmetric"), ("llama", "modelopt FP8"), ("mixtral", "awq")],
)
def test_llm_of_two_ranks_with_weights_that_stay_quantized_has_the_tokens_of_one(model, name, tmp_path, rng, request):
    folder, _ = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    check_tokens(folder, random_prompts(rng, 4, 90), rng, 2, dequantize=False)


@pytest.mark.slow
def test_llm_of_ranks_with_a_refused_adapter_ends_the_other_ranks_before_it_raises(tmp_path):
    before = set(children_of(os.getpid()))
    # The exception that is caught here keeps the frames in which the engine was made.
    with pytest.raises(FileNotFoundError) as caught:
        LLM(**SMALL, tensor_parallel_size=2, max_adapters=1, adapters={"a": tmp_path})
    assert set(children_of(os.getpid())) == before
    del caught


@pytest.mark.slow
def test_llm_of_a_model_without_a_plan_says_so_by_the_name_of_the_option(tmp_path):
    config = GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=97, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="with tensor_parallel_size = 2: Transformers has no tensor-parallel plan"):
        LLM(tmp_path, **SMALL, tensor_parallel_size=2)


@pytest.mark.slow
def test_llm_of_a_model_that_does_not_compute_in_parts_says_so_by_the_name_of_the_option(tmp_path):
    config = CohereConfig(**SHAPE, use_qk_norm=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2: divided by Transformers' .*, it does not compute"):
        LLM(tmp_path, **SMALL, tensor_parallel_size=2)


@pytest.mark.slow
def test_llm_of_ranks_with_blocks_that_do_not_divide_says_so(llama, tmp_path):
    folder, _ = quantized.quantize(llama, tmp_path, "gptq act-order")
    with pytest.raises(ValueError, match="o_proj: its columns are in an order of their own"):
        LLM(folder, **SMALL, tensor_parallel_size=2, dequantize=False)


@pytest.mark.slow
def test_llm_of_two_ranks_with_random_weights_generates(tmp_path):
    save("qwen3", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with LLM(tmp_path, **SMALL, tensor_parallel_size=2, load_format="dummy") as llm:
        assert len(llm.generate([1, 2, 3], NINE)[0].token_ids) == 9


@pytest.mark.slow
def test_llm_whose_rank_hangs_ends_within_the_bound_and_names_it():
    before = set(children_of(os.getpid()))
    with LLM(**SMALL, tensor_parallel_size=4, tensor_parallel_timeout=8) as llm:
        processes = set(children_of(os.getpid())) - before
        assert len(processes) == 3
        stopped = max(processes)
        start = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        (completion,) = llm.generate("import os\n", SamplingParams(max_tokens=20, ignore_eos=True))
        assert completion.error == "RankError: rank 3 has not answered for 8 s"
        # What is beyond the bound is the time for a step, and for the reports of the others.
        assert time.monotonic() - start < 8 + 30
    for process in processes:
        until_ended(process)


@pytest.mark.slow
def test_llm_whose_rank_raises_ends_requests_with_its_error():
    with LLM(**SMALL, tensor_parallel_size=2) as llm:
        (follower,) = llm._engine.runner.leader._followers
        beyond = np.array([llm.model.vocab_size + 7])
        follower.channel.send(RankStep(beyond, np.zeros(1, dtype=np.int64), [array("i", [0])], [1], [1]))
        (completion,) = llm.generate("x")
    assert completion.error.startswith("RankError: rank 1 failed: IndexError: ")


@pytest.mark.slow
def test_llm_whose_rank_ends_while_nothing_runs_is_not_alive():
    before = set(children_of(os.getpid()))
    with LLM(**SMALL, tensor_parallel_size=2) as llm:
        (process,) = set(children_of(os.getpid())) - before
        os.kill(process, signal.SIGKILL)
        end = time.monotonic() + 20
        while llm.alive:
            assert time.monotonic() < end, "the engine goes on"
            time.sleep(0.05)


@pytest.mark.slow
def test_torchrun_processes_are_the_ranks_of_one_llm(tmp_path):
    program = """
from quire.engine import LLM, SamplingParams
with LLM(device="cpu", num_pages=99, tensor_parallel_size=2) as llm:
    print(llm.generate("import os", SamplingParams(temperature=0, max_tokens=9))[0].token_ids)
"""
    code, printed, errors = torchrun(tmp_path, 2, program)
    assert code == 0, errors
    with LLM(**SMALL) as llm:
        (expected,) = llm.generate("import os", SamplingParams(temperature=0, max_tokens=9))
    assert printed == f"{expected.token_ids}\n"


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_is_refused(tmp_path):
    program = "from quire.engine import LLM\nLLM(device='cpu', num_pages=99, tensor_parallel_size=4)"
    code, _, errors = torchrun(tmp_path, 2, program)
    assert code != 0
    assert "ValueError: tensor_parallel_size = 4: torchrun has started 2 processes" in errors


@pytest.mark.slow
def test_ranks_whose_leader_is_killed_end():
    program = "from quire.engine import LLM\nllm = LLM(device='cpu', num_pages=99, tensor_parallel_size=2)\n"
    program += "print('ready', flush=True)\nllm.generate('x')\nimport time\ntime.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout.readline() == "ready\n"
        followers = children_of(leader.pid)
        assert followers
        leader.kill()
    until_ended(*followers)


@pytest.mark.slow
def test_llm_of_ranks_with_what_they_do_not_compute_says_so():
    class Own(Runner):
        pass

    for options, reason in [
        ({"runner": Own}, "Own computes all of a model"),
    ]:
        with pytest.raises(ValueError, match=f"tensor_parallel_size = 2.*{reason}"):
            LLM(**SMALL, tensor_parallel_size=2, **options)
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        LLM("no such folder", **SMALL, tensor_parallel_size=2)
    before = children_of(os.getpid())
    # Four heads cannot be divided among three.
    with pytest.raises(ValueError, match=f"{shipped_model()} can't be run with tensor_parallel_size = 3: its 4 query"):
        LLM(**SMALL, tensor_parallel_size=3)
    assert children_of(os.getpid()) == before


@pytest.mark.slow
def test_serve_whose_rank_is_killed_ends_with_an_error_that_names_it():
    pytest.importorskip("fastapi")
    from helpers.server import serving_process

    flags = ("--num-pages", "200", "--tensor-parallel-size", "2")
    with serving_process(*flags, QUIRE_API_KEY="") as (process, url):
        body = {"prompt": "import os\n", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["usage"]["completion_tokens"] == 2
        (engine,) = children_of(process.pid)
        (follower,) = children_of(engine)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(20) == 1
        assert "quire: rank 1 was ended by SIGKILL" in process.stderr.read()
        until_ended(engine)
