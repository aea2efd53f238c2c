"""Requests with adapters of several models, whose tokens are those of the weights that PEFT merges, in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")

from peft import PeftModel
from transformers import AutoModelForCausalLM, PhimoeConfig

from helpers import quantized
from helpers.adapters import assert_greedy, merged, save_adapter
from helpers.checkpoints import SHAPE, save
from helpers.engines import pages_add_up
from quire.engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# The modules that each of two adapters changes: merged and fused projections, embeddings, heads, a mixture's attention.
TARGETS = {
    "qwen3": ([*ATTENTION, *MLP, "lm_head"], ["embed_tokens", "q_proj"]),
    "mistral": (["k_proj", "gate_proj"], ["lm_head"]),
    "phi3": (["qkv_proj", "gate_up_proj", "o_proj", "down_proj"], ["qkv_proj"]),
    "gpt-oss": (ATTENTION, ["q_proj"]),
    "mixtral": (ATTENTION, ["v_proj", "lm_head"]),
    "gemma2": ([*ATTENTION, *MLP], ["o_proj", "up_proj"]),
}


def served(root, names, prompts, of_each, **options):
    """The completions of prompts, whose adapters are folders of these names."""
    adapters = {name: root / name for name in names}
    with LLM(root / "base", max_adapters=2, adapter_rank_pages=3, adapters=adapters, num_pages=64, **options) as llm:
        done = llm.generate(prompts, GREEDY, adapter=of_each)
        assert pages_add_up(llm)
    return done


def random_prompts(rng, count):
    return [[rng.randrange(1, 97) for _ in range(rng.randint(1, 25))] for _ in range(count)]


@pytest.mark.parametrize("name", TARGETS)
def test_llm_adapters_of_a_model_have_the_tokens_of_merged_weights(name, tmp_path, rng):
    save(name, tmp_path / "base", tie_word_embeddings=False)
    networks = {None: AutoModelForCausalLM.from_pretrained(tmp_path / "base")}
    for i, (modules, rank) in enumerate(zip(TARGETS[name], (5, 18), strict=True)):
        own = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        folder = save_adapter(own, tmp_path / f"adapter{i}", r=rank, lora_alpha=rank, target_modules=modules)
        networks[f"adapter{i}"] = merged(own, folder)
    prompts = random_prompts(rng, 7)
    of_each = [*networks, *(rng.choice(list(networks)) for _ in range(4))]
    done = served(tmp_path, [n for n in networks if n], prompts, of_each)
    for prompt, adapter, completion in zip(prompts, of_each, done, strict=True):
        assert_greedy(networks[adapter], prompt, completion.token_ids)


def test_llm_adapter_of_a_model_whose_router_returns_several_tensors_leaves_it_as_it_is(tmp_path, rng):
    config = PhimoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    folder = save_adapter(network, tmp_path / "adapter0", r=4, target_modules=ATTENTION)
    network, prompts = merged(network, folder), random_prompts(rng, 3)
    for prompt, completion in zip(prompts, served(tmp_path, ["adapter0"], prompts, "adapter0"), strict=True):
        assert_greedy(network, prompt, completion.token_ids)


@pytest.mark.filterwarnings("ignore:.*tied layer is part of the adapter")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_llm_adapter_of_tied_embeddings_changes_what_it_was_trained_with(name, tmp_path, rng):
    """Merging would change the head with the embeddings, which share their weight: PEFT's model is not merged here.
    Gemma scales its embeddings.
    """
    save(name, tmp_path / "base", tie_word_embeddings=True)
    networks = {None: AutoModelForCausalLM.from_pretrained(tmp_path / "base")}
    for i, modules in enumerate((["embed_tokens", "v_proj"], ["q_proj", "down_proj"], ["lm_head"])):
        own = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        folder = save_adapter(own, tmp_path / f"adapter{i}", r=4, target_modules=modules)
        networks[f"adapter{i}"] = PeftModel.from_pretrained(own, folder)
    prompts = random_prompts(rng, 8)
    of_each = [*networks] * 2
    done = served(tmp_path, [n for n in networks if n], prompts, of_each)
    for prompt, adapter, completion in zip(prompts, of_each, done, strict=True):
        assert_greedy(networks[adapter], prompt, completion.token_ids)


@pytest.mark.parametrize(
    ("name", "compile"),
    [("fp8 block", False), ("gptq act-order", False), pytest.param("fp8 block", True, marks=pytest.mark.slow)],
)
def test_llm_layers_that_stay_quantized_take_adapters(name, compile, llama, tmp_path, rng):
    """Of the first format, layers of one input are merged, of the second they are not."""
    pytest.importorskip("compressed_tensors")
    folder, dense = quantized.quantize(llama, tmp_path / "quantized", name)
    own = AutoModelForCausalLM.from_pretrained(dense)
    save_adapter(own, tmp_path / "adapter", r=18, target_modules=[*ATTENTION, *MLP])
    networks = {None: AutoModelForCausalLM.from_pretrained(dense), "a": merged(own, tmp_path / "adapter")}
    prompts, of_each = random_prompts(rng, 4), ["a", None, "a", None]
    options = {"max_adapters": 1, "adapter_rank_pages": 2, "adapters": {"a": tmp_path / "adapter"}}
    with LLM(folder, num_pages=64, dequantize=False, compile=compile, **options) as llm:
        done = llm.generate(prompts, GREEDY, adapter=of_each)
        assert llm.model.compiled == compile
    for prompt, adapter, completion in zip(prompts, of_each, done, strict=True):
        assert_greedy(networks[adapter], prompt, completion.token_ids)
