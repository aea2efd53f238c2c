"""The Triton family: attention of every layer that `AttentionSpec` admits, on any GPU that Triton compiles for.

This file stands between a call and `kernel.py`: it chooses what the kernel is compiled for and how many programs run,
and launches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from quire.definition.spec import LOG2E, AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.family import BASIC
from quire.kernels.gpu.launch import (
    GpuFamily,
    Launcher,
    extent_in_elements,
    kv_strides,
    split_scales,
)
from quire.kernels.gpu.triton_internals import INTERPRETED
from quire.kernels.rope import rope_frequencies
from quire.kernels.triton import kernel
from quire.kernels.triton.config import INVARIANT_SPLIT, AttentionConfig, Machine, choose_block_m, make_config, tune
from quire.kernels.triton.mask import MASKS, mask_of


@lru_cache(maxsize=16)
def _machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return Machine(num_sms=2, shared_memory=1 << 18, fp8=False, hip=False, wgmma=True)
    p = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared_memory = getattr(p, "shared_memory_per_block_optin", 1 << 16)
    fp8, wgmma = not hip and (p.major, p.minor) >= (8, 9), not hip and p.major == 9
    return Machine(p.multi_processor_count, shared_memory, fp8, hip, wgmma)


def _num_programs(spec: AttentionSpec, block_m: int, machine: Machine) -> int:
    """Programs of a split-KV launch: as many as run at a time, which are fewer with large tiles."""
    return machine.num_sms * (2 if block_m * spec.head_dim_vo <= 64 * 128 and not spec.latent else 1)


def _num_slots(spec: AttentionSpec, block_m: int, machine: Machine, batch: int = 0, keys: int = 0) -> int:
    """Slots for partial states: two for each program or, in batch-invariant mode, one for each work unit."""
    if spec.batch_invariant:
        return spec.num_kv_heads * (-(-keys // INVARIANT_SPLIT) + batch)
    return 2 * _num_programs(spec, block_m, machine)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How calls of one layer and one batch size are launched. Slots for partial states have `slot_rows` rows."""

    c: AttentionConfig
    programs: int
    slot_rows: int
    launch: Launcher


@lru_cache(maxsize=1024)
def _launcher(c: AttentionConfig, num_warps: int, num_stages: int) -> Launcher:
    return Launcher(kernel.attend, c, num_warps=num_warps, num_stages=num_stages)


