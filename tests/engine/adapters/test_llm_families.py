"""Adapters of several families of models, of embeddings, heads and text parts: the engine has the tokens of PEFT."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from helpers import multimodal
from helpers.adapters import merged, save_adapter
from helpers.checkpoints import CONFIGS, FURTHER_CONFIGS, save
from quire.engine import LLM, SamplingParams

COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = [[1, 2, 3], [7] * 20, [40, 3, 1, 60, 11]]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def greedy_tokens(network):
    """The tokens that Transformers appends to each prompt."""
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [network.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def check_tokens(folder, model, target, modules):
    """Compare requests with and without an adapter of these modules, which is saved below the folder `target`, in one
    batch, with PEFT's merged weights and the base's.
    """
    alone = expected = greedy_tokens(model)
    # Small factors may leave all of the most likely tokens as they are.
    for alpha in (12, 24, 48, 96, 192):
        if expected == alone:
            settings = {"r": 5, "lora_alpha": alpha, "target_modules": modules}
            adapter = save_adapter(model, target / f"adapter-{alpha}", **settings)
            expected = greedy_tokens(merged(copy.deepcopy(model), adapter))
    assert expected != alone
    with LLM(folder, adapters={"a": adapter}, max_adapters=1, num_pages=64, page_size=4) as llm:
        done = llm.generate(PROMPTS * 2, GREEDY, adapter=["a"] * 3 + [None] * 3)
    assert [each.token_ids for each in done] == expected + alone


@pytest.mark.parametrize("name", CONFIGS | FURTHER_CONFIGS)
def test_llm_with_an_adapter_of_a_family_has_the_tokens_of_peft(name, tmp_path):
    folder = save(name, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = ATTENTION if name == "mixtral" else "all-linear"
    check_tokens(folder, model, tmp_path, modules)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj"]])
def test_llm_with_an_adapter_of_embedding_and_head_has_the_tokens_of_peft(modules, name, tmp_path):
    folder = save(name, tmp_path / "model", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_tokens(folder, model, tmp_path, modules)


@pytest.mark.parametrize("family", ["Llava", "Gemma3", "Qwen2_5_VL", "Qwen3VL"])
def test_llm_with_an_adapter_of_a_text_part_has_the_tokens_of_peft(family, tmp_path):
    folder = multimodal.save(family, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    modules = r".*language_model.*\.(q|k|v|o|up|gate|down)_proj"
    check_tokens(folder, model, tmp_path, modules)
