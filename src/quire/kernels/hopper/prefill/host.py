"""The host side of prefill: which layers and calls it computes, tile sizes, and the launch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.spec import FLOATS8, LOG2E, AttentionSpec
from quire.kernels.call import Call
from quire.kernels.gpu.launch import Launcher, LaunchReplay, extent_in_elements, is_aligned, kv_strides, split_scales
from quire.kernels.gpu.tma import TmaMatrix
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.epilogue import OutputConfig
from quire.kernels.hopper.mask import MaskConfig, hides_blocks, mask_arguments
from quire.kernels.hopper.pipeline import PipelineConfig
from quire.kernels.hopper.prefill.kernel import PrefillConfig, prefill
from quire.kernels.hopper.schedule import ScheduleConfig, decode_tokens
from quire.kernels.hopper.tile_scheduler import TileSchedulerConfig

# The fewest keys that TMA loads at once: the rows of one swizzled block of shared memory.
_MIN_BOX = 8
# Slots for partial states per program: the number that is allocated, and the largest that is used.
_SLOTS, _MAX_SLOTS = 2, 8
# The head_dim of queries and keys, and that of values.
_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))


def declines(spec: AttentionSpec, max_q_len: int) -> str | None:
    """Why the prefill kernel does not compute a layer (with MHA, GQA or MQA heads); None if it does."""
    if spec.pos_encoding == "ROPE_LLAMA":
        return "it supports no rotary encodings"
    dims = spec.head_dim_qk, spec.head_dim_vo
    if dims not in _HEAD_DIMS:
        return f"head_dim is 64, 128, 256, or 192 with 128 for values, not {dims[0]} and {dims[1]}"
    if spec.q_dtype in FLOATS8:
        if spec.kv_dtype != spec.q_dtype:
            return f"fp8 queries go with keys of their dtype, not {spec.q_dtype} with {spec.kv_dtype}"
        if 0 < max_q_len <= decode_tokens(spec):
            return f"of fp8 queries it is for requests of more than {decode_tokens(spec)} tokens, not {max_q_len}"
    elif spec.q_dtype not in (torch.bfloat16, torch.float16):
        return f"queries are float16, bfloat16 or fp8, not {spec.q_dtype}"
    return None


def refuses(call: Call) -> str | None:
    """Why the kernel, which copies 16 aligned bytes at a time, does not compute a call; None if it does."""
    if not all(is_aligned(x, x.ndim - 1, 16 // x.element_size()) for x in (call.q, call.k, call.v)):
        return "queries, keys and values must be aligned to 16 bytes, and their strides"
    # Offsets within a tile have 32 bits.
    longest = (1 << 31) // _tile_rows(call.spec)
    if max(call.q.stride()) >= longest:
        return f"strides of queries must be below {longest} elements"
    return None


def _box_of(spec: AttentionSpec, x: Tensor, page_size: int) -> int:
    """How many keys of a tensor TMA loads at once, which form a box; 0 if TMA is not used. A box has rows of one page,
    in a matrix whose rows have the stride of tokens; not every tensor is such a matrix. TMA is not used with custom
    masks and items: four producer warps then find the blocks to load, and would wait for each other at each box.
    """
    block_n = block_size(spec)
    if x.element_size() == 1 or hides_blocks(spec):
        return 0
    if page_size == 0:
        return block_n if len(x) else 0
    fits = page_size >= _MIN_BOX and (block_n % page_size == 0 or page_size % block_n == 0)
    page, token, _head = kv_strides(x)
    return min(page_size, block_n) if fits and len(x) and page % token == 0 else 0


def _matrix(x: Tensor, box: int, width: int) -> TmaMatrix:
    """The matrix of `_box_of`, with boxes of `width` elements."""
    page, token, head = kv_strides(x)
    row = token if x.ndim == 4 else page
    heads, dim = x.shape[-2:]
    rows = (len(x) - 1) * (page // row) + (x.shape[1] if x.ndim == 4 else 1) + (heads - 1) * (head // row)
    return TmaMatrix(rows, (heads - 1) * (head % row) + dim, row, box, width)


@lru_cache(maxsize=1024)
def config(spec: AttentionSpec, page_size: int, box: int, flags: tuple[bool, ...]) -> PrefillConfig:
    """The constants of the kernel. flags: q_scale, k_scale, v_scale, lse, int64_offsets, by_length of PrefillConfig and
    whether the scale of logits may be negative.
    """
    q_scale, k_scale, v_scale, lse, int64_offsets, by_length, negative = flags
    dim, dim_vo = spec.head_dim_qk, spec.head_dim_vo
    block_n = block_size(spec)
    cap, alibi = spec.logits_soft_cap > 0, spec.pos_encoding == "ALIBI"
    fp8 = spec.kv_dtype in FLOATS8
    consumers, load_warps = _consumers(spec), 1 if box else 4
    load_registers = 24 if box else 88 if fp8 else 56
    split = not spec.batch_invariant
    tile = TileConfig(spec.num_kv_heads, spec.group_size, _tile_rows(spec), block_n, unit_size=block_n)
    min_q_len = decode_tokens(spec) + 1 if spec.batch_invariant else 0
    return PrefillConfig(
        mask=MaskConfig.of(spec, tile),
        schedule=ScheduleConfig(tile, page_size, by_length, int64_offsets, min_q_len),
        scheduler=TileSchedulerConfig.of(load_warps, split, dim + dim_vo),
        pipeline=PipelineConfig(8 if dim == 64 else 2, consumers, load_warps),
        output=OutputConfig(tile, dim_vo, spec.sinks, lse, v_scale),
        dim_qk=dim,
        # The largest power of two that divides dim.
        part=dim & -dim,
        box=box,
        registers=_registers(consumers, load_registers),
        load_registers=load_registers,
        packed=box == 0 or dim == 256,
        fp8=fp8,
        fp8_q=spec.q_dtype in FLOATS8,
        cap=cap,
        alibi=alibi,
        transform=cap or alibi or q_scale or k_scale or negative,
        q_scale=q_scale,
        k_scale=k_scale,
    )


def block_size(spec: AttentionSpec) -> int:
    """Keys in a block."""
    return 64 if spec.head_dim_qk in (64, 256) else 128


def _consumers(spec: AttentionSpec) -> int:
    """Consumers of a program. There are enough registers for three consumers only with heads of 64 elements."""
    return 3 if spec.head_dim_qk == 64 else 2


def _tile_rows(spec: AttentionSpec) -> int:
    return 64 * _consumers(spec)


def _registers(consumers: int, load_registers: int) -> int:
    """Registers per thread of a consumer. All warp groups start with as many, a multiple of 8 that fits a
    multiprocessor's 65,536; then the producer gives up some of its own.
    """
    groups = consumers + 1
    start = (1 << 16) // (128 * groups) // 8 * 8
    return (start * groups - load_registers) // consumers // 8 * 8


def float_workspace_size(spec: AttentionSpec, processors: int, max_q_len: int) -> int:
    """Bytes for partial states. The kernel uses as many slots as there are, up to _MAX_SLOTS per program. It cuts no
    tiles of batch-invariant layers.
    """
    return 0 if spec.batch_invariant else _SLOTS * processors * _tile_rows(spec) * (spec.head_dim_vo + 2) * 4


@lru_cache(maxsize=1024)
def _launcher(c: PrefillConfig) -> Launcher:
    # If batch-invariant, blocks with and without a mask must round alike: see `decode/invariant.py`.
    return Launcher(prefill, c, num_warps=4, launch_pdl=True, enable_fp_fusion=c.scheduler.split)


@lru_cache(maxsize=64)
def _slopes(spec: AttentionSpec, device: torch.device) -> Tensor:
    return (spec.alibi_slopes() * LOG2E).to(device)


def launch(call: Call, out: Tensor, lse: Tensor | None, processors: int) -> LaunchReplay | None:
    """Compute a call with one program on each multiprocessor."""
    spec, kv = call.spec, call.kv
    q, k = call.q, call.k
    v = call.v
    page_size, indices, lengths, by_length, entries = call.table()
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    tokens, batch = q.shape[0], kv.indptr.shape[0] - 1
    scale, cap = spec.sm_scale * LOG2E * q_gain * k_gain, spec.logits_soft_cap * LOG2E
    box = min(_box_of(spec, k, page_size), _box_of(spec, v, page_size))
    wide = max(extent_in_elements(k), extent_in_elements(v)) >= 1 << 31
    scales = (q_scale is not None, k_scale is not None, v_scale is not None)
    c = config(spec, page_size, box, (*scales, lse is not None, wide, by_length, scale <= 0))
    slots, partials = 0, None
    if c.scheduler.split:
        partials = call.float_workspace_for(float_workspace_size(spec, processors, call.max_q_len) // 4)
        slots = min(partials.numel() // (c.tile.rows * (spec.head_dim_vo + 2)), _MAX_SLOTS * processors)
    words = 1 + c.pipeline.consumers * slots
    counter = call.int_workspace_for(words, words)
    mask_tensors, (bits_size, items_len, window) = mask_arguments(call)
    slopes = _slopes(spec, out.device) if c.alibi else None
    replay = _launcher(c)(
        processors,
        (q, None, k, v, None, out, lse, call.sinks),
        (partials, counter, call.qo.indptr, kv.indptr, lengths, indices, *mask_tensors, slopes, q_scale, k_scale,
         v_scale),
        (slots, bits_size, items_len, batch, tokens, entries, k.shape[0], window, scale, v_gain, cap),
        (*q.stride()[:2], *kv_strides(k), *kv_strides(v), *out.stride()[:2]),
        (_matrix(k, box, c.part), _matrix(v, box, c.dim)) if box else None,
    )  # fmt: skip
    # A launch that is repeated must read the caller's own tensors.
    own = counter is call.int_workspace and (partials is None or partials is call.float_workspace)
    return replay if own and q_scale is k_scale is v_scale is None else None
