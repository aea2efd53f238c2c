"""Products with quantized weights, on a GPU beside those of torch and gemlite and the time that the bytes take.

    PYTHONPATH=src python tools/quantized_products.py --json out.json
    PYTHONPATH=src python tools/quantized_products.py --device cpu --shapes o --rows 1 64 --json out.json
    PYTHONPATH=src python tools/quantized_products.py --tune --layouts int4 --rows 1 8 --json tune.json

The shapes are those of Llama-3.1-8B; weights are quantized from normal numbers. On a GPU, times are of CUDA graphs
over several weights, together larger than the L2 cache, and include the rounding of activations where a product needs
it. The floor is that of the weight's bytes at the rate at which memory is read. On the CPU, "quire" is the product
with the weight that was dequantized to float32 when it was loaded, and "kept" the one with the weight as it is.
`--tune` times constants of the kernel for few rows; processes compile them beforehand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.bench import cpu, gpu
from quire.kernels import code_product as products
from quire.kernels.triton import code_launch as launches
from quire.kernels.triton.code_product import CodeConfig

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
# Of each layout, its kind, and the rows and columns of a block; 0: all columns.
LAYOUTS = {
    "fp8": ("fp8", 1, 0),
    "fp8 block": ("fp8", 128, 128),
    "int4": ("int4", 1, 128),
    "mxfp4": ("mxfp4", 1, 32),
    "int8": ("int8", 1, 0),
}
ROWS = (1, 8, 64, 256, 8192)
Row = dict[str, Any]


@dataclass
class Weight:
    """A random quantized weight on the GPU."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    arrivals: Tensor
    kind: str
    block: tuple[int, int]
    # Of the weight, relative to the numbers that were quantized.
    error: float

    @property
    def num_bytes(self) -> int:
        """The bytes that a product must read."""
        return sum(x.numel() * x.element_size() for x in (self.codes, self.scale, self.zero) if x is not None)

    def product(self, x: Tensor) -> Tensor:
        """The product as the engine computes it."""
        return products.code_product(x, self.codes, self.scale, self.zero, None, self.arrivals, self.kind, *self.block)

    def launch(self, x: Tensor, c: CodeConfig) -> Tensor:
        """The product by the kernel for few rows, with given constants."""
        out = x.new_empty(len(x), self.codes.shape[1 if self.kind in products.PACKED else 0])
        launches.launch(out, x, self.codes, self.scale, self.zero, None, self.arrivals, c)
        return out

    def dequantized(self, columns: int) -> Tensor:
        """The weight in float32."""
        codes, scale = products.unpacked(self.codes, self.scale, self.kind, columns)
        return products.dequantize(codes, scale, self.zero, self.kind, self.block, torch.float32)


