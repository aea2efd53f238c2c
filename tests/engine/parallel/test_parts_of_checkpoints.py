"""Checkpoints of which each rank brings its own part alone to its device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Phi3Config

from helpers import quantized
from helpers.checkpoints import change_config, save
from helpers.ranks import in_threads, thread_ranks
from quire.engine import load
from quire.engine.config import EngineConfig
from quire.engine.model import Model
from quire.engine.weights.modules import QuantizedWeight

CPU, META = torch.device("cpu"), torch.device("meta")
SIZE = 2


def loaded(folder, device, monkeypatch, **options):
    """The models of all ranks on a device before their attention is looked for, and where `load_network` was to put
    the weights. The device without memory computes no logits.
    """
    asked = []

    def spy(folder, config, device, *args):
        asked.append(device)
        return network_of(folder, config, device, *args)

    network_of = load.load_network
    monkeypatch.setattr(load, "load_network", spy)
    monkeypatch.setattr(load, "_find_layers", lambda model: [])
    if device == META:
        monkeypatch.setattr(Model, "transformers_logits", lambda self, tokens: tokens.float())
        monkeypatch.setattr(load, "logits_differ", lambda *args, **options: False)
    config, ranks = EngineConfig(tensor_parallel_size=SIZE, **options), thread_ranks(SIZE)
    models = in_threads(SIZE, lambda rank: load.load_model(folder, device, config, ranks[rank]))
    return models, asked


@pytest.mark.parametrize("tied", [False, True])
def test_load_model_of_ranks_reads_on_the_cpu_and_moves_parts_to_the_device(tied, tmp_path, monkeypatch):
    """The device without memory stands for one with memory of its own."""
    folder = save("llama", tmp_path, vocab_size=96, tie_word_embeddings=tied)
    models, asked = loaded(folder, META, monkeypatch, dtype="bfloat16")
    assert asked == [CPU] * SIZE
    expected, _ = loaded(folder, CPU, monkeypatch, dtype="bfloat16")
    for model, other in zip(models, expected, strict=True):
        assert model.device == META
        assert {x.device for x in (*model.network.parameters(), *model.network.buffers())} == {META}
        assert {key: (x.shape, x.dtype) for key, x in model.network.state_dict().items()} == {
            key: (x.shape, x.dtype) for key, x in other.network.state_dict().items()
        }


@pytest.mark.parametrize(("device", "dtype"), [(META, torch.float16), (CPU, torch.float32)])
def test_load_model_of_ranks_without_a_dtype_takes_that_of_the_device(device, dtype, tmp_path, monkeypatch):
    folder = change_config(save("llama", tmp_path), dtype="float16")
    models, _ = loaded(folder, device, monkeypatch)
    assert {model.dtype for model in models} == {dtype}


@pytest.mark.parametrize(("model", "name"), [("llama", "fp8 block"), ("llama", "awq"), ("mixtral", "awq")])
def test_load_model_of_ranks_moves_parts_that_stay_quantized(model, name, tmp_path, request, monkeypatch):
    folder, _ = quantized.quantize(request.getfixturevalue(model), tmp_path, name)
    models, _ = loaded(folder, META, monkeypatch, dequantize=False)
    for loaded_model in models:
        weights = [module for module in loaded_model.network.modules() if isinstance(module, QuantizedWeight)]
        assert weights
        assert {param.device for param in loaded_model.network.parameters()} == {META}
        assert all(weight.arrivals is not None for weight in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_model_of_ranks_with_a_plan_that_does_not_fit_is_refused(dtype, tmp_path, monkeypatch):
    """Each rank would have half of the outputs of a gate and its input, which are one product, as if they were both."""
    plan = Phi3Config().base_model_tp_plan
    changes = {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    folder = change_config(save("phi3", tmp_path), base_model_tp_plan=plan)
    loaded(folder, CPU, monkeypatch, dtype=dtype)
    change_config(folder, base_model_tp_plan=plan | changes)
    with pytest.raises(ValueError, match=r"can't be run with tensor_parallel_size = 2: .* it has other logits than as"):
        loaded(folder, CPU, monkeypatch, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "attempts"), [("mixtral", "bfloat16", 3), ("mixtral", "float32", 1), ("llama", "bfloat16", 1)]
)
def test_load_model_of_ranks_is_refused_if_all_attempts_differ(name, dtype, attempts, tmp_path, monkeypatch):
    """Experts may be others for some tokens, up to rounding to 16 bits."""
    folder = save(name, tmp_path)

    def differ(logits, expected, exact, rounding):
        assert (exact, rounding) == (dtype == "float32", 0.05)
        own = logits.flatten()[:3].tolist()
        found.append(own)
        return own != accepted

    found, accepted = [], None
    monkeypatch.setattr(load, "logits_differ", differ)
    with pytest.raises(ValueError, match="has other logits than as a whole"):
        loaded(folder, CPU, monkeypatch, dtype=dtype)
    assert len(found) == SIZE * attempts
    assert len({tuple(each) for each in found}) == attempts
    accepted = found[-1]
    loaded(folder, CPU, monkeypatch, dtype=dtype)
