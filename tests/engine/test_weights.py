"""Quantized checkpoints on the CPU: weights and tokens of the dequantized model, and errors that name the tensor."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from transformers import AutoModelForCausalLM, GPT2Config

from helpers import quantized
from helpers.checkpoints import change_config, change_weights
from quire.engine import LLM, SamplingParams
from quire.engine.config import EngineConfig
from quire.engine.load import load_model
from quire.engine.weights import gptq

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


def tokens(folder, **options):
    with LLM(folder, num_pages=64, device="cpu", **options) as llm:
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
    "scales of other blocks": (
        "ct fp8 channel",
        "weight_scale",
        lambda x: x.view(8, 16),
        "[8, 16], and [128, 1] by",
    ),
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


def test_gptq_zero_points_of_0_equal_dequantized_ones(llama, tmp_path):
    """Groups without negative numbers have zero points of 0, which borrow from others of their words."""

    def positive(weights):
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                weight[::8, :32].abs_().add_(0.01)

    source = change_weights(shutil.copytree(llama, tmp_path / "source"), positive)
    check_same(*quantized.quantize(source, tmp_path, "gptq asymmetric"))


def gptq_tensors(columns, size, with_index):
    """Random symmetric tensors of GPTQ with groups of a size, of which the last may have fewer columns, and the weight
    [16, columns] that they stand for.
    """
    index, codes = torch.arange(columns, dtype=torch.int32) // size, torch.randint(16, (16, columns))
    scales = torch.rand(int(index[-1]) + 1, 16).half() + 0.5
    tensors = {"qweight": quantized.pack(codes, 4).T.contiguous(), "scales": scales}
    tensors["qzeros"] = quantized.pack(torch.full((len(scales), 16), 7), 4)
    if with_index:
        tensors["g_idx"] = index
    return tensors, (codes - 8) * scales.float()[index.long()].T


def test_gptq_groups_of_a_layer_that_differ_from_the_configured_ones_are_those_of_its_index():
    format = gptq.read({"bits": 4, "group_size": 32, "sym": True})
    tensors, dense = gptq_tensors(192, 128, with_index=True)
    assert torch.equal(format.matrix(tensors, "x.").dequantized(torch.float32), dense)
    tensors, dense = gptq_tensors(192, 64, with_index=False)
    assert torch.equal(format.matrix(tensors, "x.").dequantized(torch.float32), dense)
    tensors, _ = gptq_tensors(192, 128, with_index=False)
    with pytest.raises(ValueError, match="has 2 groups for each row of 192 columns, which do not fit group_size = 32"):
        format.matrix(tensors, "x.")


def save_gpt2(folder, name):
    """A checkpoint of GPT-2, whose layers have transposed weights, in a format, and the dequantized one."""
    settings, quantize = quantized.FORMATS[name]
    config = GPT2Config(vocab_size=97, n_embd=128, n_layer=2, n_head=4, n_positions=64, eos_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "dense")
    shutil.copytree(folder / "dense", folder / "quantized")
    weights, tensors = load_file(folder / "dense" / "model.safetensors"), {}
    for key, weight in list(weights.items()):
        if re.search(r"\.c_\w+\.weight", key):
            ends, dense = quantize(weight.T.contiguous())
            weights[key] = dense.T
            tensors |= {f"{key.removesuffix('weight')}{end}": tensor for end, tensor in ends.items()}
        else:
            tensors[key] = weight
    quantized.write(folder / "dense", weights)
    quantized.write(folder / "quantized", tensors, settings)
    return folder / "quantized", folder / "dense"


def test_gptq_layers_with_transposed_weights_equal_dequantized_ones(tmp_path):
    check_same(*save_gpt2(tmp_path, "gptq"))


def test_load_model_with_transposed_weights_in_fp8_names_the_layer(tmp_path):
    folder, _ = save_gpt2(tmp_path, "ct fp8 tensor")
    with pytest.raises(
        ValueError, match=r"c_\w+\.weight .*weights of Conv1D are supported in the formats awq and gptq"
    ):
        load_model(folder, CPU)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_gptq_biases_of_layers_without_any_are_ignored_if_they_are_zero(value, llama, tmp_path):
    folder, dense = quantized.quantize(llama, tmp_path, "gptq")
    change_weights(folder, lambda tensors: tensors.update({f"{DOWN}.bias": torch.full((128,), value).half()}))
    if value:
        with pytest.raises(ValueError, match=f"does not take: {DOWN}.bias"):
            load_model(folder, CPU)
    else:
        check_same(folder, dense)


@pytest.mark.parametrize("dequantize", [True, False])
def test_llm_with_a_quantized_head_that_config_json_ties_has_the_tokens_of_the_dequantized_head(
    dequantize, llama, tmp_path, recwarn
):
    folder, dense = quantized.quantize(llama, tmp_path, "ct int4")
    ends, weight = quantized.FORMATS["ct int4"][1](torch.randn(97, 128))
    head = {f"lm_head.{end}": tensor for end, tensor in ends.items()}
    change_weights(folder, lambda weights: (weights.pop("lm_head.weight"), weights.update(head)))
    change_weights(dense, lambda weights: weights.update({"lm_head.weight": weight}))
    change_config(folder, tie_word_embeddings=True)
    assert tokens(folder, dequantize=dequantize) == tokens(dense)


def test_load_model_with_an_empty_quantization_config_has_the_weights_of_the_checkpoint(llama, tmp_path):
    folder = change_config(shutil.copytree(llama, tmp_path / "model"), quantization_config={})
    found, expected = (load_model(x, CPU).network.state_dict() for x in (folder, llama))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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
