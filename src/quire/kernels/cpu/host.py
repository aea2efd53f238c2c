"""Attention on the CPU, in Numba: K and V are read from their pages, all arithmetic is in float32.

Requests with few query rows stream over their keys in place (`streaming`); those with many go tile by tile (`tiled`).
Which way a request goes depends on the request alone.
"""

from __future__ import annotations

from functools import lru_cache

import numba
import numpy as np
import torch
from torch import Tensor

from quire.definition.masks import PackedMask
from quire.definition.spec import FLOATS, LOG2E, AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.cpu.jit import launch
from quire.kernels.cpu.problem import Problem
from quire.kernels.cpu.stream import ROWS, stream
from quire.kernels.cpu.tile import PANEL, PANELS, tile
from quire.kernels.family import BASIC, Family

STREAMED_ROWS = 16  # query rows per KV head up to which a request streams
_STORAGE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.uint8,
}
_NONE = np.zeros(0, np.float32)


def declines(spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    return None if device.type == "cpu" else f"it computes on the CPU, not on {device.type}"


def _flat(x: Tensor) -> np.ndarray:
    """All that a tensor's strides reach, as one vector of its storage type."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((span,), (1,)).view(_STORAGE[x.dtype]).numpy()


def _strides(x: Tensor) -> np.ndarray:
    return np.array(x.stride()[:-1], np.int64)


def _spread(scale: float | Tensor, heads: int) -> Tensor:
    """A scale, given as a number or per head, as float32 [heads]."""
    if not isinstance(scale, Tensor):
        return torch.full((heads,), float(scale))
    return scale.float().reshape(-1).repeat_interleave(heads // scale.numel())


def _bounds(indptr: Tensor, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and length of each request, int64, inside [0, size] whatever the table says."""
    ends = np.clip(indptr.numpy().astype(np.int64), 0, size)
    return ends[:-1], np.maximum(ends[1:] - ends[:-1], 0)


def _mask_arrays(mask: PackedMask | None) -> tuple[np.ndarray, np.ndarray]:
    if mask is None:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64)
    return mask.bits.contiguous().numpy(), np.maximum(mask.indptr.numpy().astype(np.int64), 0)


@lru_cache(maxsize=8)
def _angles(positions: int, head_dim: int, rope_scale: float, rope_theta: float) -> np.ndarray:
    steps = np.arange(head_dim // 2) / (head_dim // 2)
    angles = np.outer(np.arange(positions) / rope_scale, rope_theta**-steps)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32).reshape(-1)


def _rope(spec: AttentionSpec, q_len: np.ndarray, kv_len: np.ndarray) -> np.ndarray:
    if spec.pos_encoding != "ROPE_LLAMA":
        return _NONE
    # Positions go from kv_len - q_len, which is negative where there are more queries than keys, to kv_len.
    longest = int(np.maximum(kv_len, q_len - kv_len).max(initial=0))
    positions = 1 << max(longest, 256).bit_length()  # few sizes, so that the cache serves growing requests
    return _angles(positions, spec.head_dim_qk, spec.rope_scale, spec.rope_theta)


def _problem(call: Call, out: Tensor, lse: Tensor) -> Problem:
    spec, heads = call.spec, call.spec.num_qo_heads
    k, v, table = call.paged()
    q_start, q_len = _bounds(call.qo.indptr, len(call.q))
    kv_start, pages = _bounds(table.indptr, len(table.indices))
    last = np.minimum(table.last_page_len.numpy().astype(np.int64), table.page_size)
    kv_len = np.where((pages > 0) & (len(k) > 0), np.maximum((pages - 1) * table.page_size + last, 0), 0)
    mask, mask_start = _mask_arrays(call.mask)
    return Problem(
        q=_flat(call.q),
        k=_flat(k),
        v=_flat(v),
        out=_flat(out),
        lse=lse.view(-1).numpy(),
        q_strides=_strides(call.q),
        k_strides=_strides(k),
        v_strides=_strides(v),
        out_strides=_strides(out),
        q_start=q_start,
        q_len=q_len,
        kv_start=kv_start,
        kv_len=kv_len,
        kv_indices=table.indices.contiguous().numpy(),
        page_size=table.page_size,
        num_pages=len(k),
        num_kv_heads=spec.num_kv_heads,
        group=spec.group_size,
        dim_qk=spec.head_dim_qk,
        dim_vo=spec.head_dim_vo,
        scale=(_spread(call.q_scale, heads) * _spread(call.k_scale, heads) * spec.sm_scale * LOG2E).numpy(),
        v_scale=_spread(call.v_scale, heads).numpy(),
        slopes=(spec.alibi_slopes() * LOG2E).numpy() if spec.pos_encoding == "ALIBI" else _NONE,
        sinks=(call.sinks.float() * LOG2E).numpy() if call.sinks is not None else _NONE,
        mask=mask,
        mask_start=mask_start,
        cap=float(spec.logits_soft_cap * LOG2E),
        causal=spec.causal,
        window=spec.window_left,
        rope=_rope(spec, q_len, kv_len),
    )


