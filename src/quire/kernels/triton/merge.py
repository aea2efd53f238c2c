"""Merging attention states: one kernel for two of them, for many, and in place.

A row is a (token, head). A program folds its rows' states, first the `states` of v and then v_other, into a running
state, and writes it: in place is right too, since no program reads another's rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def _take(v, s, tile, inside, top, total, acc):
    """One more state into the running one. Of a state without keys, v is not read."""
    x = tl.load(s, inside, -float("inf")).to(tl.float32)
    high = tl.maximum(top, x)
    base = tl.where(tl.abs(high) == float("inf"), 0.0, high)
    keep, weight = tl.exp2(top - base), tl.exp2(x - base)
    part = tl.load(v, tile & (weight != 0)[:, None], 0.0).to(tl.float32)
    return high, total * keep + weight, acc * keep[:, None] + part * weight[:, None]


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
    tile = inside[:, None] & (d < dim)
    top = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.full([block_rows], 0.0, tl.float32)
    acc = tl.full([block_rows, block_dim], 0.0, tl.float32)
    v_at = v + (token * v_token + head * v_head)[:, None] + d
    s_at = s + token * s_token + head * s_head
    for _ in range(states):
        top, total, acc = _take(v_at, s_at, tile, inside, top, total, acc)
        v_at += v_state
        s_at += s_state
    if v_other is not None:
        v_at = v_other + (token * vo_token + head * vo_head)[:, None] + d
        top, total, acc = _take(v_at, s_other + token * so_token + head * so_head, tile, inside, top, total, acc)
    x = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + (token * o_token + head * o_head)[:, None] + d, x.to(out.dtype.element_ty), tile)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(lse + token * l_token + head * l_head, base + tl.log2(total), inside)


def merge(
    v: Tensor, s: Tensor, v_other: Tensor | None, s_other: Tensor | None, mask: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """The state of v's n sets and, where given, of (v_other, s_other), into out and lse.

    v: [tokens, n, heads, head_dim], s: float32 [tokens, n, heads]; the others without n. Tokens that the bool mask
    [tokens] leaves out are not written.
    """
    tokens, states, heads, dim = v.shape
    rows = tokens * heads
    if not rows:
        return
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, 2048 // block_dim)
    merge_rows[(triton.cdiv(rows, block_rows),)](
        v,
        s,
        v_other,
        s_other,
        None if mask is None else mask.view(dtype=torch.uint8),
        out,
        lse,
        rows,
        states,
        heads,
        dim,
        *v.stride()[:3],
        *s.stride(),
        *((0, 0) if v_other is None else v_other.stride()[:2]),
        *((0, 0) if s_other is None else s_other.stride()),
        0 if mask is None else mask.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        block_rows,
        block_dim,
    )
