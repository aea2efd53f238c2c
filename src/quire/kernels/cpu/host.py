"""The host side of attention on the CPU: which layers it computes, a call's `Params`, and the choice of kernels.

Requests of few query rows go to `stream`, which reads keys and values in place; requests of many query rows, to `tile`.
The choice depends on the layer and the request alone, not on other requests. All arithmetic is in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.definition.spec import FLOATS, LOG2E, AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.cpu.jit import launch, num_threads
from quire.kernels.cpu.mask import MASKS, mask_of
from quire.kernels.cpu.params import Params
from quire.kernels.cpu.schedule import ROWS, query_tiles
from quire.kernels.cpu.simd import f32
from quire.kernels.cpu.stream import stream
from quire.kernels.cpu.tile import tile
from quire.kernels.family import BASIC, Family

# The most query rows per KV head of a request that `stream` computes.
STREAMED_ROWS = 16
# The storage type of each dtype, in the order of `simd.STORAGE_TYPES`.
_STORAGE = {
    torch.float32: np.float32,
    torch.bfloat16: np.int16,
    torch.float16: np.uint16,
    torch.float8_e4m3fn: np.int8,
    torch.float8_e5m2: np.uint8,
}
_INDEX = {dtype: index for index, dtype in enumerate(_STORAGE)}
_STREAMED = {dtype: f"keys and values of {str(dtype).removeprefix('torch.')}" for dtype in _STORAGE}
_NONE = np.zeros(0, np.float32)


def _flat(x: Tensor) -> np.ndarray:
    """The bytes of all elements that a tensor's strides reach."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((span,), (1,)).view(torch.uint8).numpy()


def _strides(x: Tensor) -> np.ndarray:
    """int64: all strides but the last one, which is 1, in elements."""
    return np.array(x.stride()[:-1], np.int64)


def _per_head(scale: float | Tensor, heads: int) -> np.ndarray:
    """A scale, which is a number or a tensor with one per (KV) head, as float32 [heads]."""
    if not isinstance(scale, Tensor):
        return np.full(heads, scale, np.float32)
    return scale.float().reshape(-1).repeat_interleave(heads // scale.numel()).numpy()


def _starts_and_lengths(indptr: Tensor, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The start and the length of each request, int64 [batch_size], clamped to [0, size] whatever the table says."""
    offsets = np.clip(indptr.numpy().astype(np.int64), 0, size)
    return offsets[:-1], np.maximum(offsets[1:] - offsets[:-1], 0)


@lru_cache(maxsize=8)
def _rope_table(positions: int, head_dim: int, rope_scale: float, rope_theta: float) -> np.ndarray:
    """Cosines, then sines, of the head_dim / 2 angles of each position: float32 [positions * head_dim]."""
    steps = np.arange(head_dim // 2) / (head_dim // 2)
    angles = np.outer(np.arange(positions) / rope_scale, rope_theta**-steps)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32).reshape(-1)


def _rope(spec: AttentionSpec, q_len: np.ndarray, kv_len: np.ndarray) -> np.ndarray:
    """The table for all positions of a batch; empty without ROPE_LLAMA."""
    if spec.pos_encoding != "ROPE_LLAMA":
        return _NONE
    # Positions go from kv_len - q_len, which is negative where there are more queries than keys, to kv_len.
    longest = int(np.maximum(kv_len, q_len - kv_len).max(initial=0))
    # The number is a power of two, so that the cached table serves growing requests.
    positions = 1 << max(longest, 256).bit_length()
    return _rope_table(positions, spec.head_dim_qk, spec.rope_scale, spec.rope_theta)


def _params(call: Call, out: Tensor, lse: Tensor) -> Any:
    """A call's `Params` for kernels that write to out, [tokens, heads, head_dim_vo], and lse, contiguous float32."""
    spec, heads = call.spec, call.spec.num_qo_heads
    k, v, table = call.paged()
    q_start, q_len = _starts_and_lengths(call.qo.indptr, len(call.q))
    kv_start, pages = _starts_and_lengths(table.indptr, len(table.indices))
    last = np.minimum(table.last_page_len.numpy().astype(np.int64), table.page_size)
    kv_len = np.where((pages > 0) & (len(k) > 0), np.maximum((pages - 1) * table.page_size + last, 0), 0)
    return Params(
        q=_flat(call.q),
        k=_flat(k),
        v=_flat(v),
        out=_flat(out),
        q_storage=_INDEX[call.q.dtype],
        kv_storage=_INDEX[k.dtype],
        out_storage=_INDEX[out.dtype],
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
        scale=_per_head(call.q_scale, heads) * _per_head(call.k_scale, heads) * f32(spec.sm_scale) * f32(LOG2E),
        v_scale=_per_head(call.v_scale, heads),
        slopes=(spec.alibi_slopes() * LOG2E).numpy() if spec.pos_encoding == "ALIBI" else _NONE,
        sinks=(call.sinks.float() * LOG2E).numpy() if call.sinks is not None else _NONE,
        cap=float(spec.logits_soft_cap * LOG2E),
        rope=_rope(spec, q_len, kv_len),
        **mask_of(call)._asdict(),
    )


def _stream(p: Any, requests: np.ndarray, kv_dtype: torch.dtype) -> None:
    programs = 4 * num_threads()
    rows = p.num_kv_heads * -(-int(p.q_len[requests].max()) * p.group // ROWS) * ROWS
    acc = np.empty((2 * programs, rows * p.dim_vo), np.float32)
    m, l = np.empty((2 * programs, rows), np.float32), np.empty((2 * programs, rows), np.float32)
    k, v = (x.view(_STORAGE[kv_dtype]) for x in (p.k, p.v))
    launch(stream, _STREAMED[kv_dtype], p, k, v, requests, programs, acc, m, l)


class _Cpu(Family):
    name = "cpu"
    computes = BASIC | MASKS | frozenset({
        "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta", "slopes", "sinks", "latent", "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        return None if device.type == "cpu" else f"it computes on the CPU, not on {device.type}"

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        """Compute a call into out, [tokens, num_qo_heads, head_dim_vo], and, unless it is None, lse, float32 [tokens,
        num_qo_heads]. Rows of out that belong to no request become 0, and those of lse -inf.
        """
        call = call.expanded()
        spec = call.spec
        # Kernels write neither fp8 nor rows with a stride between elements: such outputs are copied from a new tensor.
        writable = out.dtype in FLOATS and out.stride(-1) == 1
        target = out if writable else torch.empty(out.shape)
        target_lse = lse if lse is not None and lse.is_contiguous() else torch.empty(out.shape[:2])
        p = _params(call, target, target_lse)
        # Rows that belong to no request get zeros.
        if p.q_len.sum() < len(call.q):
            target.zero_()
            target_lse.fill_(-torch.inf)
        # Only `tile` rotates keys, and only its results do not depend on how work is divided among programs.
        tiled = p.q_len > (0 if len(p.rope) or spec.batch_invariant else STREAMED_ROWS // p.group)
        streamed = np.flatnonzero(~tiled & (p.q_len > 0))
        if len(streamed):
            _stream(p, streamed, spec.kv_dtype)
        if tiled.any():
            launch(tile, "all dtypes", p, query_tiles(p, np.flatnonzero(tiled)), num_threads())
        if target is not out:
            out.copy_(target)
        if lse is not None and target_lse is not lse:
            lse.copy_(target_lse)
        return None


FAMILY = _Cpu()
