"""Random weights of which each rank makes its own part alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from helpers import quantized
from helpers.checkpoints import save
from helpers.ranks import in_threads, thread_ranks
from quire.engine.checkpoint import load_network, read_config
from quire.engine.moe import ReplacedExperts, can_replace
from quire.engine.parallel.shard import GatheredLinear, RowwiseLinear, shard
from quire.engine.weights.modules import QuantizedLinear, QuantizedWeight

CPU = torch.device("cpu")
SIZE = 2


def random_networks(folder, ranks, dequantize=True):
    """The network of each of these ranks, which are given the same seed; None is one process alone."""
    networks = []
    for each in ranks:
        torch.manual_seed(5)
        config = read_config(folder, False)
        networks.append(load_network(folder, config, CPU, torch.float32, True, False, dequantize, each).eval())
    return networks


def logits(networks):
    """Those that each rank computes of the same tokens."""

    @torch.inference_mode()
    def compute(rank):
        networks[rank].set_attn_implementation("eager")
        return networks[rank](torch.arange(3, 12)[None], use_cache=False).logits

    return in_threads(SIZE, compute)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("gemma3", {"tie_word_embeddings": True}),
        ("mixtral", {}),
        ("phi3", {}),
    ],
)
def test_random_parts_are_those_of_one_model(name, changes, tmp_path):
    folder = save(name, tmp_path, vocab_size=96, **changes)
    ranks = thread_ranks(SIZE)
    networks = random_networks(folder, ranks)
    (whole,) = random_networks(folder, [None])
    for each, network in zip(ranks, networks, strict=True):
        (expected,) = random_networks(folder, [None])
        shard(expected, each, "a folder", CPU)
        own, parts = network.state_dict(), expected.state_dict()
        assert {key: x.shape for key, x in own.items()} == {key: x.shape for key, x in parts.items()}
        # What is not divided is equal in all ranks.
        replicated = [key for key, x in whole.state_dict().items() if x.shape == parts.get(key, x[..., :0]).shape]
        assert "model.embed_tokens.weight" in replicated
        assert all(torch.equal(own[key], networks[0].state_dict()[key]) for key in replicated)
        buffers = dict(whole.named_buffers())
        assert buffers
        assert all(torch.equal(buffer, buffers[key]) for key, buffer in network.named_buffers())
    first, second = logits(networks)
    assert first.shape == (1, 9, 96)
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_random_part_of_a_head_is_memory_of_the_embedding_if_the_weights_are_tied(tmp_path):
    folder = save("qwen3", tmp_path, vocab_size=96, tie_word_embeddings=True)
    for rank, network in enumerate(random_networks(folder, thread_ranks(SIZE))):
        head, embedding = network.lm_head.weight, network.model.embed_tokens.weight
        assert type(network.lm_head) is GatheredLinear
        assert head.data_ptr() == embedding[48 * rank :].data_ptr()
        assert head.shape == (48, 32)


def test_random_parts_of_a_head_that_is_not_divided_stay_tied(tmp_path):
    folder = save("qwen3", tmp_path, tie_word_embeddings=True)
    (network, _) = random_networks(folder, thread_ranks(SIZE))
    assert network.lm_head.weight is network.model.embed_tokens.weight


@pytest.mark.parametrize(("model", "name"), [("llama", "fp8 block"), ("llama", "awq"), ("mixtral", "fp8 block")])
def test_random_parts_stay_quantized_where_those_of_a_checkpoint_do(model, name, tmp_path, request):
    folder, _ = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    networks = random_networks(folder, thread_ranks(SIZE), dequantize=False)
    layer = networks[0].model.layers[0]
    attention = layer.self_attn
    assert type(attention.q_proj) is QuantizedLinear
    assert type(attention.o_proj) is RowwiseLinear
    found = {attention.q_proj.weight: (128, 128), attention.o_proj.weight: (128, 128)}
    if model == "mixtral":
        found[layer.mlp.experts.down_proj] = (128, 128)
    for weight, shape in found.items():
        assert isinstance(weight, QuantizedWeight)
        assert (weight.rows, weight.columns) == shape
    for network in networks:
        if can_replace(network):
            ReplacedExperts(network)
    first, second = logits(networks)
    assert torch.equal(first, second)


def test_random_parts_of_a_model_that_cannot_be_divided_are_refused(tmp_path):
    folder = save("gpt-oss", tmp_path)
    with pytest.raises(ValueError, match=f"{folder} can't be run with tensor_parallel_size = 2: .*no tensor-parallel"):
        random_networks(folder, thread_ranks(SIZE))
