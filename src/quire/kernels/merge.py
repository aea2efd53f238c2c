"""Merging partial states of attention: in torch by `quire.definition.state`, on a GPU by a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.definition import state
from quire.definition.spec import FLOATS
from quire.kernels.ops import on_triton, operation


@operation("merge_state", "out", "lse")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge two states into out and lse. v and out: [tokens, heads, head_dim]; s and lse: float32 [tokens, heads].

    Tensors have any strides with the last one 1.
    """
    if on_triton(v_a.device):
        from quire.kernels.triton.merge import merge

        merge(v_a[:, None], s_a[:, None], v_b, s_b, None, out, lse)
        return
    v, s = state.merge(v_a, s_a, v_b, s_b)
    out.copy_(v)
    lse.copy_(s)


@operation("merge_state_in_place", "v", "s")
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None) -> None:
    """Merge (v_other, s_other), shaped as in `merge_state`, into (v, s), for the tokens of a bool mask [tokens]."""
    if on_triton(v.device):
        from quire.kernels.triton.merge import merge

        merge(v[:, None], s[:, None], v_other, s_other, mask, v, s)
        return
    merged_v, merged_s = state.merge(v, s, v_other, s_other)
    if mask is not None:
        merged_v, merged_s = torch.where(mask[:, None, None], merged_v, v), torch.where(mask[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


@operation("merge_states", "out", "lse")
def merge_states(v: Tensor, s: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge n >= 0 states into out and lse, shaped as in `merge_state`. v: [tokens, n, heads, head_dim], s: float32
    [tokens, n, heads].
    """
    if on_triton(v.device):
        from quire.kernels.triton.merge import merge

        merge(v, s, None, None, None, out, lse)
        return
    merged_v, merged_s = state.merge_many(v, s)
    out.copy_(merged_v)
    lse.copy_(merged_s)


def merge_levels(
    levels: Iterable[tuple[Tensor, Tensor]],
    out: Tensor | None = None,
    lse: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Merge the partial states of one or more levels of attention in float32, and round the output once, at the end.

    Args:
        levels: states (v, s), float32 [tokens, heads, head_dim] and [tokens, heads]; the first one is overwritten. Each
            has tensors of its own, since Inductor's graphs for dynamic shapes can get views of one tensor wrong when
            operations write to them.
        out: [tokens, heads, head_dim], any dtype, where to write; None: a new tensor of `dtype`.
        lse: float32 [tokens, heads], where to write; None: a new tensor.

    Returns:
        (out, lse) over the keys of all levels.
    """
    (v, s), *others = levels
    out = torch.empty_like(v, dtype=dtype) if out is None else out
    lse = torch.empty_like(s) if lse is None else lse
    for other in others[:-1]:
        merge_state_in_place(v, s, *other, None)
    if not others:
        out.copy_(v)
        lse.copy_(s)
        return out, lse
    merged = out if out.dtype in FLOATS else torch.empty_like(v)
    merge_state(v, s, *others[-1], merged, lse)
    if merged is not out:
        out.copy_(merged)
    return out, lse
