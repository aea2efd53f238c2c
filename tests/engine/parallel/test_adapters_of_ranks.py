"""Engines of several ranks whose requests have adapters: the tokens of one rank."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM

from helpers.adapters import save_adapter
from helpers.checkpoints import save
from helpers.ranks import check_completions, random_params, random_prompts
from helpers.server_processes import children_of
from quire.engine import LLM
from quire.engine.adapters.targets import Target
from quire.engine.parallel.weight_shard import WeightShard

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
SMALL = {"device": "cpu", "num_pages": 160, "max_batched_tokens": 64, "max_adapters": 2, "adapter_rank_pages": 3}
# More adapters than there are slots: the modules of each. Gathered layers, those of which each rank has some inputs of
# all, replicated heads of keys, packed halves, embeddings and heads.
CASES = {
    "llama": (4, ["lm_head", *ATTENTION, *MLP], ["k_proj"], ["embed_tokens", "down_proj"]),
    "phi3": (2, ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"], ["qkv_proj"], ["lm_head"]),
    "olmo2": (2, [*ATTENTION, *MLP], ["o_proj", "lm_head"], ["q_proj"]),
    "mixtral": (2, ATTENTION, ["v_proj", "lm_head"], ["o_proj"]),
    "gemma2": (2, ["o_proj", "up_proj"], ["embed_tokens", *MLP], ["q_proj"]),
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")


def save_all(root, name, *modules, **config):
    """A checkpoint and an adapter for each list of modules, of different ranks; return their folders."""
    base, adapters = save(name, root / "base", tie_word_embeddings=False, **config), {}
    for i, targets in enumerate(modules):
        own = AutoModelForCausalLM.from_pretrained(base)
        rank = (5, 18, 3)[i]
        adapters[f"adapter{i}"] = save_adapter(
            own, root / f"adapter{i}", r=rank, lora_alpha=rank, target_modules=list(targets)
        )
    return base, adapters


def check_tokens(base, adapters, rng, size, **options):
    """Compare the completions of an engine of several ranks with those of one rank."""
    prompts, params = random_prompts(rng, 9, 96), random_params(rng, 9)
    of_each = [None, *adapters]
    of_each += rng.choices(of_each, k=9 - len(of_each))
    options |= SMALL
    with (
        LLM(base, **options, adapters=adapters) as one,
        LLM(base, **options, adapters=adapters, tensor_parallel_size=size) as several,
    ):
        expected = check_completions(one, several, prompts, params, adapter=of_each)
        # The adapters change what the model computes.
        alone = one.generate(prompts[1], params[1])[0]
        assert alone.logprobs != expected[1].logprobs


@pytest.mark.slow
def test_llm_of_two_ranks_with_adapters_has_the_tokens_of_one(tmp_path, rng):
    base, adapters = save_all(tmp_path, "llama", [*ATTENTION, *MLP], ["lm_head"], ["embed_tokens"], vocab_size=96)
    check_tokens(base, adapters, rng, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_llm_of_ranks_with_adapters_has_the_tokens_of_one(name, tmp_path, rng):
    size, *modules = CASES[name]
    check_tokens(*save_all(tmp_path, name, *modules, vocab_size=96), rng, size)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compile": True}, {"batch_invariant": True}], ids=str)
def test_llm_of_two_ranks_with_adapters_and_options_has_the_tokens_of_one(options, tmp_path, rng):
    check_tokens(
        *save_all(tmp_path, "llama", [*ATTENTION, *MLP], ["lm_head", "q_proj"], vocab_size=96), rng, 2, **options
    )


@pytest.mark.slow
def test_adapter_whose_rank_is_killed_before_it_is_copied_ends_requests(tmp_path):
    base, adapters = save_all(tmp_path, "llama", ATTENTION)
    before = set(children_of(os.getpid()))
    with LLM(base, **SMALL, adapters=adapters, tensor_parallel_size=2, tensor_parallel_timeout=30) as llm:
        (process,) = set(children_of(os.getpid())) - before
        os.kill(process, signal.SIGKILL)
        try:
            error = llm.generate([[1, 2, 3]], adapter="adapter0")[0].error
        except RuntimeError as refused:
            # The engine has seen it before the request came.
            error = str(refused)
        assert "rank 1 was ended by SIGKILL" in error


@pytest.mark.parametrize(("dim", "halves"), [(-1, 1), (-2, 1), (-2, 2)])
def test_factors_of_ranks_sum_to_the_products_of_all(dim, halves, rng):
    """The parts of A x are summed; those of B are rows of the output."""
    torch.manual_seed(rng.randrange(1 << 30))
    a, b, x = torch.randn(3, 8), torch.randn(12, 3), torch.randn(5, 8)
    target = Target("linear", 8, 12, shard=WeightShard(dim, 8 if dim == -1 else 12, 2, halves, num_ranks=2))
    whole = x @ a.T @ b.T
    for rank in range(2):
        own_a, own_b = target.factors_of_rank(rank, a, b)
        assert (own_a.shape[1], own_b.shape[0]) == target.shape_of_rank
        if dim == -1:
            own = x[:, 4 * rank : 4 * rank + 4] @ own_a.T @ own_b.T
            whole = whole - own
        else:
            rows = target.shard.tensor_of(rank, torch.arange(12), 0)
            torch.testing.assert_close(x @ own_a.T @ own_b.T, whole[:, rows])
    if dim == -1:
        torch.testing.assert_close(whole, torch.zeros_like(whole), rtol=0, atol=1e-5)
