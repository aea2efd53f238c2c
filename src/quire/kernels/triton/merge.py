"""Merging attention states: one kernel for two states, for many, and in place.

A row is a (token, head) pair. A program merges its rows' states, first the `states` of v and then v_other, and writes
the result. It may overwrite its input, as no program reads the rows of another.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def _merge_next(v, s, inside_tile, inside, m, l, acc):
    """Merge the state at (v, s) into the running state. Of a state without keys v is not read."""
    s = tl.load(s, inside, -float("inf")).to(tl.float32)
    m_new = tl.maximum(m, s)
    base = tl.where(tl.abs(m_new) == float("inf"), 0.0, m_new)
    alpha, weight = tl.exp2(m - base), tl.exp2(s - base)
    x = tl.load(v, inside_tile & (weight != 0)[:, None], 0.0).to(tl.float32)
    return m_new, l * alpha + weight, acc * alpha[:, None] + x * weight[:, None]


@triton.jit(do_not_specialize=["rows", "states"])
def merge_rows(
    v, s, v_other, s_other, mask, out, lse, rows, states, heads, dim,
    v_token, v_state, v_head, s_token, s_state, s_head, vo_token, vo_head, so_token, so_head, m_token,
    o_token, o_head, l_token, l_head, block_rows: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    token, head = row // heads, row % heads
    d = tl.arange(0, block_dim)[None, :]
    inside = row < rows
    if mask is not None:
        inside = inside & (tl.load(mask + token * m_token, inside, 0) != 0)
    inside_tile = inside[:, None] & (d < dim)
    m = tl.full([block_rows], -float("inf"), tl.float32)
    l = tl.full([block_rows], 0.0, tl.float32)
    acc = tl.full([block_rows, block_dim], 0.0, tl.float32)
    v_at = v + (token * v_token + head * v_head)[:, None] + d
    s_at = s + token * s_token + head * s_head
    for _ in range(states):
        m, l, acc = _merge_next(v_at, s_at, inside_tile, inside, m, l, acc)
        v_at += v_state
        s_at += s_state
    if v_other is not None:
        v_at = v_other + (token * vo_token + head * vo_head)[:, None] + d
        m, l, acc = _merge_next(v_at, s_other + token * so_token + head * so_head, inside_tile, inside, m, l, acc)
    x = acc / tl.where(l == 0, 1.0, l)[:, None]
    tl.store(out + (token * o_token + head * o_head)[:, None] + d, x.to(out.dtype.element_ty), inside_tile)
    base = tl.where(tl.abs(m) == float("inf"), 0.0, m)
    tl.store(lse + token * l_token + head * l_head, base + tl.log2(l), inside)


def merge(
    v: Tensor, s: Tensor, v_other: Tensor | None, s_other: Tensor | None, mask: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merge the n states of v and, if there is one, that of v_other, into out and lse.

    v: [tokens, n, heads, head_dim], s: float32 [tokens, n, heads]; v_other, s_other, out and lse: without n. Tokens
    that are False in the bool mask [tokens] are not written.
    """
    tokens, states, heads, dim = v.shape
    rows = tokens * heads
    if not rows:
        return
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, 2048 // block_dim)
    other_strides: tuple[int, ...] = (0, 0, 0, 0)
    if v_other is not None and s_other is not None:
        other_strides = *v_other.stride()[:2], *s_other.stride()
    mask_stride = 0 if mask is None else mask.stride(0)
    strides = *v.stride()[:3], *s.stride(), *other_strides, mask_stride, *out.stride()[:2], *lse.stride()
    bits = None if mask is None else mask.view(dtype=torch.uint8)
    grid = (triton.cdiv(rows, block_rows),)
    merge_rows[grid](v, s, v_other, s_other, bits, out, lse, rows, states, heads, dim, *strides, block_rows, block_dim)
