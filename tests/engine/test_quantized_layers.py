"""Weights that stay quantized when a checkpoint is loaded: which do, and the tokens of models that have them."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from helpers import quantized
from helpers.checkpoints import change_weights, save
from quire.bench.batches import relative_error
from quire.engine import LLM, SamplingParams
from quire.engine.config import EngineConfig
from quire.engine.load import load_model
from quire.engine.weights.modules import QuantizedLinear, QuantizedWeight

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CPU = torch.device("cpu")
KEPT = EngineConfig(dequantize=False)
PROMPTS = [[1, 2, 3], [7] * 20]
# Formats of linear layers that kernels multiply by, but for columns in groups of 32 with 8 bits.
LINEAR = [name for name in quantized.FORMATS if name not in ("mxfp4", "gptq 8 bits")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("llama"), **SHAPE)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return save("mixtral", tmp_path_factory.mktemp("mixtral"), **SHAPE)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return save("gpt-oss", tmp_path_factory.mktemp("gpt-oss"), **SHAPE | {"num_hidden_layers": 4})


def loaded(folder, config=KEPT):
    """The network of a checkpoint, whose weights stay quantized without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return load_model(folder, CPU, config).network


def logits(network):
    with torch.no_grad():
        return network(torch.arange(1, 12)[None]).logits


def tokens(folder, **options):
    with LLM(folder, num_pages=64, **options) as llm:
        assert llm.model.compiled == options.get("compile", False)
        return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def weights_of(network):
    return {name: m for name, m in network.named_modules() if isinstance(m, QuantizedWeight)}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_of_each_format_stay_quantized(name, llama, tmp_path):
    folder, dense = quantized.quantize(llama, tmp_path, name)
    model = load_model(folder, CPU, KEPT)
    linears = {n: m for n, m in model.network.named_modules() if isinstance(m, torch.nn.Linear)}
    assert [n for n, m in linears.items() if isinstance(m.weight, torch.Tensor)] == ["lm_head"]
    # Queries, keys and values are one product, gates and ups another, unless their columns are in different orders.
    assert len(model.replacements) == (0 if name == "gptq act-order" else 4)
    expected = load_model(dense, CPU).transformers_logits(torch.arange(1, 12)[None])
    assert relative_error(model.transformers_logits(torch.arange(1, 12)[None]), expected) < 1e-5
    for part in model.replacements:
        part.enable(False)
    assert all(isinstance(m, QuantizedLinear) for n, m in linears.items() if n != "lm_head")


@pytest.mark.parametrize("name", ["fp8 block", "ct fp8 channel", "ct fp8 tensor", "ct int4 asymmetric", "awq", "gptq"])
def test_experts_that_are_merged_stay_quantized(name, mixtral, tmp_path):
    folder, dense = quantized.quantize(mixtral, tmp_path, name)
    network = loaded(folder)
    experts = [m for n, m in weights_of(network).items() if "experts" in n]
    assert [m.codes.ndim for m in experts] == [4 if m.kind == "int4" else 3 for m in experts]
    assert len(experts) == 4
    expected = load_model(dense, CPU).transformers_logits(torch.arange(1, 12)[None])
    assert relative_error(load_model(folder, CPU, KEPT).transformers_logits(torch.arange(1, 12)[None]), expected) < 1e-5


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("model", ["llama", "mixtral", "gpt_oss"])
def test_llm_with_weights_that_stay_quantized_has_the_tokens_of_dequantized_ones(model, compile, tmp_path, request):
    name = {"llama": "gptq act-order", "mixtral": "fp8 block", "gpt_oss": "mxfp4"}[model]
    folder, dense = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    assert tokens(folder, device="cpu", dequantize=False, compile=compile) == tokens(dense, device="cpu")


def test_weights_without_a_kernel_are_dequantized_with_a_warning(llama, tmp_path):
    folder, dense = quantized.quantize(llama, tmp_path, "gptq 8 bits")
    with pytest.warns(RuntimeWarning, match=r"\(and 13 more\) is dequantized to float32: there is no kernel for int8"):
        network = load_model(folder, CPU, KEPT).network
    assert not weights_of(network)
    found, expected = network.state_dict(), load_model(dense, CPU).network.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_experts_of_other_orders_of_columns_are_dequantized_with_a_warning(mixtral, tmp_path):
    folder, _ = quantized.quantize(mixtral, tmp_path, "gptq act-order")
    with pytest.warns(RuntimeWarning, match="can't be merged as they are stored"):
        network = load_model(folder, CPU, KEPT).network
    assert all("self_attn" in name for name in weights_of(network))


def test_scales_that_kernels_cannot_decode_are_dequantized_with_a_warning(gpt_oss, tmp_path):
    folder, _ = quantized.quantize(gpt_oss, tmp_path, "mxfp4")

    def damage(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 1] = 129

    change_weights(folder, damage)
    with pytest.warns(RuntimeWarning, match="down_proj is dequantized to float32: there is no kernel for mxfp4"):
        load_model(folder, CPU, KEPT)


def test_random_weights_of_a_format_without_them_are_refused(llama, tmp_path):
    folder, _ = quantized.quantize(llama, tmp_path, "gptq")
    with pytest.raises(ValueError, match="'dummy' is not supported with weights of quant_method 'gptq'"):
        load_model(folder, CPU, EngineConfig(dequantize=False, load_format="dummy"))
    dense = load_model(folder, CPU, EngineConfig(load_format="dummy")).network
    assert not weights_of(dense)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "compile"),
    [("fp8 block", True), ("ct fp8 channel", True), ("awq", True), ("awq", False), ("gptq act-order", True)],
)
def test_llm_on_a_gpu_keeps_weights_quantized_and_captures_its_steps(name, compile, llama, tmp_path, recwarn):
    folder, dense = quantized.quantize(llama, tmp_path, name)
    check_on_gpu(folder, dense, 0.1, recwarn, compile=compile, dtype="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "name"), [("mixtral", "fp8 block"), ("gpt_oss", "mxfp4")])
def test_llm_on_a_gpu_keeps_experts_quantized_and_captures_its_steps(model, name, tmp_path, request, recwarn):
    folder, dense = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    # Rounding to 16 bits may send a token to other experts.
    check_on_gpu(folder, dense, 1e-3, recwarn, dtype="float32")


@pytest.mark.gpu
def test_llm_on_a_gpu_combines_quantized_weights_with_an_fp8_cache(llama, tmp_path, recwarn):
    folder, dense = quantized.quantize(llama, tmp_path, "fp8 block")
    check_on_gpu(folder, dense, 0.1, recwarn, dtype="bfloat16", kv_cache_dtype="fp8_e5m2")


def check_on_gpu(folder, dense, bound, recwarn, **options):
    """A model with quantized weights runs in CUDA graphs, and its logits are those of its dequantized weights."""
    options = {"device": "cuda", "num_pages": 64, "max_batched_tokens": 128, "compile": True} | options
    found = []
    for source in (folder, dense):
        with LLM(source, max_num_seqs=4, **options) as llm:
            done = llm.generate(PROMPTS, GREEDY)
            assert [len(each.token_ids) for each in done] == [8, 8]
            assert llm._engine.runner.step_graphs is not None
            assert llm.model.compiled == options["compile"]
            found.append((weights_of(llm.model.network), llm.model.transformers_logits(torch.arange(12)[None].cuda())))
    assert found[0][0]
    assert not found[1][0]
    assert relative_error(found[0][1].float().cpu(), found[1][1].float().cpu()) < bound
    assert not [w for w in recwarn if "dequantized" in str(w.message) or "without CUDA graphs" in str(w.message)]
