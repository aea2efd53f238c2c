"""Attention in Triton: every layer that `AttentionSpec` admits, on any GPU that Triton compiles for.

The family that always works. `attention.py` has the kernel, over `line.py` and `tile.py`; `config.py` what it is
compiled for; `launch.py` how it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.definition.spec import LOG2E, AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.family import BASIC, Family
from quire.kernels.gpu.launch import INTERPRETED, Launcher, Repeat, into, reach, split_scales, steps
from quire.kernels.rope import rope_frequencies
from quire.kernels.triton import kernel
from quire.kernels.triton.config import Config, Machine, Tuning, parts, product_types, tune

_UNIT = 512  # keys between two cuts in batch-invariant mode


def declines(spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    if INTERPRETED:
        return None if device.type == "cpu" else "it is interpreted, on the CPU"
    if device.type != "cuda":
        return f"it needs a GPU, or TRITON_INTERPRET=1, and does not compute on {device.type}"
    return None


@lru_cache(maxsize=16)
def _machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return Machine(processors=2, shared_memory=1 << 18, fp8=False, hip=False, wgmma=True)
    p = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared_memory = getattr(p, "shared_memory_per_block_optin", 1 << 16)
    fp8, wgmma = not hip and (p.major, p.minor) >= (8, 9), not hip and p.major == 9
    return Machine(p.multi_processor_count, shared_memory, fp8, hip, wgmma)


def _programs(spec: AttentionSpec, block_m: int, on: Machine) -> int:
    """Programs that share a line: as many as multiprocessors hold at a time, fewer where tiles are large."""
    return on.processors * (2 if block_m * spec.head_dim_vo <= 64 * 128 and not spec.latent else 1)


def _block_m(spec: AttentionSpec, rows: int, on: Machine) -> int:
    """Query rows in a tile, for requests of about so many."""
    if spec.latent:
        rows = spec.group_size if spec.batch_invariant else rows
        return min(_latent_rows(spec, on), max(16, triton.next_power_of_2(rows)))
    width = max(spec.head_dim_qk, spec.head_dim_vo)
    if spec.batch_invariant:
        return 16 if spec.q_dtype == torch.float32 or width > 256 else 32 if spec.pos_encoding == "ROPE_LLAMA" else 64
    most = 16 if spec.q_dtype == torch.float32 or width > 256 else 32 if spec.pos_encoding == "ROPE_LLAMA" else 128
    return min(most, max(16, triton.next_power_of_2(rows)))


def _latent_rows(spec: AttentionSpec, on: Machine) -> int:
    """The most rows in a tile of a latent layer. Each tile reads all keys, so that rows are worth some registers that
    spill between the loops over them; with fp8, and with a second accumulator, they would within.
    """
    if on.hip or spec.q_dtype == torch.float32:
        return 16
    return 64 if on.wgmma and spec.kv_dtype.itemsize == 2 and not spec.batch_invariant else 32


def scratch(spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, keys: int) -> int:
    """Bytes for parts of tiles: see `quire.kernels.registry`."""
    on = _machine(device)
    if spec.batch_invariant:
        rows = max_q_len * spec.group_size
        slots = _slots(spec, 0, on, batch_size, keys) if 0 < rows <= _block_m(spec, rows, on) else 0
        return slots * rows * (spec.head_dim_vo + 2) * 4
    rows = max_q_len * spec.group_size or 64
    sizes = [m for m in (16, 32, 64) if m <= _block_m(spec, rows, on)]
    return max(_slots(spec, m, on) * min(rows, m) for m in sizes) * (spec.head_dim_vo + 2) * 4


def _slots(spec: AttentionSpec, block_m: int, on: Machine, batch_size: int = 0, keys: int = 0) -> int:
    """Parts of tiles that have to be kept: two for each program or, to be batch-invariant, all units of the line."""
    if spec.batch_invariant:
        return spec.num_kv_heads * (-(-keys // _UNIT) + batch_size)
    return 2 * _programs(spec, block_m, on)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a batch meets the machine, and the kernel for it: what `_cut` finds once for each shape of a call. Parts of
    tiles have `part_rows` rows.
    """

    c: Config
    programs: int
    part_rows: int
    launch: Launcher


@lru_cache(maxsize=1024)
def _launcher(c: Config, num_warps: int, num_stages: int) -> Launcher:
    return Launcher(kernel.attend, c, num_warps=num_warps, num_stages=num_stages)


