"""Merging attention states: by the definition in torch, on a GPU by a kernel. See `quire.definition.state`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.definition import state
from quire.definition.spec import FLOATS
from quire.kernels.ops import on_triton, operation


@operation("merge_state", "out", "lse")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """The state of two sets into out and lse. v and out: [tokens, heads, head_dim]; s and lse: float32 [tokens, heads].

    Any strides with the last one 1.
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
    """(v_other, s_other) into (v, s), shaped as in `merge_state`, for a bool mask's tokens [tokens], any stride."""
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
    """The state of n sets into out and lse, shaped as in `merge_state`. v: [tokens, n, heads, head_dim], s: float32
    [tokens, n, heads]; n may be 0.
    """
    if on_triton(v.device):
        from quire.kernels.triton.merge import merge

        merge(v, s, None, None, None, out, lse)
        return
    merged_v, merged_s = state.merge_many(v, s)
    out.copy_(merged_v)
    lse.copy_(merged_s)


def merge_levels(levels: Iterable[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """The states of one or more levels of attention, in float32 all the way, into out, of any dtype, and lse.

    The first state is overwritten. Levels have tensors of their own, and are merged two by two: parts of one tensor,
    each written by an operation, can get wrong contents where Inductor compiles for changing shapes.
    """
    (v, s), *others = levels
    for other in others[:-1]:
        merge_state_in_place(v, s, *other, None)
    if not others:
        out.copy_(v)
        lse.copy_(s)
        return
    merged = out if out.dtype in FLOATS else torch.empty_like(v)
    merge_state(v, s, *others[-1], merged, lse)
    if merged is not out:
        out.copy_(merged)