def make(layout: str, rows: int, columns: int, device: str = "cuda") -> Weight:
    """A weight of a layout, quantized from normal numbers."""
    kind, block_rows, block_columns = LAYOUTS[layout]
    block = block_rows, block_columns or columns
    dense = torch.randn(rows, columns, device=device)
    codes, scale, zero = quantize(dense.view(rows // block[0], block[0], -1, block[1]), kind)
    codes = codes.view(rows, columns)
    found = products.dequantize(codes, scale, zero, kind, block, torch.float32)
    error = float((found - dense).norm() / dense.norm())
    codes = products.pack_words(codes) if kind in products.PACKED else codes
    scale = products.pack_exponents(scale) if kind == "mxfp4" else scale
    if block_rows == 1:
        scale, zero = scale.T.contiguous().T, None if zero is None else zero.T.contiguous().T
    arrivals = torch.zeros(1 << 14, dtype=torch.int32, device=device)
    return Weight(codes, scale, zero, arrivals, kind, block, error)


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales [block rows, block columns] and, for int4, zero points of blocks [block rows, rows, block columns,
    columns], each scaled by its extremes.
    """
    low, high = x.amin((1, 3)).clamp(max=0), x.amax((1, 3)).clamp(min=0)
    largest = torch.maximum(-low, high)
    if kind == "mxfp4":
        exponent = largest.log2().floor().sub(2)
        size = (x * exponent.neg().exp2()[:, None, :, None]).abs()
        edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
        codes = torch.bucketize(size, edges).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
        return codes, exponent.add(127).to(torch.uint8), None
    if kind == "int4":
        scale = ((high - low) / 15).bfloat16()
        zero = (-low / scale.float()).round()
        codes = (x / scale.float()[:, None, :, None]).round() + zero[:, None, :, None]
        return codes.clamp(0, 15).to(torch.uint8), scale, zero.to(torch.uint8)
    scale = largest / (448 if kind == "fp8" else 127)
    # The largest quotient may be rounded to more than 448, which torch before 2.13 converts to NaN.
    codes = (x / scale[:, None, :, None]).clamp(-448, 448)
    return codes.to(torch.float8_e4m3fn) if kind == "fp8" else codes.round().to(torch.int8), scale, None


def copies(layout: str, rows: int, columns: int) -> list[Weight]:
    """Weights that are together larger than the L2 cache."""
    first = make(layout, rows, columns)
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    return [first] + [make(layout, rows, columns) for _ in range(max(1, -(-4 * l2 // first.num_bytes) - 1))]


def error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """The norm of the difference from the product of the weight's numbers, over the norm of that."""
    exact = x.double() @ weight.double().T
    return float((y.double() - exact).norm() / exact.norm())


def peers(layout: str, weights: Sequence[Weight], x: Tensor) -> dict[str, list[Callable[[], Any]]]:
    """Products of torch and gemlite, for each weight."""
    columns = x.shape[1]
    found: dict[str, list[Callable[[], Any]]] = {}
    dense = [w.dequantized(columns).to(x.dtype) for w in weights]
    found["bf16"] = [partial(torch.mm, x, w.T) for w in dense]
    if layout == "fp8":
        found["_scaled_mm"] = [partial(_by_torch, x, w) for w in weights]
    if layout == "fp8 block" and len(x) > 1:
        found["scaled_mm"] = [partial(_by_torch, x, w) for w in weights]
    try:
        found["gemlite"] = [partial(y, x) for y in _gemlite(layout, weights, columns)]
    except Exception as problem:
        print(f"gemlite: {type(problem).__name__}: {problem}"[:200], file=sys.stderr)
    return found


def _by_torch(x: Tensor, w: Weight) -> Tensor:
    return launches._multiply_fp8(x, w.codes, w.scale, None, w.block)


def _gemlite(layout: str, weights: Sequence[Weight], columns: int) -> list[Any]:
    from gemlite import helper

    def made(w: Weight) -> Any:
        options: Any = {"device": "cuda:0", "dtype": torch.bfloat16}
        if layout == "fp8":
            return helper.A8W8_fp8_dynamic(**options).from_weights(w.codes, None, w.scale)
        if layout == "fp8 block":
            return helper.A8W8_fp8_dynamic(block_quant=True, **options).from_weights(w.codes, None, w.scale)
        if layout == "int4":
            codes = products.unpack_words(w.codes, columns)
            assert w.zero is not None
            return helper.A16W4_HQQ_INT(**options).from_weights(codes, w.scale.contiguous(), w.zero.bfloat16())
        raise ValueError(f"{layout} is not compared")

    return [made(w) for w in weights]


def candidates(c: CodeConfig, blocks: int) -> Iterator[CodeConfig]:
    """Constants to try in place of the chosen ones."""
    yield c
    sizes = ((64, 4), (128, 4), (128, 8), (64, 2), (32, 2))
    for (block_n, num_warps), stages, factor in itertools.product(sizes, (3, 4, 6), (0.5, 1, 2)):
        splits = min(max(round(c.splits * factor * block_n / c.block_n), 1), blocks)
        splits = -(-blocks // -(-blocks // splits))
        yield replace(c, block_n=block_n, num_warps=num_warps, num_stages=stages, splits=splits)


def chosen(w: Weight, x: Tensor, rows: int) -> CodeConfig:
    """The constants that the engine chooses."""
    return launches.product_config(w.kind, w.block, len(x), rows, x.shape[1], x.dtype, x.device, len(w.arrivals))


def _compile(job: tuple[str, int, int, int, Sequence[CodeConfig]]) -> None:
    layout, rows, columns, num_rows, configs = job
    weight, x = make(layout, rows, columns), torch.randn(num_rows, columns, device="cuda", dtype=torch.bfloat16)
    for c in configs:
        try:
            weight.launch(x, c)
        except Exception as problem:
            print(f"{c}: {type(problem).__name__}"[:300], file=sys.stderr)


def tune(layout: str, shape: str, num_rows: int, rounds: int, pool: Any) -> list[Row]:
    """Times of the kernel for few rows with other constants, fastest first."""
    rows, columns = SHAPES[shape]
    weights, x = copies(layout, rows, columns), torch.randn(num_rows, columns, device="cuda", dtype=torch.bfloat16)
    configs = list(dict.fromkeys(candidates(chosen(weights[0], x, rows), -(-columns // 128))))
    pool.map(_compile, [(layout, rows, columns, num_rows, configs[i::12]) for i in range(12)])
    found = []
    for c in configs:
        try:
            found.append((c, gpu.captured([partial(w.launch, x, c) for w in weights])))
        except Exception as problem:
            print(f"{c}: {type(problem).__name__}: {problem}"[:200], file=sys.stderr)
    seconds = gpu.seconds_in_turns([replay for _, replay in found], rounds)
    pairs = sorted(zip(seconds, [c for c, _ in found], strict=True), key=lambda pair: pair[0])
    return [{"us": s * 1e6, "config": vars(c), "chosen": c == configs[0]} for s, c in pairs]


def floor(weight: Weight, x: Tensor, rows: int, ceilings: dict[str, float]) -> float:
    """Microseconds of the weight's bytes or of the operations at the rates measured, whichever are more. The rate of
    products of fp8 is taken as twice that of bfloat16.
    """
    rate = ceilings["matmul_tflop_s"] * 1e12 * (2 if weight.kind == "fp8" else 1)
    return max(weight.num_bytes / ceilings["read_gb_s"] / 1e9, 2 * rows * x.numel() / rate) * 1e6


def measure(layout: str, shape: str, num_rows: int, rounds: int, ceilings: dict[str, float]) -> Row:
    """Times and errors of all products of one cell."""
    rows, columns = SHAPES[shape]
    weights, x = copies(layout, rows, columns), torch.randn(num_rows, columns, device="cuda", dtype=torch.bfloat16)
    runs = peers(layout, weights, x)
    runs["quire"] = [partial(w.product, x) for w in weights]
    exact, replays = weights[0].dequantized(columns), {}
    result: dict[str, Row] = {}
    for name, calls in runs.items():
        try:
            result[name] = {"error": error(calls[0](), x, exact)}
            replays[name] = gpu.captured(calls)
        except Exception as problem:
            result[name] = {"failed": f"{type(problem).__name__}: {problem}"[:200]}
    for name, seconds in zip(replays, gpu.seconds_in_turns(list(replays.values()), rounds), strict=True):
        result[name]["us"] = seconds * 1e6
    least = floor(weights[0], x, rows, ceilings)
    names = {"layout": layout, "shape": shape, "rows": num_rows, "weight_error": weights[0].error}
    return {**names, "floor_us": least, "products": result}


def measure_on_cpu(layout: str, shape: str, num_rows: int, rounds: int, ceilings: dict[str, float]) -> Row:
    """As `measure`, of the product with the weight that was dequantized when it was loaded, and of the one with the
    weight as it is.
    """
    rows, columns = SHAPES[shape]
    weight, x = make(layout, rows, columns, "cpu"), torch.randn(num_rows, columns)
    dense = weight.dequantized(columns)
    runs = {"quire": partial(torch.nn.functional.linear, x, dense), "kept": partial(weight.product, x)}
    result: dict[str, Row] = {name: {"error": error(run(), x, dense)} for name, run in runs.items()}
    for name, seconds in zip(runs, cpu.medians(list(runs.values()), rounds), strict=True):
        result[name]["us"] = seconds * 1e6
    rate = ceilings["matmul_gflop_s"] * 1e9
    least = max(dense.numel() * 4 / ceilings["read_gb_s"] / 1e9, 2 * rows * x.numel() / rate) * 1e6
    names = {"layout": layout, "shape": shape, "rows": num_rows, "weight_error": weight.error}
    return {**names, "floor_us": least, "products": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    module = cpu if args.device == "cpu" else gpu
    ceilings = module.ceilings()
    result: Row = {**module.machine(), "operation": "products", "seed": 0, "ceilings": ceilings, "cells": []}
    cells = list(itertools.product(args.layouts, args.shapes, args.rows))
    with multiprocessing.get_context("spawn").Pool(12 if args.tune else 1) as pool:
        for layout, shape, num_rows in cells:
            if args.tune:
                rows = tune(layout, shape, num_rows, args.rounds, pool)
                cell: Row = {"layout": layout, "shape": shape, "rows": num_rows, "configs": rows}
                for row in [*rows[:3], next(row for row in rows if row["chosen"])]:
                    c = row["config"]
                    names = ("block_m", "block_n", "num_warps", "num_stages", "splits")
                    print(layout, shape, num_rows, f"{row['us']:.1f} us", *(f"{n}={c[n]}" for n in names), flush=True)
            else:
                measured = measure_on_cpu if args.device == "cpu" else measure
                cell = measured(layout, shape, num_rows, args.rounds, ceilings)
                times = {name: f"{x['us']:.1f}" if "us" in x else x for name, x in cell["products"].items()}
                print(layout, shape, num_rows, f"floor {cell['floor_us']:.1f}", times, flush=True)
            result["cells"].append(cell)
            with open(args.json, "w") as file:
                json.dump(result, file, indent=1)
            if args.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
