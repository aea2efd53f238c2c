"""Weights that stay quantized when a checkpoint is loaded: which do, and the tokens of models that have them."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from helpers import multimodal, quantized
from helpers.checkpoints import change_weights
from quire.bench.batches import relative_error
from quire.engine import LLM, SamplingParams
from quire.engine.config import EngineConfig
from quire.engine.load import load_model
from quire.engine.weights.layouts import Matrix
from quire.engine.weights.modules import (
    QuantizedLinear,
    QuantizedWeight,
    RowsOf,
    can_join,
    can_multiply,
    can_stack,
    joined,
    stacked,
)
from quire.steps import group_by_expert

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CPU = torch.device("cpu")
KEPT = EngineConfig(dequantize=False)
PROMPTS = [[1, 2, 3], [7] * 20]
# Formats of linear layers that kernels multiply by, but for columns in groups of 32 with 8 bits.
LINEAR = [name for name in quantized.FORMATS if name not in ("mxfp4", "gptq 8 bits")]


# Of each layout, the kind, the rows and columns of a block (0: all), and whether there are zero points.
MATRICES = {
    "fp8 tensor": ("fp8", 0, 0, False),
    "fp8 rows": ("fp8", 1, 0, False),
    "fp8 blocks": ("fp8", 128, 128, False),
    "int8 rows": ("int8", 1, 0, True),
    "int4 groups": ("int4", 1, 64, True),
    "mxfp4": ("mxfp4", 1, 32, False),
}


def random_matrix(layout, rows, columns):
    """A random matrix, whose scales and zero points differ from block to block."""
    kind, block_rows, block_columns, zeros = MATRICES[layout]
    matrix = Matrix.random(kind, (rows, columns), (block_rows or rows, block_columns or columns), CPU, zeros)
    scale = matrix.scale.float() * 2.0 ** torch.randint(-2, 3, matrix.scale.shape)
    zero = None if matrix.zero is None else torch.randint_like(matrix.zero, 1, 15)
    return replace(matrix, scale=scale.to(matrix.scale.dtype), zero=zero)


@pytest.mark.interpret
@pytest.mark.parametrize("layout", MATRICES)
def test_quantized_weights_alone_joined_and_stacked_multiply_by_the_numbers_of_matrices(layout, rng):
    """The memory between the rows of inputs is NaN."""
    columns, x = 256, torch.full((rng.choice((1, 5)), 260), torch.nan)[:, :256]
    x.copy_(torch.randn(x.shape))
    matrices = [random_matrix(layout, 128, columns) for _ in range(3)]
    weights = [QuantizedWeight.of(matrix, torch.float32) for matrix in matrices]
    dense = [matrix.dequantized(torch.float32).double() for matrix in matrices]
    assert can_multiply(matrices[0])
    assert can_join(weights)
    assert can_stack(weights)
    bias = torch.randn(128)
    products = [x.double() @ w.T for w in dense]
    assert relative_error(weights[0](x, bias), products[0] + bias) < 1e-5
    whole = joined(weights)
    assert whole.rows == 384
    assert relative_error(whole(x), torch.cat(products, -1)) < 1e-5
    assert relative_error(RowsOf(whole, 128, 128)(x, bias), products[1] + bias) < 1e-5
    chosen = torch.tensor([2, 0] * len(x))
    order, position, ends = group_by_expert(chosen, 3)
    expected = torch.stack([products[e][i // 2] for i, e in enumerate(chosen)])
    assert relative_error(stacked(weights).of_experts(x, order, ends)[position], expected) < 1e-5


@pytest.mark.parametrize("layout", MATRICES)
def test_parts_of_quantized_weights_multiply_by_the_numbers_of_their_rows_and_columns(layout):
    matrix = random_matrix(layout, 384, 512)
    weight, dense = QuantizedWeight.of(matrix, torch.float32), matrix.dequantized(torch.float32).double()
    x = torch.randn(3, 512)
    assert relative_error(weight.part(-2, 128, 128)(x), x.double() @ dense[128:256].T) < 1e-5
    assert relative_error(weight.part(-1, 128, 256)(x[:, 128:384]), x[:, 128:384].double() @ dense[:, 128:384].T) < 1e-5
    halves = joined([weight.part(-2, start, 128) for start in (0, 256)])
    assert relative_error(halves(x), x.double() @ torch.cat([dense[:128], dense[256:]]).T) < 1e-5


def test_parts_of_quantized_weights_that_are_not_whole_blocks_are_refused():
    weight = QuantizedWeight.of(random_matrix("fp8 blocks", 384, 512), torch.float32)
    with pytest.raises(ValueError, match="output features 64 to 191 of 384 are not whole blocks of 128"):
        weight.part(-2, 64, 128)
    with pytest.raises(ValueError, match="input features 0 to 63 of 512 are not whole blocks of 128"):
        weight.part(-1, 0, 64)
    ordered = replace(random_matrix("int4 groups", 128, 256), order=torch.randperm(256))
    with pytest.raises(ValueError, match="its columns are in an order of their own"):
        QuantizedWeight.of(ordered, torch.float32).part(-1, 0, 128)


def test_weights_whose_rows_end_within_a_block_are_not_joined():
    weights = [QuantizedWeight.of(random_matrix("fp8 blocks", rows, 128), torch.float32) for rows in (128, 72, 128)]
    assert can_join(weights[:2])
    assert not can_join(weights)
    assert not can_stack(weights[:2])


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
    assert len(model.replacements) == (0 if name.endswith("act-order") else 4)
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


@pytest.mark.parametrize(("dense_parts", "kept"), [(("w2",), "gate_up_proj"), (("w1", "w3"), "down_proj")])
def test_llm_with_experts_of_which_one_part_is_quantized_has_the_tokens_of_dequantized_ones(
    dense_parts, kept, mixtral, tmp_path, recwarn
):
    folder, dense = quantized.quantize(mixtral, tmp_path, "ct fp8 channel")
    weights = load_file(dense / "model.safetensors")
    weights = {name: x for name, x in weights.items() if name.endswith(tuple(f"{part}.weight" for part in dense_parts))}

    def replace_part(tensors):
        for name in weights:
            del tensors[f"{name}_scale"]
        tensors.update(weights)

    change_weights(folder, replace_part)
    names = [name for name in weights_of(loaded(folder)) if "experts" in name]
    assert {name.rpartition(".")[2] for name in names} == {kept}
    assert tokens(folder, device="cpu", dequantize=False) == tokens(dense, device="cpu")


def test_experts_of_which_one_has_no_scale_of_activations_stay_quantized(mixtral, tmp_path):
    folder, dense = quantized.quantize(mixtral, tmp_path, "fp8 tensor")
    change_weights(folder, lambda w: w.pop("model.layers.1.block_sparse_moe.experts.2.w3.activation_scale"))
    assert len([name for name in weights_of(loaded(folder)) if "experts" in name]) == 4
    found, expected = (load_model(x, CPU).network.state_dict() for x in (folder, dense))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_quantized_experts_of_a_vision_language_model_have_a_tensor_each(tmp_path):
    """Checkpoints of its model with 16 bits have all experts in one tensor."""
    dense = multimodal.save("Qwen3VLMoe", tmp_path / "dense")
    folder = shutil.copytree(dense, tmp_path / "quantized")
    settings, quantize = quantized.FORMATS["fp8 partial blocks"]
    weights = load_file(dense / "model.safetensors")
    tensors = {name: x for name, x in weights.items() if ".experts." not in name}
    for name in weights.keys() - tensors.keys():
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name.rpartition(".")[2]]
        for number, expert in enumerate(weights[name]):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                ends, read = quantize(weight.contiguous())
                weight.copy_(read)
                stem = f"{name.rpartition('.')[0]}.{number}.{part}"
                tensors |= {f"{stem}.{end}": x for end, x in ends.items()}
    quantized.write(dense, weights)
    quantized.write(folder, tensors, settings)
    found, expected = (load_model(x, CPU).network.state_dict() for x in (folder, dense))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fp8_experts_in_one_tensor_stay_quantized(mixtral, tmp_path):
    """Transformers' own names of experts' weights are those of checkpoints that have all experts in one tensor."""
    dense = shutil.copytree(mixtral, tmp_path / "dense")
    folder = shutil.copytree(mixtral, tmp_path / "quantized")
    weights = dict(load_model(mixtral, CPU).network.state_dict())
    tensors = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        scale = weights[name].abs().amax((1, 2), keepdim=True) / 448
        codes = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[name] = codes.float() * scale
        tensors |= {name: codes, f"{name}_scale_inv": scale, f"{name}_activation_scale": torch.ones(len(codes))}
    quantized.write(dense, weights)
    quantized.write(folder, tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    assert len([name for name in weights_of(loaded(folder)) if "experts" in name]) == 4
    found, expected = (load_model(x, CPU).network.state_dict() for x in (folder, dense))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert tokens(folder, device="cpu", dequantize=False) == tokens(dense, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("model", ["llama", "mixtral", "gpt_oss"])
def test_llm_with_weights_that_stay_quantized_has_the_tokens_of_dequantized_ones(model, compile, tmp_path, request):
    name = {"llama": "gptq act-order", "mixtral": "fp8 block", "gpt_oss": "mxfp4"}[model]
    folder, dense = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    assert tokens(folder, device="cpu", dequantize=False, compile=compile) == tokens(dense, device="cpu")


def test_llm_combines_weights_that_stay_quantized_with_an_fp8_cache(llama, tmp_path):
    folder, dense = quantized.quantize(llama, tmp_path, "ct int4 asymmetric")
    options = {"device": "cpu", "kv_cache_dtype": "fp8_e5m2"}
    assert tokens(folder, dequantize=False, **options) == tokens(dense, **options)


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
