"""Attention in Triton: every layer that `AttentionSpec` admits, on any GPU that Triton compiles for.

The family that always works. `attention.py` has the kernels, `config.py` what they are compiled for.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

from quire.attention.pages import PageTable
from quire.attention.spec import FLOATS, LOG2E, AttentionSpec
from quire.kernels.registry import Call
from quire.kernels.triton import attention
from quire.kernels.triton.config import Config, Machine, Tuning, parts, product_types, tune

INTERPRETED = isinstance(attention.attend, InterpretedFunction)  # TRITON_INTERPRET=1: on the CPU, slowly


def declines(spec: AttentionSpec, device: torch.device) -> str | None:
    if INTERPRETED:
        return None if device.type == "cpu" else "it is interpreted, on the CPU"
    if device.type != "cuda":
        return f"it needs a GPU, or TRITON_INTERPRET=1, and does not compute on {device.type}"
    if spec.pos_encoding == "ROPE_LLAMA" and spec.head_dim_qk > 256:
        return f"it rotates heads up to 256, not {spec.head_dim_qk}"
    return None


@lru_cache(maxsize=16)
def _machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return Machine(processors=2, shared_memory=1 << 17, fp8=False, hip=False)
    p = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared_memory = getattr(p, "shared_memory_per_block_optin", 1 << 16)
    return Machine(p.multi_processor_count, shared_memory, not hip and (p.major, p.minor) >= (8, 9), hip)


def _block_m(spec: AttentionSpec, rows: int) -> int:
    """Query rows in a tile, for requests of about so many."""
    width = max(spec.head_dim_qk, spec.head_dim_vo)
    most = 16 if spec.q_dtype == torch.float32 or width > 256 else 32 if spec.pos_encoding == "ROPE_LLAMA" else 128
    return min(most, max(16, triton.next_power_of_2(rows)))


@lru_cache(maxsize=1024)
def _shape(
    spec: AttentionSpec, page_size: int, tuning: Tuning, split: bool, scan: int, flags: tuple[bool, ...], on: Machine
) -> Config:
    q_scale, k_scale, v_scale, lse, reversing = flags
    d1, d2 = parts(spec.head_dim_qk)
    qk_type, pv_type, precision = product_types(spec, INTERPRETED, on.hip)
    normed = qk_type == tl.float16 and spec.q_dtype == torch.bfloat16
    cap, alibi = spec.logits_soft_cap > 0, spec.pos_encoding == "ALIBI"
    return Config(
        heads=spec.num_kv_heads,
        group=spec.group_size,
        dim_qk=spec.head_dim_qk,
        dim_vo=spec.head_dim_vo,
        d1=d1,
        d2=d2,
        dv=max(16, triton.next_power_of_2(spec.head_dim_vo)),
        page_size=page_size,
        block_m=tuning.block_m,
        block_n=tuning.block_n,
        split=split,
        scan=scan,
        qk_type=qk_type,
        pv_type=pv_type,
        precision=precision,
        e4m3=spec.kv_dtype == torch.float8_e4m3fn and not on.fp8,
        e5m2=spec.kv_dtype == torch.float8_e5m2 and not on.fp8,
        causal=spec.causal,
        window=spec.window_left >= 0,
        cap=cap,
        alibi=alibi,
        rope=spec.pos_encoding == "ROPE_LLAMA",
        mask=spec.custom_mask,
        sinks=spec.sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        shaped=cap or alibi or q_scale or k_scale or normed or reversing,
        normed=normed,
        lse=lse,
        pad_heads=triton.next_power_of_2(spec.num_qo_heads),
    )


@lru_cache(maxsize=64)
def _turns(head_dim: int, rope_scale: float, rope_theta: float, device: torch.device) -> Tensor:
    half = head_dim // 2
    steps = torch.arange(half, dtype=torch.float64) / half
    return (rope_theta**-steps / rope_scale / (2 * math.pi)).to(device)


@lru_cache(maxsize=64)
def _slopes(spec: AttentionSpec, device: torch.device) -> Tensor:
    return (spec.alibi_slopes() * LOG2E).to(device)


def _split_scale(scale: float | Tensor, heads: int) -> tuple[float, Tensor | None]:
    """A scale as a number, and per head where it is a tensor (whose values nobody waits for)."""
    if isinstance(scale, Tensor):
        return 1.0, scale.float().reshape(-1).expand(heads).contiguous()
    return float(scale), None


def _bytes(x: Tensor, on: Machine) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 and not on.fp8 else x


def attend(call: Call, out: Tensor, lse: Tensor | None) -> None:
    spec = call.spec
    plain = out.dtype in FLOATS and out.stride(-1) == 1
    direct = out if plain else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    sums = lse if lse is None or lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    _launch(call, spec, direct, sums)
    if direct is not out:
        out.copy_(direct)
    if lse is not None and sums is not None and sums is not lse:
        lse.copy_(sums)


def _launch(call: Call, spec: AttentionSpec, out: Tensor, lse: Tensor | None) -> None:
    on = _machine(out.device)
    q = call.q if call.q.element_size() > 1 else call.q.half()
    k, v = _bytes(call.k, on), _bytes(call.v, on)
    if isinstance(call.kv, PageTable):
        page_size, indices, last_page_len = call.kv.page_size, call.kv.indices, call.kv.last_page_len
        entries = len(indices) if len(k) else 0
        k_strides, v_strides = k.stride()[:3], v.stride()[:3]
    else:
        page_size, indices, last_page_len, entries = 0, call.kv.indptr, call.kv.indptr, len(k)
        k_strides, v_strides = (k.stride(0), 0, k.stride(1)), (v.stride(0), 0, v.stride(1))
    batch = call.qo.batch_size
    rows = -(-len(q) // max(batch, 1)) * spec.group_size
    tuning = tune(spec, _block_m(spec, rows), page_size > 0, on.shared_memory)
    tiles = len(q) * spec.group_size // tuning.block_m + batch
    split = rows <= 64 or tiles * spec.num_kv_heads < 2 * on.processors
    programs = 2 * on.processors if split else max(tiles * spec.num_kv_heads, 1)
    (q_gain, q_scale), (k_gain, k_scale), (v_gain, v_scale) = (
        _split_scale(call.q_scale, spec.num_qo_heads),
        _split_scale(call.k_scale, spec.num_kv_heads),
        _split_scale(call.v_scale, spec.num_kv_heads),
    )
    scale = spec.sm_scale * LOG2E * q_gain * k_gain
    flags = (q_scale is not None, k_scale is not None, v_scale is not None, lse is not None, scale <= 0)
    scan = max(16, min(1024, triton.next_power_of_2(batch)))
    c = _shape(spec, page_size, tuning, split, scan, flags, on)
    part = torch.empty(2 * programs * tuning.block_m * (spec.head_dim_vo + 2) if split else 0, device=out.device)
    part_ml = part[2 * programs * tuning.block_m * spec.head_dim_vo :]
    mask, tables = call.mask, (call.qo.indptr, call.kv.indptr, last_page_len)
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
    attention.attend[(programs,)](
        q,
        k,
        v,
        out,
        lse,
        part,
        part_ml,
        *tables,
        indices,
        mask.bits if mask else None,
        mask.indptr if mask else None,
        len(mask.bits) if mask else 0,
        call.sinks,
        _slopes(spec, out.device) if c.alibi else None,
        q_scale,
        k_scale,
        v_scale,
        *q.stride()[:2],
        *k_strides,
        *v_strides,
        *out.stride()[:2],
        batch,
        len(q),
        entries,
        len(k),
        scale,
        v_gain,
        spec.logits_soft_cap * LOG2E,
        spec.window_left,
        _turns(spec.head_dim_qk, spec.rope_scale, spec.rope_theta, out.device) if c.rope else None,
        c,
        **options,
    )
    if split:
        most = min(tuning.block_m, rows if len(q) == batch else tuning.block_m)
        attention.merge[(programs, most)](
            out,
            lse,
            part,
            part_ml,
            *tables,
            call.sinks,
            v_scale,
            *out.stride()[:2],
            batch,
            len(q),
            entries,
            spec.window_left,
            v_gain,
            programs,
            c,
            num_warps=1,
        )
