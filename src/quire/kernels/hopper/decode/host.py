"""The host side of decode: which layers and calls it computes, tile sizes, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from quire.definition.spec import FLOATS8, LOG2E, AttentionSpec
from quire.kernels.call import Call
from quire.kernels.gpu.launch import Launcher, LaunchReplay, extent_in_elements, is_aligned, kv_strides, split_scales
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.decode.kernel import DecodeConfig, decode
from quire.kernels.hopper.epilogue import OutputConfig
from quire.kernels.hopper.mask import MaskConfig, has_items, mask_arguments
from quire.kernels.hopper.pipeline import PipelineConfig
from quire.kernels.hopper.schedule import (
    DECODE_ROWS,
    FEW_BLOCKS,
    ScheduleConfig,
    SpanConfig,
    decode_tokens,
    scan_size,
)

# For batch-invariant layers, the keys in a work unit, and the work units in a split group.
_UNIT_SIZE, _SPLIT_GROUP = 128, 8
# The most bytes of partial states of a batch-invariant layer.
_MAX_PARTIAL_BYTES = 120 << 20
# The most bytes that the pipelines of a multiprocessor load at a time. Further loads would only wait for each other.
_BYTES_IN_FLIGHT = 128 << 10


def declines(spec: AttentionSpec, max_q_len: int) -> str | None:
    """Why the decode kernel does not compute a layer (with MHA, GQA or MQA heads); None if it does."""
    rows = max_q_len * spec.group_size
    if not (0 < rows <= DECODE_ROWS or spec.batch_invariant):
        found = f", not {rows}" if rows else ""
        return f"it decodes: at most {DECODE_ROWS} query rows per request and KV head{found}"
    if has_items(spec) or spec.pos_encoding != "NONE":
        return "it supports no items, nor position encodings"
    if spec.head_dim_qk not in (64, 128, 256) or spec.head_dim_vo != spec.head_dim_qk:
        return f"head_dim is 64, 128 or 256, not {spec.head_dim_qk} and {spec.head_dim_vo}"
    if spec.q_dtype not in (torch.float16, torch.bfloat16):
        return f"queries are float16 or bfloat16, not {spec.q_dtype}"
    if spec.kv_dtype in FLOATS8 and spec.head_dim_qk == 64:
        return "caches of fp8 have a head_dim of 128 or 256, not 64"
    return None


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Sizes that suit a layer: fields of DecodeConfig; rows, the query rows of a tile before padding to block_m;
    registers per thread.
    """

    packed_heads: int
    rows: int
    block_m: int
    stored_dim: int
    block_n: int
    stages: int
    programs: int
    registers: int


