"""`EngineConfig`: its checks, and the flags that follow from it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

pytest.importorskip("transformers")

from quire.cli.arguments import parser
from quire.cli.loading import engine_config
from quire.engine import LLM, EngineConfig

COMMANDS = {"generate": [], "chat": [], "serve": [], "calibrate": ["scales"]}
# A value of each field that is not its default, and the words of a command line that give it.
VALUES = {
    "revision": ("v1.0", ["--revision", "v1.0"]),
    "device": ("cuda:1", ["--device", "cuda:1"]),
    "dtype": ("bfloat16", ["--dtype", "bfloat16"]),
    "backend": ("reference", ["--backend", "reference"]),
    "max_model_len": (99, ["--max-model-len", "99"]),
    "page_size": (8, ["--page-size", "8"]),
    "num_pages": (77, ["--num-pages", "77"]),
    "max_num_seqs": (5, ["--max-num-seqs", "5"]),
    "max_batched_tokens": (640, ["--max-batched-tokens", "640"]),
    "speculative_tokens": (3, ["--speculative-tokens", "3"]),
    "batch_invariant": (True, ["--batch-invariant"]),
    "trust_remote_code": (True, ["--trust-remote-code"]),
    "compile": (False, ["--compile", "false"]),
    "load_format": ("dummy", ["--load-format", "dummy"]),
    "dequantize": (True, ["--dequantize", "true"]),
    "cuda_graphs": (False, ["--no-cuda-graphs"]),
    "gpu_memory_utilization": (0.5, ["--gpu-memory-utilization", "0.5"]),
    "kv_cache_dtype": ("fp8", ["--kv-cache-dtype", "fp8"]),
    "kv_cache_scales": (None, []),
    "max_adapters": (4, ["--max-adapters", "4"]),
    "adapter_rank_pages": (12, ["--adapter-rank-pages", "12"]),
    "max_adapter_rank": (64, ["--max-adapter-rank", "64"]),
    "tensor_parallel_size": (2, ["--tensor-parallel-size", "2"]),
    # It can't be combined with the one before.
    "context_parallel_size": (1, []),
    "tensor_parallel_timeout": (4.5, ["--tensor-parallel-timeout", "4.5"]),
    "pooling": ("mean", ["--pooling", "mean"]),
}


def test_values_of_this_test_cover_every_field():
    assert list(VALUES) == [f.name for f in fields(EngineConfig)]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_without_flags_has_the_defaults(command):
    assert engine_config(parser().parse_args([command, *COMMANDS[command]])) == EngineConfig()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_with_all_flags_has_their_values(command):
    words = [word for _, given in VALUES.values() for word in given]
    found = engine_config(parser().parse_args([command, *COMMANDS[command], *words]))
    assert found == EngineConfig(**{name: value for name, (value, _) in VALUES.items()})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_with_a_divided_cache_has_the_number_of_ranks(command):
    words = [command, *COMMANDS[command], "--context-parallel-size", "3"]
    assert engine_config(parser().parse_args(words)) == EngineConfig(context_parallel_size=3)


def test_command_with_scales_has_their_file(tmp_path):
    file = tmp_path / "scales.safetensors"
    file.touch()
    words = ["serve", "--kv-cache-dtype", "fp8", "--kv-cache-scales", str(file)]
    assert engine_config(parser().parse_args(words)).kv_cache_scales == file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size = 0: it must be a positive integer"),
        ({"num_pages": 2.5}, r"num_pages = 2\.5: it must be a positive integer"),
        ({"max_num_seqs": True}, "max_num_seqs = True: it must be a positive integer"),
        ({"speculative_tokens": -1}, "speculative_tokens = -1: it must be an integer, 0 or larger"),
        ({"max_adapters": -2}, "max_adapters = -2: it must be an integer, 0 or larger"),
        ({"adapter_rank_pages": 0}, "adapter_rank_pages = 0: it must be a positive integer"),
        ({"max_adapter_rank": 0}, "max_adapter_rank = 0: it must be a positive integer"),
        ({"max_adapter_rank": 257}, "max_adapter_rank = 257: 256 is the largest"),
        ({"compile": "yes"}, "compile = 'yes': it must be True, False or 'auto'"),
        ({"load_format": "gguf"}, "load_format = 'gguf': it must be 'auto' or 'dummy'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype = 'int4' is not known"),
        ({"kv_cache_scales": "x"}, "kv_cache_scales = 'x': only an fp8 cache"),
    ],
)
def test_config_with_an_invalid_value_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_config_with_missing_scales_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"kv_cache_scales = .*: there is no such file"):
        EngineConfig(kv_cache_dtype="fp8", kv_cache_scales=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "device", "tokens", "backend"),
    [
        ({}, "cpu", 2048, "auto"),
        ({}, "cuda", 8192, "auto"),
        ({"max_batched_tokens": 7}, "cuda", 7, "auto"),
        ({"batch_invariant": True}, "cpu", 64, "auto"),
        ({"batch_invariant": True}, "cuda", 256, "triton"),
        ({"batch_invariant": True, "max_num_seqs": 300}, "cuda", 300, "triton"),
    ],
)
def test_config_on_a_device_has_its_sizes(options, device, tokens, backend):
    found = EngineConfig(**options).on(torch.device(device))
    assert (found.max_batched_tokens, found.backend) == (tokens, backend)
    assert found.device == torch.device(device)


def test_llm_with_a_config_and_options_takes_both():
    with LLM(config=EngineConfig(page_size=4, num_pages=70), num_pages=60) as llm:
        assert (llm.config.page_size, llm.config.num_pages, llm.num_pages) == (4, 60, 60)


def test_llm_with_an_unknown_option_raises():
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(max_seqs=4)
