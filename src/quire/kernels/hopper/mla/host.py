"""The host side of MLA: which latent layers and calls it computes, tile sizes, and the launch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.pages import PageTable
from quire.definition.spec import LOG2E, AttentionSpec
from quire.kernels.call import Call
from quire.kernels.gpu.launch import Launcher, LaunchReplay, extent_in_elements, is_aligned, split_scales
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.epilogue import OutputConfig
from quire.kernels.hopper.mask import MaskConfig
from quire.kernels.hopper.mla.kernel import REGISTERS, LatentConfig, decode_latent, prefill_latent
from quire.kernels.hopper.mla.load import BLOCK_M
from quire.kernels.hopper.pipeline import PipelineConfig
from quire.kernels.hopper.schedule import ScheduleConfig, SpanConfig, scan_size
from quire.kernels.hopper.tile_scheduler import TileSchedulerConfig

# Query rows of a program's tile, and keys in a block.
_BLOCK_M, _BLOCK_N = BLOCK_M.value, 64
# A divisor of the number of multiprocessors, 132.
_MAX_PROGRAMS_PER_SPAN = 12
# The mean number of tiles per request from which `prefill_latent` computes a batch.
_MANY_TILES = 64
# The number of stages by head_dim_vo: stages and queries then fill the 227 KiB of shared memory.
_STAGES = {512: 2, 256: 4, 128: 7}
# Counters of arrivals, per program.
_COUNTERS = 6
# Slots for partial states of prefill, per program. They use the memory that decode uses for its slots.
_SLOTS = 2


def declines(spec: AttentionSpec, max_q_len: int) -> str | None:
    """Why the MLA kernel does not compute a latent layer; None if it does."""
    if spec.mask.depends_on_positions or spec.pos_encoding != "NONE" or spec.batch_invariant:
        return (
            "over latent caches it supports no windows, nor masks but causal, position encodings, nor batch invariance"
        )
    if spec.logits_soft_cap > 0:
        return "over latent caches it supports no soft cap"
    if spec.q_dtype not in (torch.float16, torch.bfloat16) or spec.kv_dtype != spec.q_dtype:
        return f"queries and caches are both float16 or both bfloat16, not {spec.q_dtype} and {spec.kv_dtype}"
    return None


@lru_cache(maxsize=1024)
def programs_per_span(spec: AttentionSpec, max_q_len: int) -> int:
    """Programs that read the same keys, for the tiles of a request of max_q_len query tokens (0: unknown, as 1)."""
    tiles = -(-max(max_q_len, 1) * spec.num_qo_heads // _BLOCK_M)
    return -(-tiles // -(-tiles // _MAX_PROGRAMS_PER_SPAN))


def has_many_rows(spec: AttentionSpec, tokens: int, batch: int) -> bool:
    """Whether `prefill_latent` computes a batch of this many query tokens: if requests have many tiles, on average."""
    return tokens * spec.num_qo_heads >= max(batch, 1) * _MANY_TILES * _BLOCK_M


def _partial_rows(spec: AttentionSpec, max_q_len: int) -> int:
    return min(max_q_len * spec.num_qo_heads or _BLOCK_M, _BLOCK_M)


def float_workspace_size(spec: AttentionSpec, processors: int, max_q_len: int) -> int:
    """Bytes for partial states: two slots per program, each with (m, l) for both halves of the columns."""
    return 2 * processors * _partial_rows(spec, max_q_len) * (spec.head_dim_vo + 4) * 4


@lru_cache(maxsize=1024)
def config(
    spec: AttentionSpec, page_size: int, batch: int, max_q_len: int, flags: tuple[bool, ...], many_rows: bool = False
) -> LatentConfig:
    """What `prefill_latent`, if many_rows, or else `decode_latent` is compiled for. flags: q_scale, k_scale, v_scale,
    lse, int64_offsets and by_length of LatentConfig, and whether the scale of logits may be negative.
    """
    q_scale, k_scale, v_scale, lse, int64_offsets, by_length, negative = flags
    programs = 1 if many_rows else programs_per_span(spec, max_q_len)
    dim, load_warps = spec.head_dim_vo // 2, 4
    tile = TileConfig(1, spec.num_qo_heads, _BLOCK_M * programs, _BLOCK_N, unit_size=_BLOCK_N)
    return LatentConfig(
        mask=MaskConfig.of(spec, tile, 0 if many_rows else max_q_len),
        schedule=ScheduleConfig(tile, page_size, by_length, int64_offsets),
        span=SpanConfig(scan_size(batch)),
        scheduler=TileSchedulerConfig.of(load_warps, True, spec.head_dim_qk + dim),
        pipeline=PipelineConfig(_STAGES[spec.head_dim_vo], consumers=2, load_warps=load_warps),
        output=OutputConfig(tile, dim, spec.sinks, lse, v_scale),
        programs_per_span=programs,
        transform=q_scale or k_scale or negative,
        q_scale=q_scale,
        k_scale=k_scale,
    )


@lru_cache(maxsize=1024)
def _launcher(c: LatentConfig, many_rows: bool) -> Launcher:
    kernel = prefill_latent if many_rows else decode_latent
    return Launcher(kernel, c, num_warps=4, maxnreg=REGISTERS, launch_pdl=True)


def refuses(call: Call) -> str | None:
    """Why the kernel, which copies 16 aligned bytes at a time, does not compute a call; None if it does."""
    if not isinstance(call.kv, PageTable):
        return "keys must lie in pages"
    if call.pe_gain != 1.0:
        return f"pe_gain = {call.pe_gain!r}, which is not 1"
    if call.k_pe is None or not (is_aligned(call.k, 2) and is_aligned(call.k_pe, 2)):
        return "keys must be aligned to 16 bytes, their strides to 16 elements"
    return None


def launch(call: Call, out: Tensor, lse: Tensor | None, processors: int) -> LaunchReplay | None:
    """Compute a call, with one program for each multiprocessor."""
    spec, kv = call.spec, call.kv
    k, q = call.k, call.q
    q_pe, k_pe = call.q_pe, call.k_pe
    # Latent layers have both rotary parts.
    assert q_pe is not None
    assert k_pe is not None
    page_size, indices, lengths, by_length, entries = call.table()
    if not (is_aligned(q, 2) and is_aligned(q_pe, 2)):
        q, q_pe = (x.clone(memory_format=torch.contiguous_format) for x in (q, q_pe))
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    tokens, batch = q.shape[0], kv.indptr.shape[0] - 1
    wide = max(extent_in_elements(k), extent_in_elements(k_pe)) >= 1 << 31
    scale = spec.sm_scale * LOG2E * q_gain * k_gain
    scales = (q_scale is not None, k_scale is not None, v_scale is not None)
    flags = (*scales, lse is not None, wide, by_length, scale <= 0)
    many_rows = has_many_rows(spec, tokens, batch)
    c = config(spec, page_size, batch, call.max_q_len, flags, many_rows)
    if many_rows:
        programs, capacity = processors, _SLOTS * processors
        partials = call.float_workspace_for(capacity * 2 * _BLOCK_M * (c.dim + 2))
        counters = 1 + 2 * capacity
    else:
        programs = processors // c.programs_per_span * c.programs_per_span
        capacity = _partial_rows(spec, call.max_q_len)
        partials = call.float_workspace_for(2 * programs * capacity * (spec.head_dim_vo + 4))
        counters = _COUNTERS * programs
    arrivals = call.int_workspace_for(counters, counters)
    replay = _launcher(c, many_rows)(
        programs,
        (q, q_pe, k, call.v, k_pe, out, lse, call.sinks),
        (partials, arrivals, call.qo.indptr, kv.indptr, lengths, indices, q_scale, k_scale, v_scale),
        (capacity, batch, tokens, entries, k.shape[0], scale, v_gain),
        (*q.stride()[:2], *q_pe.stride()[:2], *k.stride()[:2], *k_pe.stride()[:2], *out.stride()[:2]),
    )
    # A launch that is repeated must read the caller's own tensors.
    own = partials is call.float_workspace and arrivals is call.int_workspace
    own = own and q is call.q and q_scale is k_scale is v_scale is None
    return replay if own else None
