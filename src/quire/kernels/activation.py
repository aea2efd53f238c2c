"""Gated activations, a function of one half of each row times the other half: torch on the CPU, Triton on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from quire.kernels.norm import rounded
from quire.kernels.ops import on_triton, operation

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@operation("act_and_mul", "out")
def act_and_mul(out: Tensor, x: Tensor, scale: Tensor | None, factor: float, kind: str) -> None:
    """Write f(x[:, :dim]) * x[:, dim:] to `out`, [rows, dim], computed in float32.

    x: [rows, 2 * dim]; both have any strides with the last one 1. kind: f is silu, gelu or gelu_tanh. scale, factor and
    an `out` of fp8: as in `quire.kernels.norm.norm`.
    """
    if on_triton(x.device):
        from quire.kernels.triton.activation import act_and_mul as act_on_gpu

        act_on_gpu(out, x, scale, factor, kind)
        return
    gate, up = x.float().chunk(2, -1)
    # Torch uses other code for rows with gaps between them, and the bits of a row must not depend on other rows.
    out.copy_(rounded(_FUNCTIONS[kind](gate.contiguous()) * up, scale, factor, out.dtype))
