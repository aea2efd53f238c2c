"""What `transformers_internals.py` knows of Transformers, compared with the installed version."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MethodType

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from helpers.checkpoints import change_weights, save  # noqa: E402
from helpers.tokenizers import byte_fallback  # noqa: E402
from quire.engine import transformers_internals as internals  # noqa: E402

PROMPT = "a b ab"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@dataclass
class Reading:
    """Stands for an operation that reads weights."""

    merging: list


class OtherEncoding(PreTrainedTokenizerFast):
    def _encode_plus(self, *args, **kwargs):
        return super()._encode_plus(*args, **kwargs)


class OtherDecoding(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    return save("mixtral", tmp_path_factory.mktemp("mixtral"))


def test_known_version_is_installed():
    """On another version, compare transformers_internals.py with Transformers' code, function by function, and then
    change KNOWN_VERSIONS.
    """
    assert transformers.__version__.startswith(tuple(f"{version}." for version in internals.KNOWN_VERSIONS))


def test_tokenizer_of_the_library_encodes_and_decodes_as_the_library():
    tokenizer = byte_fallback()
    assert internals.calls_library_to_encode(tokenizer)
    assert internals.calls_library_to_decode(tokenizer)
    ids = tokenizer.backend_tokenizer.encode(PROMPT).ids
    assert tokenizer(PROMPT)["input_ids"] == ids
    assert tokenizer.decode(ids) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_tokenizer_with_code_of_its_own_is_not_taken_for_that_of_the_library():
    own = byte_fallback().backend_tokenizer
    encoding, decoding = OtherEncoding(tokenizer_object=own), OtherDecoding(tokenizer_object=own)
    assert not internals.calls_library_to_encode(encoding)
    assert internals.calls_library_to_decode(encoding)
    assert internals.calls_library_to_encode(decoding)
    assert not internals.calls_library_to_decode(decoding)
    changed = byte_fallback()
    changed.decode = MethodType(lambda self, ids: "", changed)
    assert not internals.calls_library_to_decode(changed)


def test_generation_defaults_are_those_of_generate(folder):
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.generation_config = GenerationConfig()
    prepared, _ = network._prepare_generation_config(GenerationConfig())
    defaults = internals.generation_defaults()
    assert "do_sample" in defaults
    assert {name: getattr(prepared, name) for name in defaults} == defaults


def test_apply_gate_is_the_activation_of_the_experts(folder):
    experts = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.experts
    x = torch.randn(5, 2 * experts.down_proj.shape[-1])
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(internals.apply_gate(experts, x), experts.act_fn(gate) * up)


def test_load_report_is_logged_outside_of_the_context_alone(tmp_path, caplog):
    folder = change_weights(save("llama", tmp_path), lambda weights: weights.pop("model.norm.weight"))
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            with internals.without_load_report():
                AutoModelForCausalLM.from_pretrained(folder)
            assert not caplog.records
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "LOAD REPORT" in caplog.text


def test_conversion_errors_of_an_expert_without_a_weight_name_the_parameter(tmp_path):
    folder = change_weights(save("mixtral", tmp_path), lambda weights: weights.pop(EXPERT))
    with pytest.raises(RuntimeError) as raised:
        AutoModelForCausalLM.from_pretrained(folder)
    assert "model.layers.1.mlp.experts.gate_up_proj" in internals.conversion_errors(raised.value)
    assert internals.conversion_errors(ValueError("of something else")) == {}


def test_conversions_of_parts_take_whole_names_and_pass_on_what_merges():
    merge = [MergeModulelist(0), Concatenate(1)]
    names = ["experts.*.w1.weight", "experts.*.w3.weight"]
    given = WeightConverter(names, "experts.gate_up_proj", merge)
    given.scope_prefix, given.base_model_prefix = "text", "model"
    renaming = WeightRenaming("gate.weight", "router.weight")
    found = internals.conversions_of_parts([renaming, given], {"weight": ("weight", "weight_scale")}, Reading)
    assert found[0] is renaming
    merged, alone = found[1:]
    parts = [f"{name.removesuffix('weight')}{part}$" for name in names for part in ("weight", "weight_scale")]
    assert merged.source_patterns == parts
    assert merged.target_patterns == ["experts.gate_up_proj"]
    assert (merged.scope_prefix, merged.base_model_prefix) == ("text", "model")
    assert [each.operations[0].merging for each in (merged, alone)] == [merge, []]
    assert alone.rename_source_key("q_proj.weight_scale") == ("q_proj.weight", "weight_scale$")
    assert alone.rename_source_key("q_proj.weight_shape") == ("q_proj.weight_shape", None)


def test_conversions_of_parts_keep_those_of_one_tensor_that_becomes_several_weights():
    given = WeightConverter("attn.qkv.weight", ["attn.q.weight", "attn.k.weight", "attn.v.weight"], [Chunk(0)])
    found = internals.conversions_of_parts([given], {"weight": ("weight", "weight_scale")}, Reading)
    assert found[0] is given