@lru_cache(maxsize=1024)
def tune(spec: AttentionSpec, max_q_len: int) -> DecodeTuning:
    """Sizes for a layer. Two KV heads are packed into a tile if a stored head has only 128 bytes and the query rows of
    both fit the smallest block_m, 8. Two programs share a multiprocessor if registers allow it.
    """
    rows, stored_dim = max_q_len * spec.group_size, spec.head_dim_qk * spec.kv_dtype.itemsize // 2
    if _whole_tiles(spec, max_q_len):
        # Most requests have one query token, and 32 columns spill registers.
        rows = 16 if spec.group_size <= 16 else 32
    packed = 2 if stored_dim == 64 and rows <= 4 and spec.num_kv_heads % 2 == 0 else 1
    rows *= packed
    block_m = max(8, triton.next_power_of_2(rows))
    # Columns of acc: with fp8, even and odd elements are apart.
    columns = block_m * (spec.head_dim_qk // stored_dim)
    programs, block_n = 2 if stored_dim <= 128 and columns <= 32 else 1, 64 * max(1, 128 // (stored_dim * packed))
    if spec.batch_invariant:
        # Bits depend on how many keys are in a block, so that is the same for all rows.
        block_n = 64
    stages = _BYTES_IN_FLIGHT // (programs * 4 * stored_dim * packed * block_n)
    return DecodeTuning(packed, rows, block_m, stored_dim, block_n, stages, programs, 128 if programs == 2 else 255)


def _whole_tiles(spec: AttentionSpec, max_q_len: int) -> bool:
    """Whether programs compute whole tiles: where a batch-invariant layer's batch may have requests for prefill."""
    return not 0 < max_q_len <= decode_tokens(spec)


@lru_cache(maxsize=1024)
def _launcher(c: DecodeConfig, registers: int) -> Launcher:
    # For batch-invariant layers, the compiler must not choose which products are fused: see `invariant.py`.
    return Launcher(decode, c, num_warps=4, maxnreg=registers, launch_pdl=True, enable_fp_fusion=c.split_group == 0)


@lru_cache(maxsize=1024)
def config(spec: AttentionSpec, page_size: int, batch: int, max_q_len: int, flags: tuple[bool, ...]) -> DecodeConfig:
    """The constants of the kernel. flags: q_scale, k_scale, v_scale, lse, int64_offsets, by_length of DecodeConfig."""
    tuning, whole_tiles = tune(spec, max_q_len), _whole_tiles(spec, max_q_len)
    q_scale, k_scale, v_scale, lse, int64_offsets, by_length = flags
    partial_rows = _partial_rows(tuning)
    tile = TileConfig(
        heads=spec.num_kv_heads // tuning.packed_heads,
        group=spec.group_size * tuning.packed_heads,
        rows=tuning.rows if whole_tiles else 0,
        block_n=tuning.block_n,
        unit_size=_UNIT_SIZE if spec.batch_invariant else tuning.block_n,
        packed_heads=tuning.packed_heads,
    )
    max_decoded = decode_tokens(spec) if whole_tiles else 0
    partial_cost = 0 if spec.batch_invariant else partial_rows * spec.head_dim_vo // 128
    return DecodeConfig(
        mask=MaskConfig.of(spec, tile, max_q_len),
        schedule=ScheduleConfig(
            tile, page_size, by_length, int64_offsets, max_q_len=max_decoded, whole_tiles=whole_tiles
        ),
        span=SpanConfig(scan_size(batch), tuning.programs, partial_cost),
        pipeline=PipelineConfig(tuning.stages, consumers=1, load_warps=4),
        output=OutputConfig(tile, spec.head_dim_vo, spec.sinks, lse, v_scale),
        stored_dim=tuning.stored_dim,
        block_m=tuning.block_m,
        partial_rows=partial_rows,
        split_group=_SPLIT_GROUP if spec.batch_invariant else 0,
        load_registers=72 if tuning.programs == 2 else 152,
        cap=spec.logits_soft_cap > 0,
        q_scale=q_scale,
        k_scale=k_scale,
        fp8=spec.kv_dtype in FLOATS8,
        e5m2=spec.kv_dtype == torch.float8_e5m2,
    )


def _partial_rows(tuning: DecodeTuning) -> int:
    return max(4, triton.next_power_of_2(tuning.rows))


def _slots(spec: AttentionSpec, max_q_len: int, processors: int, batch: int, keys: int) -> tuple[int, int]:
    """Programs of a batch-invariant launch, and slots for their partial states: _SPLIT_GROUP for each program, and one
    for each split group of the schedule (see `invariant.py`). If partial states are large, there are fewer programs, so
    that the slots fit the memory.
    """
    tuning = tune(spec, max_q_len)
    each = _partial_rows(tuning) * (spec.head_dim_vo + 2) * 4
    groups = spec.num_kv_heads // tuning.packed_heads * (keys // _UNIT_SIZE + batch) // _SPLIT_GROUP
    programs = processors * tuning.programs
    max_programs = (_MAX_PARTIAL_BYTES - groups * each) // (_SPLIT_GROUP * each)
    programs = max(min(programs, max_programs), processors // 2)
    return programs, _SPLIT_GROUP * programs + groups


def float_workspace_size(spec: AttentionSpec, processors: int, max_q_len: int) -> int:
    """0: partial states are self-flagging, and lie in the int workspace, which holds zeros."""
    return 0


def int_workspace_size(spec: AttentionSpec, processors: int, max_q_len: int, batch: int, keys: int) -> int:
    """Bytes of zeros for partial states of a batch-invariant layer; whole tiles need none."""
    if _whole_tiles(spec, max_q_len):
        return 0
    slots = _slots(spec, max_q_len, processors, batch, keys)[1]
    return slots * _partial_rows(tune(spec, max_q_len)) * (spec.head_dim_vo + 2) * 4


def refuses(call: Call) -> str | None:
    """Why the kernel, which copies 16 aligned bytes at a time, does not compute a call; None if it does."""
    step = 16 * _per_16_bits(call.k)
    if all(is_aligned(x, x.ndim - 1, step) for x in (call.k, call.v)):
        return None
    return f"keys and values must be aligned to 16 bytes, their strides to {step} elements"


def _per_16_bits(x: Tensor) -> int:
    """Elements of a cache per 16 bits: the kernel counts its strides in 16-bit elements."""
    return 2 // x.element_size()


def _few_entries(c: DecodeConfig, processors: int, batch: int) -> int:
    """The most page ids for which `find_span` uses one program per multiprocessor whatever the table says. -1 if there
    is only one program in any case, or if the number of tiles per request is unknown.
    """
    if c.schedule.whole_tiles or c.span.programs == 1:
        return -1
    blocks_per_head = processors * c.span.programs * FEW_BLOCKS.value // c.tile.heads - batch
    return blocks_per_head * c.tile.block_n // max(c.schedule.page_size, 1)


def launch(call: Call, out: Tensor, lse: Tensor | None, processors: int) -> LaunchReplay | None:
    """Compute a call with as many programs as run at a time, or fewer if there is less memory for partial states."""
    spec, kv = call.spec, call.kv
    q, k = call.q, call.k
    v = call.v
    page_size, indices, lengths, by_length, entries = call.table()
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    tokens, batch = q.shape[0], kv.indptr.shape[0] - 1
    wide = max(extent_in_elements(k), extent_in_elements(v)) >= 1 << 31
    flags = (q_scale is not None, k_scale is not None, v_scale is not None, lse is not None, wide, by_length)
    c, tuning = config(spec, page_size, batch, call.max_q_len, flags), tune(spec, call.max_q_len)
    each, programs = c.partial_rows * (spec.head_dim_vo + 2), processors * tuning.programs
    slots, partials = 0, None
    if spec.batch_invariant and not c.schedule.whole_tiles:
        programs, slots = _slots(spec, call.max_q_len, processors, batch, entries * max(page_size, 1))
        partials = call.int_workspace_for(slots * each, slots * each)
    elif not c.schedule.whole_tiles:
        partials = call.int_workspace_for(programs * each)
        programs = min(programs, partials.numel() // each)
    few = _few_entries(c, processors, batch)
    if entries <= few:
        # Any further program would find an empty span.
        programs = min(programs, processors)
    (bits, bits_indptr, *_), (bits_size, _, window) = mask_arguments(call)
    scale, cap = spec.sm_scale * LOG2E * q_gain * k_gain, spec.logits_soft_cap * LOG2E
    replay = _launcher(c, tuning.registers)(
        programs,
        (q, None, k, v, None, out, lse, call.sinks),
        (partials, call.qo.indptr, kv.indptr, lengths, indices, bits, bits_indptr, q_scale, k_scale, v_scale),
        (processors, slots, bits_size, batch, tokens, entries, k.shape[0], window, scale, v_gain, cap),
        (*q.stride()[:2], *(n // _per_16_bits(x) for x in (k, v) for n in kv_strides(x)), *out.stride()[:2]),
    )
    # A launch that is repeated must read the caller's own tensors.
    own = (partials is None or partials is call.int_workspace) and q_scale is k_scale is v_scale is None
    return replay if own else None
