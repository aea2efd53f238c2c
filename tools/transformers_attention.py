"""Transformers with Quire's attention and with others, on a GPU: times of attention layers, and of generated tokens.

    PYTHONPATH=src python tools/transformers_attention.py layers --json benchmarks/results/<device>-hf-layers.json
    PYTHONPATH=src python tools/transformers_attention.py generate --json benchmarks/results/<device>-hf-generate.json
    PYTHONPATH=src python tools/transformers_attention.py batch --json benchmarks/results/<device>-hf-batch.json

"layers" calls the attention functions that Transformers has by name, of eight layers with the heads of Llama-3.1-8B and
bf16, with masks by the mask functions, as a model does: `us` is the time per layer as it is called, `graph_us` that in
a CUDA graph, where the mask is made before. "generate" is `model.generate` with random weights of a named shape: the
time per token between a short and a long output; "batch" is `model.generate_batch`, continuous batching, in which the
requests' prompts have half to all of the named length. Implementations take turns; figures are medians. FlashAttention
is among them where its package is installed, and an implementation that fails has its error in place of times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

import quire.integrations.transformers  # noqa: F401  (which registers "quire")
from quire.bench.gpu import machine
from quire.bench.workloads import SHAPES, write_shape

HEADS, KV_HEADS = 32, 8
DIM, LAYERS = 128, 8
# (query tokens, keys, requests, whether rows are padded on the left to mixed lengths)
LAYER_CELLS = {
    "decode 1x1k": (1, 1024, 1, False),
    "decode 1x8k": (1, 8192, 1, False),
    "decode 1x64k": (1, 65536, 1, False),
    "decode 8x4k": (1, 4096, 8, False),
    "decode 64x1k": (1, 1024, 64, False),
    "decode 64x4k": (1, 4096, 64, False),
    "decode 64x4k padded": (1, 4096, 64, True),
    "decode 256x512 padded": (1, 512, 256, True),
    "prefill 1x1k": (1024, 1024, 1, False),
    "prefill 1x8k": (8192, 8192, 1, False),
    "prefill 1x32k": (32768, 32768, 1, False),
    "prefill 8x2k": (2048, 2048, 8, False),
    "prefill 8x2k padded": (2048, 2048, 8, True),
    "prefill 1x512@16k": (512, 16384, 1, False),
}
# (requests, tokens of a prompt, cache, whether prompts are padded)
GENERATE_CELLS = {
    f"{batch}x{length} {cache}{' padded' if is_padded else ''}": (batch, length, cache, is_padded)
    for cache in ("dynamic", "static")
    for batch, length, is_padded in ((1, 1024, False), (1, 16384, False), (16, 4096, False), (64, 1024, True))
}

# (requests, the longest prompt)
BATCH_CELLS = {f"{batch}x{length}": (batch, length) for batch, length in ((16, 1024), (64, 1024), (16, 8192))}


def implementations() -> list[str]:
    """Names of attention implementations that can be had."""
    flash = {"flash_attention_2": is_flash_attn_2_available(), "flash_attention_3": is_flash_attn_3_available()}
    return ["quire", "sdpa", *(name for name, there in flash.items() if there)]


def padding_of(batch: int, length: int, is_padded: bool) -> Tensor:
    """A mask of ones, int64 [batch, length], or of rows with a half to all of the tokens, padded on the left."""
    mask = torch.ones(batch, length, dtype=torch.int64, device="cuda")
    if is_padded:
        shortest = torch.linspace(0, length // 2, batch).int().tolist()
        for row, count in zip(mask, shortest, strict=True):
            row[:count] = 0
    return mask


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The time of a call by events of the GPU, the mean of several calls one after another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def layer_calls(name: str, cell: tuple[int, int, int, bool], tensors: list[list[Tensor]]) -> list[Callable[[], Any]]:
    """Functions that compute all layers with one implementation: with their mask, and with a mask made before."""
    q_len, length, batch, is_padded = cell
    padding = padding_of(batch, length, is_padded).bool()
    config = SimpleNamespace(_attn_implementation=name, num_key_value_heads=KV_HEADS, sliding_window=None)
    module = SimpleNamespace(
        layer_idx=0, is_causal=True, num_key_value_groups=HEADS // KV_HEADS, config=config, training=False
    )
    attend, make = ALL_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS[name]
    options = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "config": config, "attention_mask": padding}

    def mask() -> Any:
        offsets = {"q_offset": length - q_len, "kv_offset": 0}
        return make(batch, q_len, length, mask_function=causal_mask_function, **offsets, **options)

    def layers(given: Any) -> None:
        for q, k, v in tensors:
            attend(module, q, k, v, given, dropout=0.0, scaling=DIM**-0.5)

    made = mask()
    return [lambda: layers(mask()), lambda: layers(made)]


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Replays of a CUDA graph of a call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()

    def replay(reads: Any = call) -> None:
        """The graph reads tensors of the call, such as its mask, which live as long as the call does."""
        graph.replay()

    return replay


def each(names: list[str], prepare: Callable[[str], dict[str, Callable[[], float]]], rounds: int) -> dict[str, Any]:
    """Medians of the timings that `prepare` returns for each implementation, which take turns; or its error."""
    timings: dict[str, dict[str, Callable[[], float]]] = {}
    found: dict[str, Any] = {}
    for name in names:
        try:
            timings[name] = prepare(name)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    taken: dict[str, dict[str, list[float]]] = {name: {key: [] for key in timings[name]} for name in timings}
    for _ in range(rounds):
        for name, calls in timings.items():
            for key, call in calls.items():
                taken[name][key].append(call())
    medians = {name: {key: median(times) for key, times in of.items()} for name, of in taken.items()}
    return {name: (found | medians)[name] for name in names}


def bench_layers(cell: tuple[int, int, int, bool], names: list[str]) -> dict[str, Any]:
    """Microseconds per layer of each implementation."""
    q_len, length, batch, _ = cell
    shapes = ((batch, q_len, HEADS, DIM), (batch, KV_HEADS, length, DIM), (batch, KV_HEADS, length, DIM))
    tensors = [[torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in shapes] for _ in range(LAYERS)]
    for layer in tensors:
        # The output of a projection has this layout.
        layer[0] = layer[0].transpose(1, 2)

    def prepare(name: str) -> dict[str, Callable[[], float]]:
        call, without_mask = layer_calls(name, cell, tensors)
        for _ in range(3):
            call()
        repeats = max(2, min(50, int(200 / milliseconds(call, 2))))
        timings = {"us": lambda: milliseconds(call, repeats) * 1e3 / LAYERS}
        try:
            replay = captured(without_mask)
        except RuntimeError as error:  # FlashAttention with padding waits for the device
            print(f"{name} is not captured: {error}", flush=True)
        else:
            timings["graph_us"] = lambda: milliseconds(replay, repeats) * 1e3 / LAYERS
        return timings

    return each(names, prepare, rounds=5)


def bench_generate(cell: tuple[int, int, str, bool], names: list[str], model: Any) -> dict[str, Any]:
    """Milliseconds per token of each implementation."""
    batch, length, cache, is_padded = cell
    mask, short = padding_of(batch, length, is_padded), 4
    long = 36
    tokens = torch.randint(1, model.config.vocab_size, (batch, length), device="cuda")
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}

    def generate(name: str, count: int) -> float:
        if model.config._attn_implementation != name:
            model.set_attn_implementation(name)
        options["max_new_tokens"] = options["min_new_tokens"] = count
        # A static cache has one size, so that decode steps are compiled once.
        if cache == "static":
            given = transformers.StaticCache(config=model.config, max_cache_len=length + long)
        else:
            given = transformers.DynamicCache(config=model.config)
        return milliseconds(lambda: model.generate(tokens, past_key_values=given, **options), 1)

    torch.compiler.reset()

    def prepare(name: str) -> dict[str, Callable[[], float]]:
        generate(name, long)
        return {"ms": lambda: (generate(name, long) - generate(name, short)) / (long - short)}

    return each(names, prepare, rounds=3)


def bench_batch(cell: tuple[int, int], names: list[str], model: Any) -> dict[str, Any]:
    """Milliseconds per step of each implementation in continuous batching."""
    batch, longest = cell
    lengths = torch.linspace(longest // 2, longest, batch).int().tolist()
    prompts = [torch.randint(1, model.config.vocab_size, (length,)).tolist() for length in lengths]
    short, long = 4, 68

    def generate(name: str, count: int) -> float:
        if model.config._attn_implementation != name:
            model.set_attn_implementation(name)
        config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        found = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        torch.cuda.synchronize()
        errors = {output.error for output in found.values() if output.error}
        if errors or len(found) != batch:
            raise RuntimeError(f"{len(found)} of {batch} requests ended, with errors {errors}")
        return (time.perf_counter() - start) * 1e3

    def prepare(name: str) -> dict[str, Callable[[], float]]:
        generate(name, short)
        return {"ms": lambda: (generate(name, long) - generate(name, short)) / (long - short)}

    return each(names, prepare, rounds=3)


def main() -> None:
    """Time what was asked for, and print a line for each cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["layers", "generate", "batch"])
    parser.add_argument("--cells", help="of these names only, separated by commas")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of the model")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known: dict[str, dict[str, Any]] = {"layers": LAYER_CELLS, "generate": GENERATE_CELLS, "batch": BATCH_CELLS}
    cells = known[args.what]
    chosen = args.cells.split(",") if args.cells else list(cells)
    names, rows = implementations(), []
    result = {**machine(), "transformers": transformers.__version__, "operation": f"transformers {args.what}"}
    if args.what != "layers":
        result |= {"shape": args.shape, "layers": args.layers}
        model = random_model(args.shape, args.layers)
    with torch.no_grad():
        for cell in chosen:
            if args.what == "layers":
                found = bench_layers(cells[cell], names)
            elif args.what == "generate":
                found = bench_generate(cells[cell], names, model)
            else:
                found = bench_batch(cells[cell], names, model)
            rows.append({"cell": cell, **found})
            print(cell, json.dumps(found), flush=True)
            torch.cuda.empty_cache()
    if args.json is not None:
        args.json.write_text(json.dumps({**result, "runs": rows}, indent=2) + "\n")


def random_model(shape: str, layers: int) -> Any:
    """A model of a shape with so many layers and random weights, in bf16 on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder))
        config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = layers
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="quire").eval()


if __name__ == "__main__":
    main()