@lru_cache(maxsize=4096)
def _cut(
    spec: AttentionSpec,
    device: torch.device,
    page_size: int,
    tokens: int,
    batch: int,
    max_q_len: int,
    flags: tuple[bool, ...],
) -> Cut:
    on = _machine(device)
    rows = (max_q_len or -(-tokens // max(batch, 1))) * spec.group_size
    block_m = _block_m(spec, rows, on)
    tiles = tokens * spec.group_size // block_m + batch
    split = rows <= (512 if spec.latent else 64) or tiles * spec.num_kv_heads < 2 * on.processors
    if spec.batch_invariant:  # one tile per request, or there would be parts without a bound that is known here
        split = 0 < max_q_len * spec.group_size <= block_m
    elif split:
        block_m = min(block_m, 64)
    tuning = tune(spec, block_m, page_size > 0, on.shared_memory)
    programs = _programs(spec, block_m, on) if split else max(tiles * spec.num_kv_heads, 1)
    part_rows = min(max_q_len * spec.group_size or block_m, block_m)
    c = _config(spec, page_size, tuning, split, max(16, min(1024, triton.next_power_of_2(batch))), flags, on)
    return Cut(c, programs, part_rows, _launcher(c, tuning.num_warps, tuning.num_stages))


@lru_cache(maxsize=1024)
def _config(
    spec: AttentionSpec, page_size: int, tuning: Tuning, split: bool, scan: int, flags: tuple[bool, ...], on: Machine
) -> Config:
    q_scale, k_scale, v_scale, lse, reversing, far, by_length = flags
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
        invariant=spec.batch_invariant,
        unit=_UNIT if spec.batch_invariant else tuning.block_n,
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
        items=spec.items,
        latent=spec.latent,
        keys_first=spec.latent and tuning.block_m < 64 and spec.kv_dtype.itemsize > 1,
        reload=spec.latent and spec.kv_dtype.itemsize == 1,
        far=far,
        by_length=by_length,
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
def _slopes(spec: AttentionSpec, device: torch.device) -> Tensor:
    return (spec.alibi_slopes() * LOG2E).to(device)


def _bytes(x: Tensor, on: Machine) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 and not on.fp8 else x


def attend(call: Call, out: Tensor, lse: Tensor | None) -> Repeat | None:
    return into(_launch, call, out, lse)


def _launch(call: Call, out: Tensor, lse: Tensor | None) -> Repeat | None:
    spec, device = call.spec, out.device
    on = _machine(device)
    q, k, v, kv = call.q, call.k, call.v, call.kv
    if k.element_size() == 1:
        q, k, v = q if q.element_size() > 1 else q.half(), _bytes(k, on), _bytes(v, on)
    page_size, indices, lengths, by_length, entries = call.table()
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    scale = spec.sm_scale * LOG2E * q_gain * k_gain
    far = max(reach(k), reach(v), 0 if call.k_pe is None else reach(call.k_pe)) >= 1 << 31
    scaled = (x is not None for x in (q_scale, k_scale, v_scale))
    flags = (*scaled, lse is not None, scale <= 0, far, by_length)
    tokens, batch = q.shape[0], call.qo.indptr.shape[0] - 1
    cut = _cut(spec, device, page_size, tokens, batch, call.max_q_len, flags)
    slots, part, arrivals = 0, None, None
    if cut.c.split:
        slots = _slots(spec, cut.c.block_m, on, batch, entries * max(page_size, 1))
        part = call.scratch_for(slots * cut.part_rows * (spec.head_dim_vo + 2))
        arrivals = call.zeros_for(cut.programs)
    mask, items, q_pe, k_pe = call.mask, call.items, call.q_pe, call.k_pe
    if k_pe is not None:
        k_pe = _bytes(k_pe, on)
    repeat = cut.launch(
        cut.programs,
        (q, q_pe, k, v, k_pe, out, lse, call.sinks),
        (
            part,
            arrivals,
            call.qo.indptr,
            kv.indptr,
            lengths,
            indices,
            mask.bits if mask is not None else None,
            mask.indptr if mask is not None else None,
            items.prefix_lens if items is not None else None,
            items.positions if items is not None else None,
            _slopes(spec, device) if cut.c.alibi else None,
            rope_frequencies(spec.head_dim_qk, spec.rope_scale, spec.rope_theta, 1.0, 4.0, 0.0, device)
            if cut.c.rope
            else None,
            q_scale,
            k_scale,
            v_scale,
        ),
        (
            mask.bits.shape[0] if mask is not None else 0,
            items.length if items is not None else 0,
            slots,
            cut.part_rows,
            batch,
            tokens,
            entries,
            k.shape[0],
            spec.window_left,
            scale,
            v_gain,
            float(call.pe_gain),
            spec.logits_soft_cap * LOG2E,
        ),
        (
            *q.stride()[:2],
            *(q_pe.stride()[:2] if q_pe is not None else (0, 0)),
            *steps(k),
            *steps(v),
            *(k_pe.stride()[:2] if k_pe is not None else (0, 0)),
            *out.stride()[:2],
        ),
    )
    # What is to be repeated must read the caller's own tensors.
    own = q is call.q and q_scale is k_scale is v_scale is None and (slots == 0 or part is call.scratch)
    return repeat if own else None


class _Triton(Family):
    name = "triton"
    computes = BASIC | frozenset({
        "causal", "window_left", "custom_mask", "items", "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta",
        "slopes", "sinks", "latent", "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        return declines(spec, device, max_q_len)

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return scratch(spec, device, max_q_len, batch_size, kv_tokens)

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        return attend(call, out, lse)


FAMILY = _Triton()
