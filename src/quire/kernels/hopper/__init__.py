"""Decode for Hopper GPUs, written in Gluon: `decode.py` has the kernel, over `line.py` and `parts.py`; `latent.py` has
that for latent caches (MLA), `latent_call.py` what is between a call and it.

Its other layers are the common ones, over pages. Nobody has it without asking for it: see `quire.kernels.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from quire.attention.pages import PageTable
from quire.attention.spec import LOG2E, AttentionSpec
from quire.kernels.hopper import latent_call
from quire.kernels.hopper.decode import Config, decode
from quire.kernels.registry import Call
from quire.kernels.triton.launch import INTERPRETED, Launcher, Repeat, into, reach, split_scales

_ROWS = 64  # of a tile


def declines(spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return "it needs a Hopper GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper GPUs (sm_90)"
    if spec.latent:
        return latent_call.declines(spec)
    rows = max_q_len * spec.group_size
    if not 0 < rows <= _ROWS:
        return f"it decodes: at most {_ROWS} query rows per request and KV head" + (f", not {rows}" if rows else "")
    return _declines(spec)


def _declines(spec: AttentionSpec) -> str | None:
    if spec.items or spec.custom_mask or spec.pos_encoding != "NONE" or spec.batch_invariant:
        return "it knows no items, masks, position encodings, nor batch invariance"
    if spec.head_dim_qk not in (64, 128, 256) or spec.head_dim_vo != spec.head_dim_qk:
        return f"head_dim is 64, 128 or 256, not {spec.head_dim_qk} and {spec.head_dim_vo}"
    if spec.q_dtype not in (torch.float16, torch.bfloat16) or spec.kv_dtype != spec.q_dtype:
        return f"queries and caches are both float16 or both bfloat16, not {spec.q_dtype} and {spec.kv_dtype}"
    return None


@dataclass(frozen=True, slots=True)
class Tuning:
    """Keys of a block, blocks in the ring, programs on a multiprocessor, registers of a thread."""

    block: int
    stages: int
    programs: int
    registers: int


# The rings of a multiprocessor's programs fill its 227 KiB of shared memory.
_TUNINGS = {64: Tuning(128, 3, 2, 128), 128: Tuning(64, 3, 2, 128), 256: Tuning(64, 3, 1, 255)}


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(spec: AttentionSpec, device: torch.device) -> int:
    """As many as run at a time."""
    return _processors(device) * _TUNINGS[spec.head_dim_qk].programs


def scratch(spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, keys: int) -> int:
    """Bytes for parts of tiles: two slots for each program."""
    if spec.latent:
        return latent_call.scratch(spec, _processors(device), max_q_len)
    return 2 * _programs(spec, device) * max_q_len * spec.group_size * (spec.head_dim_vo + 2) * 4


@lru_cache(maxsize=1024)
def _launcher(c: Config) -> Launcher:
    return Launcher(decode, c, num_warps=4, maxnreg=_TUNINGS[c.dim].registers)


@lru_cache(maxsize=1024)
def _config(spec: AttentionSpec, page_size: int, batch: int, max_q_len: int, flags: tuple[bool, ...]) -> Config:
    tuning = _TUNINGS[spec.head_dim_qk]
    q_scale, k_scale, v_scale, lse, far = flags
    return Config(
        heads=spec.num_kv_heads,
        group=spec.group_size,
        dim=spec.head_dim_qk,
        page_size=page_size,
        block=tuning.block,
        stages=tuning.stages,
        scan=max(128, min(1024, triton.next_power_of_2(batch))),
        merge_rows=max(4, min(16, triton.next_power_of_2(max_q_len * spec.group_size))),
        causal=spec.causal and max_q_len > 1,
        window=spec.window_left >= 0,
        cap=spec.logits_soft_cap > 0,
        sinks=spec.sinks,
        far=far,
        lse=lse,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def attend(call: Call, out: Tensor, lse: Tensor | None) -> Repeat | None:
    """See `quire.kernels.registry`.

    Raises:
        ValueError: rows that are not in pages, or caches of which copies of 16 bytes cannot be made.
    """
    return into(_launch, call, out, lse)


def _launch(call: Call, out: Tensor, lse: Tensor | None) -> Repeat | None:
    if call.spec.latent:
        return latent_call.launch(call, out, lse, _processors(out.device))
    spec, kv, q, k, v = call.spec, call.kv, call.q, call.k, call.v
    if not isinstance(kv, PageTable):
        raise ValueError("no kernels for this call: hopper: keys and values must lie in pages")
    if any(x.data_ptr() & 15 or any(step & 15 for step in x.stride()[:-1]) for x in (k, v)):
        raise ValueError(
            "no kernels for this call: hopper: caches must be aligned to 16 bytes, their strides to 16 elements"
        )
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    tokens, batch, entries = q.shape[0], kv.indptr.shape[0] - 1, kv.indices.shape[0] if k.shape[0] else 0
    far = max(reach(k), reach(v)) >= 1 << 31
    flags = (q_scale is not None, k_scale is not None, v_scale is not None, lse is not None, far)
    c = _config(spec, kv.page_size, batch, call.max_q_len, flags)
    programs, rows = _programs(spec, out.device), call.max_q_len * spec.group_size
    slots = 2 * programs
    part, arrivals = call.scratch_for(slots * rows * (spec.head_dim_vo + 2), programs)
    repeat = _launcher(c)(
        programs,
        (q, None, k, v, None, out, lse, call.sinks),
        (part, arrivals, call.qo.indptr, kv.indptr, kv.last_page_len, kv.indices, q_scale, k_scale, v_scale),
        (
            slots,
            rows,
            batch,
            tokens,
            entries,
            k.shape[0],
            spec.window_left,
            spec.sm_scale * LOG2E * q_gain * k_gain,
            v_gain,
            spec.logits_soft_cap * LOG2E,
        ),
        (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2]),
    )
    # What is to be repeated must read the caller's own tensors.
    own = q_scale is k_scale is v_scale is None and part is call.scratch
    return repeat if own else None
