"""Products of adapters beside the products of the layers that they belong to, and the time that their bytes take.

    PYTHONPATH=src python tools/lora_products.py --json out.json
    PYTHONPATH=src python tools/lora_products.py --device cpu --models tiny --rows 1 8 --rounds 3 --json out.json

On a GPU, times are of CUDA graphs over several layers, together larger than the L2 cache, in bfloat16; on the CPU, in
float32. "base" is the layer's product alone, "with" the product and `add_lora`. Rows take turns among the adapters. The
floor is that of what `add_lora` has to read and write, its rows of x and y included, at the rate at which memory is
read. A line for each product, and one for a layer of the model with all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.bench import cpu, gpu
from quire.steps import RANK_PAGE, add_lora, group_by_slot, product

# Of each model's products, the output features of the merged layers and the input features.
MODELS = {
    "llama-8b": {
        "qkv": ((4096, 1024, 1024), 4096),
        "o": ((4096,), 4096),
        "gate_up": ((14336, 14336), 4096),
        "down": ((4096,), 14336),
    },
    "qwen3-0.6b": {
        "qkv": ((2048, 1024, 1024), 1024),
        "o": ((1024,), 2048),
        "gate_up": ((3072, 3072), 1024),
        "down": ((1024,), 3072),
    },
    "tiny": {"qkv": ((64, 32, 32), 96), "down": ((96,), 192)},
}
ROWS = (1, 8, 64, 8192)
ADAPTERS = (1, 8, 64)
RANKS = (16, 64)
Row = dict[str, Any]


@dataclass
class Layer:
    """The weight of merged layers, and the pools of their adapters."""

    weight: Tensor
    a: Tensor
    b: Tensor
    part_ends: list[int]

    def base(self, x: Tensor) -> Tensor:
        """The layers' product."""
        return product(x, self.weight)

    def with_adapters(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """The layers' product, and those of the rows' adapters."""
        y = product(x, self.weight)
        add_lora(y, x, self.a, self.b, self.part_ends, *tables)
        return y


def num_bytes(*tensors: Tensor) -> int:
    """The bytes of tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def make(widths: Sequence[int], in_features: int, num_pages: int, x: Tensor) -> Layer:
    """Random layers, and adapters in so many pages, of the dtype and on the device of x."""
    out_features = sum(widths)
    shapes = (out_features, in_features), (num_pages, len(widths), RANK_PAGE, in_features)
    weight, a = (x.new_empty(shape).normal_(std=in_features**-0.5) for shape in shapes)
    b = x.new_empty(num_pages, RANK_PAGE, out_features).normal_()
    return Layer(weight, a, b, list(itertools.accumulate(widths)))


def make_tables(rows: int, adapters: int, rank: int, device: str) -> tuple[Tensor, ...]:
    """The tables of `add_lora`, for rows that take turns among adapters."""
    slots = torch.arange(rows, dtype=torch.int32, device=device) % adapters
    pages = -(-rank // RANK_PAGE)
    rank_pages = torch.randperm(adapters * pages).int().view(adapters, pages).to(device)
    return *group_by_slot(slots, adapters), rank_pages, torch.full_like(rank_pages[:, 0], pages)


def seconds(runs: Sequence[Sequence[Callable[[], Any]]], rounds: int, device: str) -> list[float]:
    """Seconds per call of each series of calls."""
    if device == "cpu":
        return cpu.medians([series[0] for series in runs], rounds)
    return gpu.seconds_in_turns([gpu.captured(series) for series in runs], rounds)


def measure(
    widths: Sequence[int], in_features: int, cell: tuple[int, int, int], rounds: int, read_gb_s: float, device: str
) -> Row:
    """Times of one product, alone and with adapters, and the floor of what is added, in microseconds.

    Args:
        cell: rows, adapters and their rank.
    """
    rows, adapters, rank = cell
    x = torch.randn(rows, in_features, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    tables = make_tables(rows, adapters, rank, device)
    make_layer = partial(make, widths, in_features, adapters * -(-rank // RANK_PAGE), x)
    first = make_layer()
    copies = 1
    if device == "cuda":
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        copies = max(2, -(-4 * l2 // num_bytes(first.weight)))
    layers = [first, *(make_layer() for _ in range(copies - 1))]
    runs = [partial(layer.base, x) for layer in layers], [partial(layer.with_adapters, x, tables) for layer in layers]
    base, added = seconds(runs, rounds, device)
    y = first.base(x)
    least = num_bytes(first.a, first.b, x, y, y) / read_gb_s / 1e9
    return {"base_us": base * 1e6, "with_us": added * 1e6, "floor_us": least * 1e6}


def show(model: str, name: str, cell: tuple[int, int, int], times: Row) -> None:
    """Print the times of a product or of a layer."""
    added = times["with_us"] - times["base_us"]
    print(
        f"{model} {name}: {cell[0]} rows, {cell[1]} adapters of rank {cell[2]}: base {times['base_us']:.1f} us,"
        f" with {times['with_us']:.1f} ({times['with_us'] / times['base_us']:.3f}), added {added:.1f},"
        f" floor {times['floor_us']:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-8b", "qwen3-0.6b"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--adapters", nargs="+", type=int, default=ADAPTERS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    module = cpu if args.device == "cpu" else gpu
    ceilings = module.ceilings()
    result: Row = {**module.machine(), "operation": "lora", "seed": 0, "ceilings": ceilings, "cells": []}
    for model, rows, adapters, rank in itertools.product(args.models, args.rows, args.adapters, args.ranks):
        if adapters > rows:
            continue
        cell, total = (rows, adapters, rank), dict.fromkeys(("base_us", "with_us", "floor_us"), 0.0)
        for name, (widths, in_features) in MODELS[model].items():
            times = measure(widths, in_features, cell, args.rounds, ceilings["read_gb_s"], args.device)
            total = {key: total[key] + times[key] for key in total}
            show(model, name, cell, times)
            names = {"model": model, "product": name, "rows": rows, "adapters": adapters, "rank": rank}
            result["cells"].append({**names, **times})
            if args.device == "cuda":
                torch.cuda.empty_cache()
        show(model, "layer", cell, total)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
