"""The part of quire check on the operations beside attention: each against its formula in float64, on random rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quire import activation, norm, sampling
from quire.bench.batches import relative_error

# These bounds are relative.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 6e-4}
_EPS = 1e-6


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def exact(x: Tensor, *_rest: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return exact


def _added(x: Tensor, y: Tensor, weight: Tensor, call: Callable[..., None]) -> Tensor:
    """The input that a function normalises in place, after it has added it to the residual."""
    call(x, y, weight, _EPS)
    return x


def _top_k(probs: Tensor, k: int) -> Tensor:
    """The probabilities that are at least the k-th largest one, divided by their sum."""
    kept = torch.where(probs >= probs.topk(k).values[:, -1:], probs, 0)
    return kept / kept.sum(-1, keepdim=True)


# For each operation, Quire's function and the formula, of x and y [rows, 2 * dim] and weights [2 * dim].
_OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rmsnorm": (lambda x, y, w: norm.rmsnorm(x, w, _EPS), lambda x, y, w: _rms(x, w)),
    "gemma_rmsnorm": (lambda x, y, w: norm.gemma_rmsnorm(x, w, _EPS), lambda x, y, w: _rms(x, w + 1)),
    "fused_add_rmsnorm": (
        lambda x, y, w: _added(x, y, w, norm.fused_add_rmsnorm),
        lambda x, y, w: _rms(x + y, w),
    ),
    "gemma_fused_add_rmsnorm": (
        lambda x, y, w: _added(x, y, w, norm.gemma_fused_add_rmsnorm),
        lambda x, y, w: _rms(x + y, w + 1),
    ),
    "layernorm": (
        lambda x, y, w: norm.layernorm(x, w, w, _EPS),
        lambda x, y, w: (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + _EPS).sqrt() * w + w,
    ),
    "silu_and_mul": (lambda x, y, w: activation.silu_and_mul(x), _gated(lambda x: x / (1 + torch.exp(-x)))),
    "gelu_and_mul": (
        lambda x, y, w: activation.gelu_and_mul(x),
        _gated(lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2)))),
    ),
    "gelu_tanh_and_mul": (
        lambda x, y, w: activation.gelu_tanh_and_mul(x),
        _gated(lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ),
    "softmax": (lambda x, y, w: sampling.softmax(x, temperature=0.7), lambda x, y, w: (x / 0.7).softmax(-1)),
    "top_k_renorm_probs": (
        lambda x, y, w: sampling.top_k_renorm_probs(x.float().softmax(-1), 20),
        lambda x, y, w: _top_k(x.softmax(-1), 20),
    ),
}


def check_layers(seed: int, batches: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each operation and dtype: the largest relative error over some batches of random rows."""
    for name, (ours, exact) in _OPERATIONS.items():
        for dtype, bound in BOUNDS.items():
            rng = random.Random(f"{seed} {name} {dtype}")
            torch.manual_seed(rng.randrange(1 << 31))
            errors = []
            for _ in range(batches):
                rows, dim = rng.choice((1, 7, 130)), rng.choice((32, 111, 128, 4096, 20000))
                x, y, w = (torch.randn(n, 2 * dim).to(device, dtype) for n in (rows, rows, 1))
                expected = exact(x.double(), y.double(), w[0].double())
                errors.append(relative_error(ours(x, y, w[0]), expected))
            error = float("nan") if any(math.isnan(e) for e in errors) else max(errors)
            yield {
                "operation": name,
                "device": device.type,
                "dtype": str(dtype).removeprefix("torch."),
                "error": error,
                "bound": bound,
                "ok": error <= bound,
            }
