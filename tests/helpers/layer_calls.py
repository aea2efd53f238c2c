"""Public calls of norms and activations with small tensors that fit, as in `helpers.public_calls`."""

from __future__ import annotations

import torch

import quire
from helpers.public_calls import DIM, PublicCall, clones


def layers(device: str) -> dict[str, PublicCall]:
    x, weight, fp8 = torch.randn(3, DIM, device=device), torch.randn(DIM, device=device), torch.float8_e4m3fn
    given, calls = {"input": x, "weight": weight}, {}
    two, quant = {"residual": x + 1}, {"out": torch.zeros(3, DIM, device=device).to(fp8), "scale": 0.5}
    affine = {"input": x, "gemma": weight, "beta": weight}
    free = ("weight", "gemma", "beta", "out")
    for name, arguments in (
        *(("rmsnorm", given), ("gemma_rmsnorm", given), ("rmsnorm_quant", given | quant), ("layernorm", affine)),
        *(("fused_add_rmsnorm", given | two), ("gemma_fused_add_rmsnorm", given | two)),
        *(("fused_add_rmsnorm_quant", given | two | quant), ("layernorm_quant", affine | quant)),
    ):
        lost = tuple(n for n in ("input", "residual") if n in arguments)
        any_dtype = tuple(n for n in free if n in arguments)
        calls[name] = PublicCall(
            getattr(quire, name), clones(arguments), optional=("scale",), any_dtype=any_dtype, differentiable=lost
        )
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        calls[name] = PublicCall(getattr(quire, name), {"input": x}, differentiable=("input",))
        out = torch.zeros(3, DIM // 2, device=device).to(fp8)
        arguments = {"input": x, "out": out, "scale": 0.5}
        calls[name + "_quant"] = PublicCall(
            getattr(quire, name + "_quant"),
            arguments,
            optional=("scale",),
            any_dtype=("out",),
            differentiable=("input",),
        )
    return calls
