"""Adapters name modules as the class does that they were trained with, and the network may be of another class."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.adapters import change_tensors, merged, save_adapter, with_factors
from helpers.checkpoints import CONFIGS
from helpers.multimodal import FAMILIES, save
from quire.engine.adapters.peft import read_adapter
from quire.engine.adapters.targets import Names, adapter_targets
from quire.engine.load import load_model
from quire.engine.multimodal import keep_language_model, removed_parts

PREFIX = "base_model.model."
# The language model of a whole model, as a regular expression of its modules' names.
IN_TEXT = r".*(language_model|text_model).*\.(q_proj|down_proj)"


def read(network, folder):
    return read_adapter(folder, adapter_targets(network), removed=removed_parts(network))


def text_part(model):
    """A copy of a model, without what sees images."""
    network = copy.deepcopy(model)
    keep_language_model(network)
    return network


def whole(family, folder):
    return AutoModelForImageTextToText.from_pretrained(save(family, folder), dtype=torch.float32)


def check_same_logits(network, adapter, expected):
    tokens = torch.randint(1, 90, (1, 9))
    found = with_factors(network, adapter)(tokens).logits
    assert not torch.allclose(found, network(tokens).logits)
    torch.testing.assert_close(found, expected(tokens).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_read_adapter_of_a_whole_model_has_its_text_part(family, tmp_path):
    model = whole(family, tmp_path / "model")
    folder = save_adapter(model, tmp_path / "adapter", r=4, lora_alpha=3, target_modules=IN_TEXT)
    network = text_part(model)
    adapter = read(network, folder)
    assert len(adapter.factors) == (2 if family == "Qwen3VLMoe" else 4)
    check_same_logits(network, adapter, merged(model, folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_read_adapter_that_changes_what_sees_images_names_it(family, tmp_path):
    model = whole(family, tmp_path / "model")
    folder = save_adapter(model, tmp_path / "adapter", r=4, target_modules=r".*(vision|visual).*\.(q_proj|qkv)")
    network = text_part(model)
    (removed,) = {part for part in removed_parts(network) if "visi" in part or "visual" in part}
    with pytest.raises(ValueError, match=rf"is of {removed}, which does not run: only the language model does, on"):
        read(network, folder)
    # By the names of older classes, too.
    old = removed.removeprefix("model.")
    change_tensors(folder, lambda tensors: rename(tensors, removed, old))
    with pytest.raises(ValueError, match=rf"{PREFIX}{old}.* is of {removed}, which does not run"):
        read(network, folder)


def rename(tensors, old, new):
    """Replace the beginning of all names."""
    for name in list(tensors):
        assert name.startswith(PREFIX + old)
        tensors[PREFIX + new + name.removeprefix(PREFIX + old)] = tensors.pop(name)


@pytest.mark.parametrize("new", ["language_model.model", "model", "language_model", "model.text_model"])
def test_read_adapter_with_names_of_another_class_has_the_same_factors(new, tmp_path):
    model = whole("Llava", tmp_path / "model")
    folder = save_adapter(model, tmp_path / "adapter", r=4, target_modules=IN_TEXT)
    network = text_part(model)
    expected = read(network, folder)
    change_tensors(folder, lambda tensors: rename(tensors, "model.language_model", new))
    found = read(network, folder)
    assert found.digest == expected.digest
    assert found.factors.keys() == expected.factors.keys()


def test_read_adapter_of_an_old_head_is_that_of_the_head(tmp_path):
    model = whole("Llava", tmp_path / "model")
    folder = save_adapter(model, tmp_path / "adapter", r=4, target_modules=["lm_head"])
    change_tensors(folder, lambda tensors: rename(tensors, "lm_head", "language_model.lm_head"))
    assert read(text_part(model), folder).factors.keys() == {"lm_head"}


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForCausalLM])
def test_read_adapter_of_text_alone_runs_on_the_whole_model_and_the_other_way(kind, tmp_path):
    model = whole("Llava", tmp_path / "model")
    text = kind.from_config(model.config.text_config, dtype=torch.float32)
    of_text = save_adapter(text, tmp_path / "text", r=4, target_modules=["q_proj", "down_proj"])
    of_whole = save_adapter(model, tmp_path / "whole", r=4, target_modules=IN_TEXT)
    network = text_part(model)
    causal = AutoModelForCausalLM.from_config(model.config.text_config, dtype=torch.float32)
    for folder in (of_text, of_whole):
        first, second = read(network, folder).factors, read(causal, folder).factors
        assert {path.replace("language_model.", "") for path in first} == second.keys()
        assert len(second) == 4


def test_adapter_targets_of_a_loaded_network_are_those_of_the_model(tmp_path):
    """Merged and replaced layers keep their places and sizes."""
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", torch.device("cpu"))
    assert loaded.replacements
    assert adapter_targets(loaded.network) == adapter_targets(model)
    kinds = [target.kind for target in adapter_targets(model).values()]
    assert (kinds.count("linear"), kinds.count("embedding"), kinds.count("head")) == (4 * 7, 1, 1)
    folder = save_adapter(model, tmp_path / "adapter", r=4, target_modules="all-linear")
    assert read(loaded.network, folder).factors.keys() == read(model, folder).factors.keys()


def test_names_that_two_modules_could_have_mean_neither():
    names = Names(["model.layers.0.q_proj", "language_model.layers.0.q_proj", "lm_head"])
    assert names.find("model.layers.0.q_proj") == "model.layers.0.q_proj"
    assert names.find("layers.0.q_proj") is None
    assert names.find("model.language_model.lm_head") == "lm_head"
    assert names.find("model") is None
