"""Products of one or a few rows and a matrix on a GPU, beside cuBLAS and the time that reading the matrix takes.

    PYTHONPATH=src python tools/skinny_products.py --json out.json
    PYTHONPATH=src python tools/skinny_products.py --tune --rows 8 --json tune.json

The shapes are those of layers of Qwen3-0.6B and Llama-3.1-8B, in bfloat16. Times are of CUDA graphs over several
matrices, together larger than the L2 cache, whose launches overlap as in a decode step. `--tune` times other constants
of the kernel for a few rows beside the chosen ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.bench import gpu
from quire.bench.batches import relative_error
from quire.kernels.skinny_gemm import skinny_gemm
from quire.kernels.triton import skinny_gemm as kernels

# Of each layer of a model, the rows and the columns of the matrix.
SHAPES = {
    "Qwen3-0.6B qkv": (4096, 1024),
    "Qwen3-0.6B o": (1024, 2048),
    "Qwen3-0.6B gate_up": (6144, 1024),
    "Qwen3-0.6B down": (1024, 3072),
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B o": (4096, 4096),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B down": (4096, 14336),
}
# Parts, elements of a part, rows of a program and warps.
CANDIDATES = ((4, 128, 16, 4), (4, 256, 16, 4), (4, 64, 16, 4), (4, 128, 32, 4), (8, 128, 16, 8), (8, 64, 32, 8))


def tuned(x: Tensor, weight: Tensor, c: kernels.SkinnyConfig) -> Tensor:
    """The product by the kernel for a few rows, with given constants."""
    out = x.new_empty(len(x), len(weight))
    grid = (-(-len(weight) // c.rows), 1)
    kernels._launch_few(grid, (x, weight, None, out), (len(x), len(weight)), (weight.stride(0),), c)
    return out


def measure(shape: str, num_rows: int, rounds: int, tune: bool, ceilings: dict[str, float]) -> dict[str, Any]:
    """Microseconds and errors of all products of a shape."""
    size = SHAPES[shape]
    num_bytes = 2 * size[0] * size[1]
    count = max(2, -(-4 * torch.cuda.get_device_properties("cuda").L2_cache_size // num_bytes))
    weights = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(num_rows, size[1], device="cuda", dtype=torch.bfloat16)
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cublas": F.linear}
    products["quire"] = partial(skinny_gemm, bias=None)
    if tune:
        c = kernels.skinny_config(size[1], size[0], num_rows, x.device)
        for parts, block, rows, warps in CANDIDATES:
            other = replace(c, parts=parts, block=block, rows=rows, num_warps=warps)
            products[f"{parts}x{block} {rows} rows {warps} warps"] = partial(tuned, c=other)
    exact = x.double() @ weights[0].double().T
    cell: dict[str, Any] = {"shape": shape, "rows": num_rows, "floor_us": num_bytes / ceilings["read_gb_s"] / 1e3}
    cell["error"] = relative_error(products["quire"](x, weights[0]).cpu(), exact.cpu())
    replays = [gpu.captured([partial(product, x, weight) for weight in weights]) for product in products.values()]
    for name, seconds in zip(products, gpu.seconds_in_turns(replays, rounds), strict=True):
        cell[name] = seconds * 1e6
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 2, 4, 8, 16))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    ceilings = gpu.ceilings()
    result: dict[str, Any] = {**gpu.machine(), "operation": "skinny", "seed": 0, "ceilings": ceilings, "cells": []}
    for shape in args.shapes:
        for num_rows in args.rows:
            cell = measure(shape, num_rows, args.rounds, args.tune, ceilings)
            print(
                {key: round(value, 4) if isinstance(value, float) else value for key, value in cell.items()}, flush=True
            )
            result["cells"].append(cell)
            with open(args.json, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