@lru_cache(maxsize=4096)
def _launch_config(
    spec: AttentionSpec, device: torch.device, page_size: int, tokens: int, batch: int, max_q_len: int,
    flags: tuple[bool, ...],
) -> LaunchConfig:  # fmt: skip
    machine = _machine(device)
    rows = (max_q_len or -(-tokens // max(batch, 1))) * spec.group_size
    block_m = choose_block_m(spec, rows, machine)
    tiles = tokens * spec.group_size // block_m + batch
    split_kv = rows <= (512 if spec.latent else 64) or tiles * spec.num_kv_heads < 2 * machine.num_sms
    # Requests of several tiles would need more slots than is known here.
    if spec.batch_invariant:
        split_kv = 0 < max_q_len * spec.group_size <= block_m
    elif split_kv:
        block_m = min(block_m, 64)
    tuning = tune(spec, block_m, page_size > 0, machine.shared_memory)
    programs = _num_programs(spec, block_m, machine) if split_kv else max(tiles * spec.num_kv_heads, 1)
    slot_rows = min(max_q_len * spec.group_size or block_m, block_m)
    scan = max(16, min(1024, triton.next_power_of_2(batch)))
    c = make_config(spec, page_size, tuning, split_kv, scan, flags, machine)
    return LaunchConfig(c, programs, slot_rows, _launcher(c, tuning.num_warps, tuning.num_stages))


@lru_cache(maxsize=64)
def _slopes(spec: AttentionSpec, device: torch.device) -> Tensor:
    return (spec.alibi_slopes() * LOG2E).to(device)


def _storage(x: Tensor, machine: Machine) -> Tensor:
    """A cache as kernels read it: fp8 as bytes where the GPU does not convert it."""
    return x.view(torch.uint8) if x.element_size() == 1 and not machine.fp8 else x


class _Triton(GpuFamily):
    name = "triton"
    computes = BASIC | MASKS | frozenset({
        "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta", "slopes", "sinks", "latent", "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        if INTERPRETED:
            return None if device.type == "cpu" else "it is interpreted, on the CPU"
        if device.type != "cuda":
            return f"it needs a GPU, or TRITON_INTERPRET=1, and does not compute on {device.type}"
        return None

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        machine, rows = _machine(device), max_q_len * spec.group_size
        row_bytes = (spec.head_dim_vo + 2) * 4
        if spec.batch_invariant:
            split_kv = 0 < rows <= choose_block_m(spec, rows, machine)
            return _num_slots(spec, 0, machine, batch_size, kv_tokens) * rows * row_bytes if split_kv else 0
        rows = rows or 64
        sizes = [m for m in (16, 32, 64) if m <= choose_block_m(spec, rows, machine)]
        return max(_num_slots(spec, m, machine) * min(rows, m) for m in sizes) * row_bytes

    def launch(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        spec, device = call.spec, out.device
        machine = _machine(device)
        q, k = call.q, call.k
        v, kv = call.v, call.kv
        q_pe, k_pe = call.q_pe, call.k_pe
        if k.element_size() == 1:
            q, k, v = q if q.element_size() > 1 else q.half(), _storage(k, machine), _storage(v, machine)
        page_size, indices, lengths, has_kv_lens, entries = call.table()
        (q_scale, k_scale, v_scale), (q_scales, k_scales, v_scales) = split_scales(call)
        sm_scale = spec.sm_scale * LOG2E * q_scale * k_scale
        extent = max(extent_in_elements(k), extent_in_elements(v), 0 if k_pe is None else extent_in_elements(k_pe))
        per_head = (q_scales is not None, k_scales is not None, v_scales is not None)
        flags = (*per_head, lse is not None, sm_scale <= 0, extent >= 1 << 31, has_kv_lens)
        tokens, batch = q.shape[0], call.qo.indptr.shape[0] - 1
        config = _launch_config(spec, device, page_size, tokens, batch, call.max_q_len, flags)
        num_slots, partials = 0, None
        arrivals = None
        if config.c.split_kv:
            num_slots = _num_slots(spec, config.c.block_m, machine, batch, entries * max(page_size, 1))
            partials = call.float_workspace_for(num_slots * config.slot_rows * (spec.head_dim_vo + 2))
            arrivals = call.int_workspace_for(config.programs)
        slopes = inv_freq = None
        mask_tensors, mask_numbers = mask_of(call)
        if config.c.alibi:
            slopes = _slopes(spec, device)
        if config.c.rope:
            inv_freq = rope_frequencies(spec.head_dim_qk, spec.rope_scale, spec.rope_theta, 1.0, 4.0, 0.0, device)
        q_pe_strides: tuple[int, ...] = (0, 0)
        k_pe_strides: tuple[int, ...] = (0, 0)
        if q_pe is not None and k_pe is not None:
            k_pe = _storage(k_pe, machine)
            q_pe_strides, k_pe_strides = q_pe.stride()[:2], k_pe.stride()[:2]
        replay = config.launch(
            config.programs,
            (q, q_pe, k, v, k_pe, out, lse, call.sinks),
            (
                partials, arrivals, call.qo.indptr, kv.indptr, lengths, indices,
                *mask_tensors, slopes, inv_freq, q_scales, k_scales, v_scales,
            ),
            (
                *mask_numbers, num_slots, config.slot_rows, batch, tokens, entries, k.shape[0],
                sm_scale, v_scale, float(call.pe_gain), spec.logits_soft_cap * LOG2E,
            ),
            (*q.stride()[:2], *q_pe_strides, *kv_strides(k), *kv_strides(v), *k_pe_strides, *out.stride()[:2]),
        )  # fmt: skip
        # A replay gets addresses from the caller: it must not need tensors that were made here.
        own = (
            q is call.q
            and q_scales is k_scales is v_scales is None
            and (num_slots == 0 or partials is call.float_workspace)
        )
        return replay if own else None


FAMILY = _Triton()
