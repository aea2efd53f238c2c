"""Timing the operations that a model needs beside attention on a GPU: CUDA graph replays over inputs that leave its L2
cache, beside torch.compile of the formula in PyTorch, FlashInfer, and a copy of the same number of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.bench import gpu, peers

LAYERS = (
    *("rmsnorm 4096 x8192", "rmsnorm 8192 x8192", "rmsnorm 128 x262144", "rmsnorm 4096 x64", "rmsnorm 4096 x1"),
    *("fused_add_rmsnorm 4096 x8192", "fused_add_rmsnorm 4096 x64", "fused_add_rmsnorm 4096 x1"),
    *("fused_add_rmsnorm_quant 4096 x8192", "layernorm 4096 x8192"),
    *("silu_and_mul 14336 x8192", "silu_and_mul 14336 x64", "silu_and_mul 14336 x1"),
    *("gelu_tanh_and_mul 14336 x8192", "silu_and_mul_quant 14336 x8192"),
    *("qk_norm_rope_append 32:8 x1", "qk_norm_rope_append 32:8 x64", "qk_norm_rope_append 32:8 x256"),
    *("qk_norm_rope_append 32:8 x8192", "softmax 151936 x64", "sampling 151936 x64", "top_p 151936 x64"),
    *("top_k_top_p 151936 x64", "top_k_top_p 151936 x1", "top_k 151936 x64", "top_k 151936 x1"),
    *("top_p_renorm 151936 x64", "top_k_top_p 128256 x256", "top_k_top_p 50257 x64"),
)
PEERS = ("torch.compile", "flashinfer")
_NAME = re.compile(r"(\w+) (\d+)(?::(\d+))? x(\d+)")
# Inputs are copied until they are this many times the size of the L2 cache.
_L2_TIMES = 4
# Inputs are copied at most so often. Small ones stay in the L2 cache, where the kernel before leaves them in a model.
_MAX_COPIES = 64
# The rate of a copy of so many bytes is the ceiling.
_LARGE = 1 << 31
_HEAD_DIM, _PAGE_SIZE = 128, 16


class OperationCase(NamedTuple):
    """What a cell times: its inputs, and functions of them.

    Attributes:
        inputs: tensors, of which there are as many copies as leave the L2 cache; all functions take them.
        ours: Quire's operation.
        formula: the operation in PyTorch, which torch.compile gets; None if there is none.
        theirs: FlashInfer's operation, as a function of its module of that name; None if it has none.
        moved: bytes that must be read and written.
    """

    inputs: tuple[Tensor, ...]
    ours: Callable[..., Any]
    formula: Callable[..., Any] | None
    theirs: tuple[str, Callable[[Any], Callable[..., Any]]] | None
    moved: int


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def _norm(kind: str, dim: int, rows: int) -> OperationCase:
    """rmsnorm, layernorm, fused_add_rmsnorm, and with fp8 outputs."""
    from quire import norm

    weight, scale = _normal(dim), torch.ones(1, device="cuda")
    wide, x = weight.float(), _normal(rows, dim)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn) if "quant" in kind else torch.empty_like(x)
    numel = x.numel()

    def added(x: Tensor, residual: Tensor) -> None:
        residual.add_(x)
        x.copy_(_rms(residual, weight))

    def added_quant(out: Tensor, x: Tensor, residual: Tensor) -> None:
        residual.add_(x)
        out.copy_((_rms(residual, weight).float() / scale).clamp(-448, 448))

    works: dict[str, tuple[tuple[Tensor, ...], Callable[..., Any], Callable[..., Any], int]] = {
        "rmsnorm": ((x, out), lambda f, x, out: f(x, weight, out=out), lambda x, out: _rms(x, weight), 4),
        "layernorm": (
            (x,),
            lambda f, x: f(x, wide, wide),
            lambda x: functional.layer_norm(x.float(), (dim,), wide, wide, 1e-6).to(x.dtype),
            4,
        ),
        "fused_add_rmsnorm": ((x, out.zero_()), lambda f, x, residual: f(x, residual, weight), added, 8),
        "fused_add_rmsnorm_quant": (
            (out, x, _normal(rows, dim)),
            lambda f, out, x, residual: f(out, x, residual, weight, scale),
            added_quant,
            7,
        ),
    }
    inputs, call, formula, element = works[kind]
    theirs = ("norm", lambda module: partial(call, getattr(module, kind)))
    return OperationCase(inputs, partial(call, getattr(norm, kind)), formula, theirs, numel * element)


def _activation(kind: str, dim: int, rows: int) -> OperationCase:
    """silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, and with fp8 outputs, which FlashInfer has not."""
    from quire import activation

    quant = kind.endswith("_quant")
    x, scale = _normal(rows, 2 * dim), torch.ones(1, device="cuda")
    out = torch.empty(rows, dim, device="cuda", dtype=torch.float8_e4m3fn if quant else torch.bfloat16)
    name = kind.split("_and_mul")[0]
    act = functional.silu if name == "silu" else partial(functional.gelu, approximate=name.partition("_")[2] or "none")

    def formula(x: Tensor, out: Tensor) -> None:
        y = act(x[..., :dim].float()) * x[..., dim:]
        out.copy_((y / scale).clamp(-448, 448) if quant else y)

    moved = x.numel() * 2 + out.numel() * out.element_size()
    if quant:
        ours = getattr(activation, kind)
        return OperationCase((x, out), lambda x, out: ours(out, x, scale), formula, None, moved)
    theirs = ("activation", lambda module: getattr(module, kind))
    return OperationCase((x, out), getattr(activation, kind), formula, theirs, moved)


def _heads(q_heads: int, kv_heads: int, tokens: int) -> OperationCase:
    """Heads normalised, rotated and appended to pages, from one packed projection."""
    from quire.norm import fused_qk_rmsnorm_rope_append_paged_kv_cache as fused

    weight, angles = _normal(_HEAD_DIM), torch.rand(4096, _HEAD_DIM // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(4096, (tokens,), device="cuda")
    pages = -(-tokens // _PAGE_SIZE)
    slots = torch.randperm(pages * _PAGE_SIZE, device="cuda")[:tokens]
    qkv, q_out = _normal(tokens, q_heads + 2 * kv_heads, _HEAD_DIM), _normal(tokens, q_heads, _HEAD_DIM)
    cache = _normal(pages, 2, _PAGE_SIZE, kv_heads, _HEAD_DIM)
    sizes = (q_heads, kv_heads, kv_heads)

    def ours(qkv: Tensor, q_out: Tensor, cache: Tensor) -> None:
        q, k, v = qkv.split(sizes, 1)
        fused(q, k, v, weight, weight, cos_sin, positions, cache, slots=slots, q_out=q_out)

    def rotated(x: Tensor) -> Tensor:
        (a, b), (cos, sin) = _rms(x, weight).float().chunk(2, -1), cos_sin[positions, None].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def formula(qkv: Tensor, q_out: Tensor, cache: Tensor) -> None:
        q, k, v = qkv.split(sizes, 1)
        q_out.copy_(rotated(q))
        page, slot = slots // _PAGE_SIZE, slots % _PAGE_SIZE
        cache[page, 0, slot], cache[page, 1, slot] = rotated(k), v

    return OperationCase((qkv, q_out, cache), ours, formula, None, 2 * qkv.numel() * qkv.element_size())


def _sampling(kind: str, vocabulary: int, rows: int) -> OperationCase:
    """softmax, sampling from logits, and sampling with top-p 0.9, with top-k 1000, or with top-k 50 and top-p 0.9, of
    float32 logits or probabilities.
    """
    logits = torch.randn(rows, vocabulary, device="cuda") * 3
    calls: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "softmax": lambda module: module.softmax,
        "sampling": lambda module: module.sampling_from_logits,
        "top_p": lambda module: lambda x: module.top_p_sampling_from_probs(x, 0.9),
        "top_k": lambda module: lambda x: module.top_k_sampling_from_probs(x, 1000),
        "top_p_renorm": lambda module: lambda x: module.top_p_renorm_probs(x, 0.9),
        "top_k_top_p": lambda module: lambda x: module.top_k_top_p_sampling_from_logits(x, 50, 0.9),
    }
    x = logits.softmax(-1) if kind in ("top_p", "top_k", "top_p_renorm") else logits
    formula: dict[str, Callable[..., Any] | None] = {
        "softmax": lambda x: x.softmax(-1),
        "sampling": lambda x: torch.multinomial(x.softmax(-1), 1),
    }
    moved = x.numel() * 4 * (2 if kind in ("softmax", "top_p_renorm") else 1)
    return OperationCase(
        (x,), calls[kind](import_module("quire.sampling")), formula.get(kind), ("sampling", calls[kind]), moved
    )


_KINDS: dict[str, Callable[..., OperationCase]] = {
    **dict.fromkeys(("rmsnorm", "layernorm", "fused_add_rmsnorm", "fused_add_rmsnorm_quant"), _norm),
    **{f"{f}_and_mul{end}": _activation for f in ("silu", "gelu", "gelu_tanh") for end in ("", "_quant")},
    "qk_norm_rope_append": _heads,
    **dict.fromkeys(("softmax", "sampling", "top_p", "top_k", "top_p_renorm", "top_k_top_p"), _sampling),
}


@dataclass(frozen=True)
class LayerCell:
    """One row: an operation, the size of its rows (or the numbers of heads), and how many rows there are."""

    kind: str
    size: int
    kv_heads: int
    rows: int

    @classmethod
    def parse(cls, name: str) -> LayerCell:
        """A cell from its name, like "rmsnorm 4096 x8192" or "qk_norm_rope_append 32:8 x256"."""
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in _KINDS:
            raise ValueError(f"cell {name!r}: it must be an operation, a size and x rows; one of {', '.join(_KINDS)}")
        cell = cls(match[1], int(match[2]), int(match[3] or 0), int(match[4]))
        heads = cell.kind == "qk_norm_rope_append"
        if not cell.size or not cell.rows or bool(cell.kv_heads) != heads:
            raise ValueError(
                f"cell {name!r}: sizes must be positive, and only qk_norm_rope_append has heads, like 32:8"
            )
        return cell

    def work(self) -> OperationCase:
        if self.kv_heads:
            return _heads(self.size, self.kv_heads, self.rows)
        return _KINDS[self.kind](self.kind, self.size, self.rows)


def _us(call: Callable[..., Any], copies: Sequence[tuple[Tensor, ...]], rounds: int) -> float:
    return gpu.graph_seconds([partial(call, *inputs) for inputs in copies], rounds) * 1e6


def _copy_us(moved: int, count: int, rounds: int) -> float:
    """Microseconds of a copy that reads and writes as many bytes, over `count` pairs of tensors."""
    pairs = [torch.empty(2, -(-moved // 2), dtype=torch.uint8, device="cuda") for _ in range(count)]
    return _us(lambda x: x[1].copy_(x[0]), [(x,) for x in pairs], rounds)


def _peer(make: Callable[[], Callable[..., Any]], copies: Sequence[Any], rounds: int) -> dict[str, Any]:
    """A peer's time, or the reason why it has none: what a peer raises says nothing about Quire."""
    try:
        return {"us": _us(make(), copies, rounds)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def measure(name: str, rounds: int, beside: Sequence[str]) -> dict[str, Any]:
    """One cell's row: microseconds on the device of Quire, of a copy of as many bytes, and of the peers."""
    work = LayerCell.parse(name).work()
    size = sum(x.numel() * x.element_size() for x in work.inputs)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(2, -(-_L2_TIMES * l2 // size)), _MAX_COPIES)
    copies = [work.inputs, *(tuple(x.clone() for x in work.inputs) for _ in range(count - 1))]
    us = _us(work.ours, copies, rounds)
    row: dict[str, Any] = {"cell": name, "us": us, "gb_s": work.moved / us / 1e3, "moved": work.moved}
    row["copy_us"] = _copy_us(work.moved, count, rounds)
    if "torch.compile" in beside and work.formula is not None:
        torch.compiler.reset()
        row["torch.compile"] = _peer(lambda: torch.compile(work.formula, dynamic=False), copies, rounds)
    if "flashinfer" in beside and work.theirs is not None:
        module, theirs = work.theirs
        row["flashinfer"] = _peer(lambda: theirs(import_module(f"flashinfer.{module}")), copies, rounds)
    return row


def bench(
    names: Sequence[str], rounds: int = 11, chosen_peers: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the result after each cell: the machine, the rate of a large copy, and the rows so far.

    Args:
        chosen_peers: the names of the peers to time, torch.compile and flashinfer; None: torch.compile, and FlashInfer
            if it is installed.
    """
    seed = torch.seed() % (1 << 31)
    torch.manual_seed(seed)
    installed = peers.flashinfer()
    beside = chosen_peers if chosen_peers is not None else PEERS if installed else PEERS[:1]
    if "flashinfer" in beside and installed is None:
        raise ValueError(f"--peers {','.join(beside)}: flashinfer is not installed")
    found = gpu.machine() | ({"flashinfer": installed.__version__} if installed else {})
    rate = _LARGE / _copy_us(_LARGE, 2, rounds) / 1e3
    result: dict[str, Any] = {**found, "seed": seed, "ceilings": {"copy_gb_s": rate}, "cells": []}
    for name in names:
        result["cells"].append(measure(name, rounds, beside))
        yield result