def _stream(p: Problem, requests: np.ndarray, name: str) -> None:
    programs = 4 * numba.get_num_threads()
    rows = p.num_kv_heads * -(-int(p.q_len[requests].max()) * p.group // ROWS) * ROWS
    part_acc = np.empty((2 * programs, rows * p.dim_vo), np.float32)
    part_m, part_l = np.empty((2 * programs, rows), np.float32), np.empty((2 * programs, rows), np.float32)
    launch(stream, name, p, requests, programs, part_acc, part_m, part_l)


def _tile(p: Problem, requests: np.ndarray, name: str) -> None:
    step = max(1, PANEL * PANELS // p.group)
    found = [(b, i, min(i + step, int(p.q_len[b]))) for b in requests.tolist() for i in range(0, int(p.q_len[b]), step)]
    b, i0, i1 = np.array(found, np.int64).T
    end = p.kv_len[b] - p.q_len[b] + i1 if p.causal else p.kv_len[b]
    begin = np.maximum(p.kv_len[b] - p.q_len[b] + i0 - p.window, 0) if p.window >= 0 else 0
    costliest = np.argsort(-(end - begin) * (i1 - i0), kind="stable")
    tiles = np.stack([b, np.zeros_like(b), i0, i1], 1)[costliest]
    items = np.repeat(tiles, p.num_kv_heads, 0)
    items[:, 1] = np.tile(np.arange(p.num_kv_heads), len(tiles))
    launch(tile, name, p, items, numba.get_num_threads())


def attend(call: Call, out: Tensor, lse: Tensor | None) -> None:
    call = call.plain()
    spec = call.spec
    # fp8 outputs, and strides that are not plain, go through a copy.
    plain = out.dtype in FLOATS and out.stride(-1) == 1
    direct = out if plain else torch.empty(out.shape)
    sums = lse if lse is not None and lse.is_contiguous() else torch.empty(out.shape[:2])
    p = _problem(call, direct, sums)
    if p.q_len.sum() < len(call.q):  # rows that belong to no request
        direct.zero_()
        sums.fill_(-torch.inf)
    name = " x ".join(str(t).removeprefix("torch.") for t in (spec.q_dtype, spec.kv_dtype))
    if direct.dtype != spec.q_dtype:
        name += f" to {str(direct.dtype).removeprefix('torch.')}"
    # Keys that have to be rotated are, in tiles; otherwise few rows read them in place.
    tiled = p.q_len > (0 if len(p.rope) or spec.batch_invariant else STREAMED_ROWS // p.group)
    streamed = np.flatnonzero(~tiled & (p.q_len > 0))
    if len(streamed):
        _stream(p, streamed, name)
    if tiled.any():
        _tile(p, np.flatnonzero(tiled), name)
    if direct is not out:
        out.copy_(direct)
    if lse is not None and sums is not lse:
        lse.copy_(sums)


class _Cpu(Family):
    name = "cpu"
    computes = BASIC | frozenset({
        "causal", "window_left", "custom_mask", "items", "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta",
        "slopes", "sinks", "latent", "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        return declines(spec, device, max_q_len)

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        attend(call, out, lse)
        return None


FAMILY = _Cpu()
