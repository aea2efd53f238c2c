"""Linear layers of one input, merged: the products of float64, the same memory, and other inputs computed alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from helpers import quantized
from helpers.checkpoints import CONFIGS, save
from quire.engine import LLM, SamplingParams
from quire.engine.projections import Merged, max_few_tokens, merge, recorded, replace_linears


class Parent(torch.nn.Module):
    def __init__(self, sizes, bias, dtype):
        super().__init__()
        self.parts = torch.nn.ModuleList()
        for i, size in enumerate(sizes):
            setattr(self, f"part{i}", torch.nn.Linear(24, size, bias=bias, dtype=dtype))

    def forward(self, *inputs):
        layers = [child for child in self.children() if isinstance(child, torch.nn.Linear)]
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]


def exact(parent, *inputs):
    layers = [child for child in parent.children() if isinstance(child, torch.nn.Linear)]
    found = []
    for layer, x in zip(layers, inputs, strict=True):
        bias = 0 if layer.bias is None else layer.bias.double()
        found.append(x.double() @ layer.weight.double().T + bias)
    return found


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_layers_equal_each_layer(rng, dtype, traced):
    torch.manual_seed(rng.randrange(1 << 31))
    parent = Parent([rng.choice((8, 16, 40)) for _ in range(3)], rng.random() < 0.5, dtype)
    x, y = torch.randn(1, 5, 24, dtype=dtype), torch.randn(1, 5, 24, dtype=dtype)
    names, own = list(parent.state_dict()), exact(parent, x, x, x)
    with torch.no_grad(), recorded(parent) as groups:
        parent(x, x, x)
    (merged,) = merge(groups)
    assert list(parent.state_dict()) == names
    start, end = merged.weight.data_ptr(), merged.weight.data_ptr() + merged.weight.nbytes
    assert all(start <= p.data_ptr() < end for name, p in parent.named_parameters() if "weight" in name)
    call = torch.compile(parent.forward, backend="eager", fullgraph=True) if traced else parent
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    with torch.no_grad():
        # The second and third are called with another tensor, or an equal one that is not the same.
        others = [(x, y, x)] if traced else [(x, y, x), (y, x, x), (x, x, x.clone()), (x, x, y)]
        for inputs in ((x, x, x), *others):
            for got, want in zip(call(*inputs), exact(parent, *inputs), strict=True):
                torch.testing.assert_close(got.double(), want, **tolerance)
        call(x, x, x)
        assert merged.input is None  # nothing is held after the last
        assert merged.outputs == ()
        merged.enable(False)
        assert all(type(p) is torch.nn.Linear for p in merged.linears)
        for got, want in zip(call(x, x, x), own, strict=True):
            torch.testing.assert_close(got.double(), want, **tolerance)


def test_recorded_layers_of_other_inputs_or_kinds_are_not_grouped():
    parent = Parent([8, 8, 8, 8], True, torch.float32)
    parent.part3 = torch.nn.Linear(24, 8, bias=False)
    x, y = torch.randn(2, 1, 3, 24)
    with recorded(parent) as groups:
        parent(x, y, x, x)
    assert groups == [[parent.part0, parent.part2]]
    with recorded(parent) as groups:  # a layer that is called twice is not merged
        parent(x, y, x, x)
        parent(y, x, x, x)
    assert groups == []


def test_recorded_layers_of_llama_are_grouped():
    network = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)
    with torch.no_grad(), recorded(network) as groups:
        network(torch.tensor([[1, 2]]))
    layer = network.model.layers[1]
    assert [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj] in groups
    assert [layer.mlp.gate_proj, layer.mlp.up_proj] in groups
    assert len(groups) == 8
    assert not any(network.lm_head in group for group in groups)


def test_llm_with_code_that_needs_whole_rows_runs_unmerged(tmp_path, monkeypatch):
    """`view` of a column of a product raises, which must not refuse a model that runs without merged layers."""
    torch.manual_seed(0)
    save("llama", tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(tmp_path, num_pages=64) as llm:
        assert len(llm.model.replacements) == 8
        expected = llm.generate([1, 2, 3], greedy)

    def flat(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate.view(-1).view(gate.shape)) * self.up_proj(x))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", flat)
    with LLM(tmp_path, num_pages=64) as llm:
        assert llm.model.replacements == []
        assert llm.generate([1, 2, 3], greedy)[0].token_ids == expected[0].token_ids


def test_merged_layers_of_frozen_weights_stay_frozen():
    linear = torch.nn.Linear(4, 4)
    merged = Merged([linear, torch.nn.Linear(4, 2)])
    assert merged.sizes == [4, 2]
    assert merged.bias is not None
    assert not linear.weight.requires_grad


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 16), (torch.float32, 1), (torch.float64, 1)])
def test_max_few_tokens_of_layers_is_that_of_their_dtype(dtype, most):
    layer = torch.nn.Sequential(torch.nn.Linear(8, 4, dtype=dtype))
    # Only products of `product` have the kernel.
    assert max_few_tokens([layer]) == 1
    replace_linears([layer])
    assert max_few_tokens([layer, torch.nn.SiLU()]) == most


@pytest.mark.parametrize(("name", "most"), [(None, 16), ("awq", 1)])
def test_max_few_tokens_of_models_is_that_of_weights_that_are_not_quantized(name, most, llama, tmp_path):
    """Otherwise the code of many tokens, which is also that of a few, might be compiled as that of a few."""
    folder = llama if name is None else quantized.quantize(llama, tmp_path, name)[0]
    with LLM(folder, device="cpu", dtype="bfloat16", num_pages=50, compile=False, dequantize=False) as llm:
        layers = llm.model.network.model.layers
        replace_linears(layers)
        assert max_few_tokens(layers) == most
