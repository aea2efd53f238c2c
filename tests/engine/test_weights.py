"""Quantized checkpoints on the CPU: weights and tokens of the dequantized model, and errors that name the tensor."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from helpers import quantized
from helpers.checkpoints import change_config, change_weights
from quire.engine import LLM, SamplingParams
from quire.engine.config import EngineConfig
from quire.engine.load import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"


def check_same(folder, dense):
    """The weights and tokens of two checkpoints are equal."""
    with pytest.warns(RuntimeWarning, match=r"weights are dequantized to float32: \d+\.\d GB of memory"):
        network = load_model(folder, CPU).network
    expected = load_model(dense, CPU).network.state_dict()
    found = network.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def tokens(folder):
    with LLM(folder, num_pages=64, device="cpu") as llm:
        return [done.token_ids for done in llm.generate([[1, 2, 3], [7] * 20], GREEDY)]


@pytest.mark.filterwarnings("ignore:.*dequantized:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in quantized.FORMATS if name != "mxfp4"])
def test_quantized_linear_layers_of_each_format_equal_dequantized_ones(name, llama, tmp_path):
    check_same(*quantized.quantize(llama, tmp_path, name))


@pytest.mark.parametrize("name", ["fp8 block", "ct fp8 channel", "ct int4 asymmetric", "awq"])
def test_quantized_experts_that_are_merged_equal_dequantized_ones(name, mixtral, tmp_path):
    check_same(*quantized.quantize(mixtral, tmp_path, name))


def test_quantized_experts_of_gpt_oss_equal_dequantized_ones(gpt_oss, tmp_path):
    check_same(*quantized.quantize(gpt_oss, tmp_path, "mxfp4"))


@pytest.mark.filterwarnings("ignore:.*dequantized:RuntimeWarning")
@pytest.mark.parametrize("model", ["llama", "mixtral", "gpt_oss"])
def test_llm_with_quantized_weights_has_the_tokens_of_dequantized_ones(model, tmp_path, request):
    name = {"llama": "fp8 block", "mixtral": "gptq act-order", "gpt_oss": "mxfp4"}[model]
    folder, dense = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    assert tokens(folder) == tokens(dense)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantized_weights_in_16_bits_are_rounded_once(dtype, llama, tmp_path):
    folder, dense = quantized.quantize(llama, tmp_path, "ct int4 asymmetric")
    found, expected = (load_model(x, CPU, EngineConfig(dtype=dtype)).network.state_dict() for x in (folder, dense))
    for name in expected:
        assert found[name].dtype == getattr(torch, dtype)
        assert torch.equal(found[name], expected[name]), name


def fill(value, *index):
    """A function that sets elements of a tensor, and returns the tensor."""

    def change(tensor):
        tensor[index] = value
        return tensor

    return change


# Of a format, the end of the name of a tensor of DOWN, how it is broken, and what the message says.
BROKEN = {
    "a scale that is nan": ("fp8 block", "weight_scale_inv", fill(torch.nan), "is nan at [0, 0]"),
    "a negative scale": ("ct fp8 channel", "weight_scale", fill(-1, 5), "is -1.0 at [5, 0]"),
    "an infinite scale": ("awq", "scales", fill(torch.inf, 1), "is inf at [1, 0]"),
    "an exponent that is nan": ("ct mxfp4", "weight_scale", fill(255, 2), "is nan at [2, 0]"),
    "scales of another shape": ("gptq", "scales", lambda x: x[:, :64], "scales is [8, 64], and [8, 128] by"),
    "groups of other sizes": ("gptq", "g_idx", fill(3), "has 1 groups of 256 to 256 columns"),
    "zero points that `sym` excludes": ("gptq", "qzeros", fill(0), "has zero points other than 8"),
    "packed weights of another dtype": ("awq", "qweight", lambda x: x.long(), "is int64, and the format has int32"),
    "no scales": ("fp8 block", "weight_scale_inv", lambda x: None, "is missing in the checkpoint, which has weight ["),
    "no packed weights": ("ct int4", "weight_packed", lambda x: None, "weight is missing in the checkpoint"),
}


@pytest.mark.filterwarnings("ignore:.*dequantized:RuntimeWarning")
@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("what", BROKEN)
def test_load_model_with_a_broken_tensor_names_it(what, dequantize, llama, tmp_path):
    name, end, change, message = BROKEN[what]
    folder, _ = quantized.quantize(llama, tmp_path, name)

    def damage(tensors):
        tensor = change(tensors.pop(f"{DOWN}.{end}"))
        if tensor is not None:
            tensors[f"{DOWN}.{end}"] = tensor

    change_weights(folder, damage)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_model(folder, CPU, EngineConfig(dequantize=dequantize))
    assert DOWN in str(raised.value)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("name", ["fp8 block", "ct int4", "awq", "gptq"])
def test_load_model_with_a_truncated_file_names_it(name, llama, tmp_path):
    folder, _ = quantized.quantize(llama, tmp_path, name)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=re.escape(str(file))):
        load_model(folder, CPU)


REFUSED = {
    "fp8": ({"weight_block_size": [1, 32]}, "weight_block_size = [1, 32]"),
    "gptq": ({"bits": 3}, "bits = 3"),
    "awq": ({"bits": 4, "version": "gemv"}, "version = 'gemv'"),
    "compressed-tensors": (
        {"config_groups": {"a": {"targets": ["Linear"]}}, "format": "nvfp4-pack-quantized"},
        "config_groups.a: format = 'nvfp4-pack-quantized'",
    ),
    "modelopt": ({"quant_algo": "NVFP4"}, "quant_algo = 'NVFP4'"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_load_model_with_another_variant_of_a_format_names_it(method, llama, tmp_path):
    settings, message = REFUSED[method]
    folder, _ = quantized.quantize(llama, tmp_path, "gptq")
    change_config(folder, quantization_config={"quant_method": method, **settings})
    with pytest.raises(ValueError, match=re.escape(f"{message} is not supported")) as raised:
        load_model(folder, CPU)
    assert f"quantization_config.quant_method = {method!r}" in str(raised.value)
