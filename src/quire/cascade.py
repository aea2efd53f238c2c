"""Merging attention states: the outputs over disjoint sets of keys into the output over all of them.

Names, parameters and meanings are those of `flashinfer.cascade`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention import state
from quire.attention.tensors import check_tensor

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def _check_state(v: Tensor, s: Tensor, names: tuple[str, str]) -> None:
    if v.ndim != 3:
        raise ValueError(f"{names[0]} has shape {list(v.shape)}: it must be [tokens, heads, head_dim]")
    check_tensor(s, names[1], tuple(v.shape[:2]), torch.float32, v.device)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states of two disjoint sets of keys.

    Args:
        v_a, v_b: outputs, [tokens, heads, head_dim].
        s_a, s_b: their lse (base 2), float32 [tokens, heads].

    Returns:
        (v, s) of the union; v has v_a's dtype. Where neither saw a key, v is 0 and s is -inf.
    """
    _check_state(v_a, s_a, ("v_a", "s_a"))
    _check_state(v_b, s_b, ("v_b", "s_b"))
    check_tensor(v_b, "v_b", tuple(v_a.shape), v_a.dtype, v_a.device)
    return state.merge(v_a, s_a, v_b, s_b)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge the state (v_other, s_other) into (v, s).

    Args:
        v, s, v_other, s_other: as in `merge_state`.
        mask: bool [tokens], the tokens to merge; the others keep their state.
    """
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        check_tensor(mask, "mask", (len(v),), torch.bool, v.device)
        merged_v = torch.where(mask[:, None, None], merged_v, v)
        merged_s = torch.where(mask[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states of several disjoint sets of keys.

    Args:
        v: outputs, [tokens, sets, heads, head_dim].
        s: their lse (base 2), float32 [tokens, sets, heads].

    Returns:
        v [tokens, heads, head_dim] and s float32 [tokens, heads] of the union.
    """
    if v.ndim != 4:
        raise ValueError(f"v has shape {list(v.shape)}: it must be [tokens, sets, heads, head_dim]")
    check_tensor(s, "s", tuple(v.shape[:3]), torch.float32, v.device)
    return state.merge_many(v, s)
