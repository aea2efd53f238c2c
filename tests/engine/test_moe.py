"""Mixtures of experts by `quire.engine.moe` compute what Transformers' own code does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from helpers.checkpoints import save
from quire.bench.batches import relative_error
from quire.engine import LLM, SamplingParams, moe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {
    "gated": lambda: Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=72, moe_intermediate_size=40, num_experts=16)),
    "not gated": lambda: NemotronHExperts(
        NemotronHConfig(hidden_size=72, moe_intermediate_size=40, n_routed_experts=16, moe_latent_size=None)
    ),
    "with biases, transposed": lambda: GptOssExperts(
        GptOssConfig(hidden_size=72, intermediate_size=40, num_local_experts=16)
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_forward_of_each_kind_equals_the_modelling_code(kind, device, rng):
    module = KINDS[kind]().to(device).requires_grad_(False)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    module.config._experts_implementation = "eager"
    for tokens in (1, rng.randint(2, 20), 700):
        x = torch.randn(tokens, 72, device=device)
        weights, index = torch.randn(tokens, 16, device=device).softmax(-1).topk(rng.randint(1, 4))
        expected = module.double()(x.double(), index, weights.double())
        out = moe.experts_forward(module.float(), x, index, weights)
        assert out.dtype == x.dtype
        assert relative_error(out.cpu(), expected.cpu()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_experts_forward_compiled_once_takes_any_number_of_tokens(kind, rng):
    module, graphs = KINDS[kind]().requires_grad_(False), []
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.2)

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(moe.experts_forward, fullgraph=True, dynamic=True, backend=record)
    for tokens in (5, rng.randint(6, 20), 700):
        weights, index = torch.randn(tokens, 16).softmax(-1).topk(3)
        given = module, torch.randn(tokens, 72), index, weights
        assert torch.equal(compiled(*given), moe.experts_forward(*given))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_replaced_experts_disabled_are_those_of_the_network(name, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(moe, "experts_forward", lambda *args, own=moe.experts_forward: calls.append(1) or own(*args))
    network = AutoModelForCausalLM.from_pretrained(save(name, tmp_path), attn_implementation="eager")
    tokens = torch.arange(9)[None]
    expected = network(tokens).logits
    assert not calls
    replaced = moe.ReplacedExperts(network)
    assert relative_error(network(tokens).logits.detach(), expected.detach()) < 1e-4
    assert len(calls) == network.config.num_hidden_layers
    replaced.enable(False)
    assert torch.equal(network(tokens).logits, expected)
    assert len(calls) == network.config.num_hidden_layers


def test_can_replace_without_experts_or_with_other_dtypes_is_false(tmp_path):
    dense = AutoModelForCausalLM.from_pretrained(save("llama", tmp_path / "dense"))
    assert not moe.can_replace(dense)
    mixtral = AutoModelForCausalLM.from_pretrained(save("mixtral", tmp_path / "mixtral")).double()
    assert not moe.can_replace(mixtral)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_llm_with_replaced_experts_captures_its_steps(name, dtype, tmp_path, recwarn):
    options = {"device": "cuda", "dtype": dtype, "num_pages": 160, "page_size": 8, "max_batched_tokens": 64}
    with LLM(save(name, tmp_path), max_num_seqs=4, **options) as llm:
        done = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert llm.model.compiled
        assert llm._engine.runner.step_graphs is not None
    assert [len(each.token_ids) for each in done] == [9, 9]
    assert not [w for w in recwarn if "without CUDA graphs" in str(w.message)]
