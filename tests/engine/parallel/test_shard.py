"""The parts of a model that ranks keep, and models that are refused since they have none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from transformers import AutoModelForCausalLM

from helpers.checkpoints import CONFIGS, FURTHER_CONFIGS
from quire.engine.decoder_layers import first_layers, num_layers_of_all_kinds
from quire.engine.parallel.shard import GatheredLinear, RowwiseLinear, shard
from quire.engine.parallel.weight_shard import WeightShard
from quire.engine.weights.layouts import Matrix
from quire.engine.weights.modules import QuantizedWeight, move, replace_parameters

CPU, META = torch.device("cpu"), torch.device("meta")
CONFIGURATIONS = CONFIGS | FURTHER_CONFIGS


def network(name, **changes):
    config = CONFIGURATIONS[name]()
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def parts(name, size, **changes):
    """A network, and what each rank keeps of it."""
    whole = network(name, **changes)
    kept = []
    for rank in range(size):
        part = network(name, **changes)
        part.load_state_dict(whole.state_dict())
        shard(part, SimpleNamespace(rank=rank, size=size), "a folder", CPU)
        kept.append(part.state_dict())
    return whole.state_dict(), kept


def test_shard_of_two_ranks_are_the_whole_side_by_side():
    whole, kept = parts("llama", 2, attention_bias=True, mlp_bias=True)
    assert whole.keys() == kept[0].keys()
    for name, tensor in whole.items():
        given = [part[name] for part in kept if name in part]
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            # The sum of all ranks has the bias once.
            assert len(given) == 1
            assert torch.equal(given[0], tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(given, dim=1), tensor)
        elif "_proj" in name:
            assert torch.equal(torch.cat(given), tensor)
        elif name != "lm_head.weight":
            assert all(torch.equal(each, tensor) for each in given)
    # 97 tokens are not divisible, so that each rank has the whole head.
    assert all(torch.equal(part["lm_head.weight"], whole["lm_head.weight"]) for part in kept)


def test_shard_with_more_ranks_than_kv_heads_gives_neighbours_the_same_head():
    whole, kept = parts("llama", 4)
    keys = whole["model.layers.0.self_attn.k_proj.weight"]
    given = [part["model.layers.0.self_attn.k_proj.weight"] for part in kept]
    assert [torch.equal(each, keys[16 * head :][:16]) for each, head in zip(given, (0, 0, 1, 1), strict=True)] == [
        True
    ] * 4
    queries = [part["model.layers.0.self_attn.q_proj.weight"] for part in kept]
    assert torch.equal(torch.cat(queries), whole["model.layers.0.self_attn.q_proj.weight"])


def test_shard_of_experts_has_parts_of_both_halves_and_of_the_inputs():
    whole, kept = parts("mixtral", 2)
    gate_up, down = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    gate, up = whole[gate_up].chunk(2, dim=1)
    for rank, part in enumerate(kept):
        expected = torch.cat([gate[:, 24 * rank :][:, :24], up[:, 24 * rank :][:, :24]], dim=1)
        assert torch.equal(part[gate_up], expected)
    assert torch.equal(torch.cat([part[down] for part in kept], dim=2), whole[down])


def test_shard_of_a_model_whose_outputs_are_gathered_divides_features_and_not_heads():
    # 3 ranks have no equal parts of 4 heads, but of 192 features.
    whole, kept = parts("phi3", 3, head_dim=24)
    for name, dim in (("qkv_proj", 0), ("o_proj", 1)):
        given = [part[f"model.layers.0.self_attn.{name}.weight"] for part in kept]
        assert torch.equal(torch.cat(given, dim=dim), whole[f"model.layers.0.self_attn.{name}.weight"])


def test_shard_with_a_style_that_is_not_supported_names_it():
    part = network("llama")
    part.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "local_params"}
    with pytest.raises(ValueError, match=r'has the style "local_params" for .*q_proj, which is not'):
        shard(part, SimpleNamespace(rank=0, size=2), "a folder", CPU)


@pytest.mark.parametrize("tied", [False, True])
def test_shard_of_a_head_that_can_be_divided_leaves_the_embedding_whole(tied):
    part = network("qwen3", vocab_size=96, tie_word_embeddings=tied)
    embedding = part.get_input_embeddings().weight.clone()
    head = part.lm_head.weight.clone()
    shard(part, SimpleNamespace(rank=1, size=2), "a folder", CPU)
    assert torch.equal(part.get_input_embeddings().weight, embedding)
    assert torch.equal(part.lm_head.weight, head[48:])
    assert type(part.lm_head) is GatheredLinear
    assert type(part.model.layers[0].mlp.down_proj) is RowwiseLinear


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama", 3, "its 4 query heads are not divisible by it"),
        ("gpt-oss", 2, "Transformers has no tensor-parallel plan for GptOssForCausalLM"),
    ],
)
def test_shard_of_a_model_that_cannot_be_divided_says_why(name, size, reason):
    with pytest.raises(ValueError, match="a folder can't be run with tensor_parallel_size") as caught:
        shard(network(name), SimpleNamespace(rank=0, size=size), "a folder", CPU)
    assert reason in str(caught.value)


def test_shard_of_heads_and_features_that_do_not_divide_says_which():
    with pytest.raises(ValueError, match="its 3 heads of keys and values can neither be divided nor replicated"):
        shard(
            network("llama", num_attention_heads=12, num_key_value_heads=3),
            SimpleNamespace(rank=0, size=2),
            "a folder",
            CPU,
        )
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj: its 100 features are not"):
        shard(network("mixtral", intermediate_size=50), SimpleNamespace(rank=0, size=4), "a folder", CPU)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate_proj: its 50 features are not divisible"):
        shard(network("llama", intermediate_size=50), SimpleNamespace(rank=0, size=4), "a folder", CPU)


def test_shard_without_a_plan_says_so():
    from transformers import GPT2Config

    config = GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=10)
    with pytest.raises(ValueError, match="has no tensor-parallel plan for GPT2LMHeadModel"):
        shard(AutoModelForCausalLM.from_config(config), SimpleNamespace(rank=0, size=2), "a folder", CPU)


def meta_parts(network):
    return {name for name, param in network.named_parameters() if param.is_meta}


@pytest.mark.parametrize("tied", [False, True])
def test_shard_to_a_device_moves_what_is_divided_and_leaves_the_rest(tied):
    """The device without memory stands for one with memory of its own."""
    changes = {"vocab_size": 96, "tie_word_embeddings": tied, "attention_bias": True}
    moved, expected = network("llama", **changes), network("llama", **changes)
    left = {name for name, _ in moved.named_parameters() if "norm" in name or name.endswith("o_proj.bias")}
    if not tied:
        left.add("model.embed_tokens.weight")
    ranks = SimpleNamespace(rank=0, size=2)
    shard(moved, ranks, "a folder", META)
    shard(expected, ranks, "a folder", CPU)
    assert meta_parts(moved) == dict(expected.named_parameters()).keys() - left
    assert {name: x.shape for name, x in moved.named_parameters()} == {
        name: x.shape for name, x in expected.named_parameters()
    }


@pytest.mark.parametrize("name", ["llama", "mixtral", "phi3", "gemma3"])
def test_shard_of_a_network_without_memory_has_the_shapes_of_one_with_memory(name):
    with META:
        empty = network(name, vocab_size=96, tie_word_embeddings=False)
    expected = network(name, vocab_size=96, tie_word_embeddings=False)
    for each, device in ((empty, META), (expected, CPU)):
        shard(each, SimpleNamespace(rank=1, size=2), "a folder", device)
    shapes, own = ({key: x.shape for key, x in each.state_dict().items()} for each in (expected, empty))
    assert own == shapes
    assert [type(module) for module in empty.modules()] == [type(module) for module in expected.modules()]


def test_move_of_quantized_weights_moves_all_that_they_have():
    weight = QuantizedWeight.of(Matrix.random("int4", (64, 128), (1, 64), CPU, zeros=True), torch.float32)
    part = WeightShard.of(weight, -1, 2, 2).weight_of(1, weight, META)
    assert (part.rows, part.columns) == (64, 64)
    linear = nn.Linear(128, 64, device=META)
    linear.weight = nn.Parameter(linear.weight, requires_grad=False)
    linear.weight.quire_weight = weight
    replace_parameters(linear)
    move(linear, META)
    for moved in (part, linear.weight):
        assert {param.device for param in moved.parameters()} == {META}
        # Kernels of a device count by them, which those of the CPU do not.
        assert weight.arrivals is None
        assert moved.arrivals is not None
    assert linear.weight.scale.stride() == weight.scale.stride()


@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("llama", {}, 1),
        ("gemma2", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, 4),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
    ],
)
def test_first_layers_of_all_kinds_are_as_few_as_there_can_be(name, changes, count):
    whole = network(name, **changes)
    assert num_layers_of_all_kinds(whole) == count
    with first_layers(whole, count):
        assert len(whole.model.layers) == count
        found = whole(torch.arange(5)[None]).logits
    assert len(whole.model.layers) == 4
    whole.model.layers[count - 1].mlp.down_proj.weight.data.zero_()
    with first_layers(whole, count):
        assert not torch.equal(whole(torch.arange(5)[None]).logits, found)


def test_first_layers_of_all_kinds_reach_the_first_with_other_modules_or_shapes():
    whole = network("llama")
    layer = whole.model.layers[2].mlp
    layer.down_proj.bias = nn.Parameter(torch.zeros(32))
    assert num_layers_of_all_kinds(whole) == 3
    whole.model.layers[3].mlp.act_fn = nn.Tanh()
    assert num_layers_of_all_kinds(whole) == 4


def test_first_layers_of_a_model_without_a_list_of_them_are_refused():
    from transformers import GPT2Config

    other = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=10))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no list of decoder layers"):
        num_layers_of_all_kinds(other)
