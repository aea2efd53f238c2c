"""The host side of prefill: which layers and calls it computes, tile sizes, and the launch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.spec import FLOATS8, LOG2E, AttentionSpec
from quire.kernels.call import Call
from quire.kernels.gpu.launch import Launcher, LaunchReplay, extent_in_elements, is_aligned, kv_strides, split_scales
from quire.kernels.gpu.tma import Matrix
from quire.kernels.hopper.mask import keys_to_the_right
from quire.kernels.hopper.prefill.kernel import Config, prefill
from quire.kernels.hopper.schedule import decode_tokens

_MIN_BOX = 8  # keys: the rows of one swizzled block of shared memory
_SLOTS, _MOST_SLOTS = 2, 8  # for partial states, per program
_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of queries and keys, and of values


def declines(spec: AttentionSpec, max_q_len: int) -> str | None:
    """Why the prefill kernel does not compute a layer (with MHA, GQA or MQA heads); None if it does."""
    if spec.pos_encoding == "ROPE_LLAMA":
        return "it knows no rotary encodings"
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
    longest = (1 << 31) // _tile_rows(call.spec)  # offsets within a tile have 32 bits
    if max(call.q.stride()) >= longest:
        return f"strides of queries must be below {longest} elements"
    return None


def _box_of(spec: AttentionSpec, x: Tensor, page_size: int) -> int:
    """How many keys TMA loads of a tensor at once, or 0: boxes are rows of one page in a matrix whose rows have the
    stride of tokens, if there is such a matrix. With custom masks and items, a producer of four warps finds which
    blocks are loaded, and copies them: its warps would wait for each other at each box.
    """
    block_n = block_size(spec)
    if x.element_size() == 1 or spec.mask.custom_mask or spec.mask.items:
        return 0
    if page_size == 0:
        return block_n if len(x) else 0
    fits = page_size >= _MIN_BOX and (block_n % page_size == 0 or page_size % block_n == 0)
    page, token, _head = kv_strides(x)
    return min(page_size, block_n) if fits and len(x) and page % token == 0 else 0


def _matrix(x: Tensor, box: int, width: int) -> Matrix:
    """The matrix of `_box_of`, with boxes of `width` elements."""
    page, token, head = kv_strides(x)
    row = token if x.ndim == 4 else page
    heads, dim = x.shape[-2:]
    rows = (len(x) - 1) * (page // row) + (x.shape[1] if x.ndim == 4 else 1) + (heads - 1) * (head // row)
    return Matrix(rows, (heads - 1) * (head % row) + dim, row, box, width)


@lru_cache(maxsize=1024)
def config(spec: AttentionSpec, page_size: int, box: int, flags: tuple[bool, ...]) -> Config:
    """What the kernel is compiled for. flags: q_scale, k_scale, v_scale, lse, int64_offsets, by_length of Config, and
    whether the scale of logits may be negative.
    """
    q_scale, k_scale, v_scale, lse, int64_offsets, by_length, negative = flags
    dim = spec.head_dim_qk
    block_n, consumers = block_size(spec), _consumers(spec)
    cap, alibi, fp8 = spec.logits_soft_cap > 0, spec.pos_encoding == "ALIBI", spec.kv_dtype in FLOATS8
    load_registers = 24 if box else 88 if fp8 else 56
    return Config(
        heads=spec.num_kv_heads,
        group=spec.group_size,
        dim=spec.head_dim_vo,
        dim_qk=dim,
        part=dim & -dim,  # the largest power of two in it
        fp8=fp8,
        fp8_q=spec.q_dtype in FLOATS8,
        page_size=page_size,
        box=box,
        block_n=block_n,
        unit_size=block_n,
        split=not spec.batch_invariant,
        least_q_len=decode_tokens(spec) + 1 if spec.batch_invariant else 0,
        consumers=consumers,
        tile_rows=64 * consumers,
        stages=8 if dim == 64 else 2,
        registers=_registers(consumers, load_registers),
        load_registers=load_registers,
        load_warps=1 if box else 4,
        packed=box == 0 or dim == 256,
        right=keys_to_the_right(spec),
        window=spec.mask.window_left >= 0,
        mask=spec.mask.custom_mask,
        items=spec.mask.items,
        cap=cap,
        alibi=alibi,
        transform=cap or alibi or q_scale or k_scale or negative,
        sinks=spec.sinks,
        int64_offsets=int64_offsets,
        by_length=by_length,
        lse=lse,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def block_size(spec: AttentionSpec) -> int:
    """Keys in a block."""
    return 64 if spec.head_dim_qk in (64, 256) else 128


def _consumers(spec: AttentionSpec) -> int:
    """Consumers of a program: for three there are enough registers with heads of 64."""
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
    """Bytes for partial states. The kernel uses as many slots as there are, up to _MOST_SLOTS per program. It cuts no
    tiles of batch-invariant layers.
    """
    return 0 if spec.batch_invariant else _SLOTS * processors * _tile_rows(spec) * (spec.head_dim_vo + 2) * 4


@lru_cache(maxsize=1024)
def _launcher(c: Config) -> Launcher:
    # If batch-invariant, blocks with and without a mask must round alike: see `decode/invariant.py`.
    return Launcher(prefill, c, num_warps=4, launch_pdl=True, enable_fp_fusion=c.split)


@lru_cache(maxsize=64)
def _slopes(spec: AttentionSpec, device: torch.device) -> Tensor:
    return (spec.alibi_slopes() * LOG2E).to(device)


def launch(call: Call, out: Tensor, lse: Tensor | None, processors: int) -> LaunchReplay | None:
    """Compute a call with one program on each multiprocessor."""
    spec, kv, q, k, v, mask, items = call.spec, call.kv, call.q, call.k, call.v, call.mask, call.items
    page_size, indices, lengths, by_length, entries = call.table()
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    tokens, batch = q.shape[0], kv.indptr.shape[0] - 1
    scale, cap = spec.sm_scale * LOG2E * q_gain * k_gain, spec.logits_soft_cap * LOG2E
    box = min(_box_of(spec, k, page_size), _box_of(spec, v, page_size))
    wide = max(extent_in_elements(k), extent_in_elements(v)) >= 1 << 31
    scales = (q_scale is not None, k_scale is not None, v_scale is not None)
    c = config(spec, page_size, box, (*scales, lse is not None, wide, by_length, scale <= 0))
    slots, partials = 0, None
    if c.split:
        partials = call.float_workspace_for(float_workspace_size(spec, processors, call.max_q_len) // 4)
        slots = min(partials.numel() // (c.tile_rows * (spec.head_dim_vo + 2)), _MOST_SLOTS * processors)
    words = 1 + c.consumers * slots
    counter = call.int_workspace_for(words, words)
    bits, bits_indptr, bits_size = (None, None, 0) if mask is None else (mask.bits, mask.indptr, mask.bits.shape[0])
    prefix_lens, positions, items_len = (
        (None, None, 0) if items is None else (items.prefix_lens, items.positions, items.length)
    )
    slopes = _slopes(spec, out.device) if c.alibi else None
    replay = _launcher(c)(
        processors,
        (q, None, k, v, None, out, lse, call.sinks),
        (partials, counter, call.qo.indptr, kv.indptr, lengths, indices, bits, bits_indptr, prefix_lens,
         positions, slopes, q_scale, k_scale, v_scale),
        (slots, bits_size, items_len, batch, tokens, entries, k.shape[0], spec.mask.window_left, scale, v_gain, cap),
        (*q.stride()[:2], *kv_strides(k), *kv_strides(v), *out.stride()[:2]),
        (_matrix(k, box, c.part), _matrix(v, box, c.dim)) if box else None,
    )  # fmt: skip
    # A launch that is repeated must read the caller's own tensors.
    own = counter is call.int_workspace and (partials is None or partials is call.float_workspace)
    return replay if own and q_scale is k_scale is v_scale is None else None
