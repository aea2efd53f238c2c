"""Concatenation of the NoPE and RoPE elements of keys, for MLA without weight absorption.

Names, parameters and meanings are those of `flashinfer.concat_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.tensors import check_tensor

__all__ = ["concat_mla_k"]


def concat_mla_k(k: Tensor, k_nope: Tensor, k_rope: Tensor, *, backend: str = "default") -> None:
    """Write each head's NoPE elements and the RoPE elements that all heads share into k.

    Args:
        k: where to write, [tokens, heads, nope_dim + rope_dim], any dtype, any strides with the last one 1.
        k_nope: [tokens, heads, nope_dim], of k's dtype, on k's device, any strides with the last one 1.
        k_rope: [tokens, 1, rope_dim], of k's dtype, on k's device, any strides with the last one 1.
        backend: "default" or "cake"; accepted, without effect.

    Raises:
        ValueError: a tensor that does not fit.
    """
    check(backend in ("default", "cake"), "backend", backend, "default or cake")
    for x, name in ((k, "k"), (k_nope, "k_nope"), (k_rope, "k_rope")):
        check(isinstance(x, Tensor) and x.ndim == 3, name, getattr(x, "shape", x), "a tensor of three dimensions")
    tokens, heads, dim = k_nope.shape
    check_tensor(k, "k", (tokens, heads, dim + k_rope.shape[-1]), k.dtype, k.device)
    check_tensor(k_nope, "k_nope", (tokens, heads, dim), k.dtype, k.device)
    check_tensor(k_rope, "k_rope", (tokens, 1, k.shape[-1] - dim), k.dtype, k.device)
    # torch does not copy fp8 on every device, but it copies bytes.
    if k.element_size() == 1:
        k, k_nope, k_rope = (x.view(torch.uint8) for x in (k, k_nope, k_rope))
    k[..., :dim] = k_nope
    k[..., dim:] = k_rope
