"""Loading the weights of a checkpoint: to a device as they are read, and the tool that measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from transformers import core_model_loading

from helpers.checkpoints import save
from helpers.paths import ROOT
from quire.engine.checkpoint import load_network, read_config
from quire.engine.transformers_internals import READERS, reading_to

META = torch.device("meta")


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt-oss"])
def test_load_network_to_a_device_puts_each_parameter_there(name, tmp_path):
    """Merged experts and cast weights, too. The device without memory stands for one with memory of its own."""
    folder = save(name, tmp_path)
    network = load_network(folder, read_config(folder, False), META, torch.bfloat16, False, False)
    assert {param.device for param in network.parameters()} == {META}
    assert {param.dtype for param in network.parameters()} <= {torch.bfloat16, torch.float32}


def replaced():
    """What `reading_to` replaces."""
    return core_model_loading.get_device, core_model_loading.spawn_materialize, core_model_loading.GLOBAL_WORKERS


def cast(dtype):
    """The dtype of a tensor that Transformers reads as bfloat16."""
    return core_model_loading.spawn_materialize(None, torch.zeros(3).to(dtype), None, torch.bfloat16)().dtype


def in_another_thread(function, *args):
    with ThreadPoolExecutor() as pool:
        return pool.submit(function, *args).result()


def test_reading_to_a_device_is_of_its_thread_and_its_context_alone():
    before = replaced()
    with reading_to(META):
        assert core_model_loading.get_device(None, "a.weight") == META
        assert core_model_loading.GLOBAL_WORKERS == READERS
        assert in_another_thread(core_model_loading.get_device, {"": "cpu"}, "a.weight") == "cpu"
    assert replaced() == before


def test_reading_on_the_cpu_leaves_fp8_as_it_is_in_its_thread_alone():
    before = replaced()
    with reading_to(torch.device("cpu")):
        assert (core_model_loading.get_device, core_model_loading.GLOBAL_WORKERS) == (before[0], before[2])
        assert cast(torch.float8_e4m3fn) == torch.float8_e4m3fn
        assert cast(torch.float32) == torch.bfloat16
        assert in_another_thread(cast, torch.float8_e4m3fn) == torch.bfloat16
    assert replaced() == before


def measured(tmp_path, *arguments):
    command = [sys.executable, str(ROOT / "tools" / "load_weights.py"), "--rounds", "1", *arguments]
    file = tmp_path / "result.json"
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_load_weights_on_the_cpu_takes_no_memory_beside_the_mapped_files(tmp_path):
    result = measured(tmp_path, "--gib", "0.5", "--device", "cpu")
    assert result["shards"] in (3, 4)
    assert result["runs"][0]["private"] < 0.5
    assert result["runs"][0]["mapped"] <= 4.2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_load_weights_on_a_gpu_takes_less_than_two_shards_of_the_host(kind, tmp_path):
    result = measured(tmp_path, "--kind", kind, "--gib", "4", "--device", "cuda")
    assert result["runs"][0]["private"] < 2
