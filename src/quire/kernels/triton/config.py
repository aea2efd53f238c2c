"""What a Triton kernel of attention is compiled for, and the tile sizes that suit it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton import language as tl

from quire.definition.spec import FLOATS8, AttentionSpec

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Config:
    """Compile-time facts, one constant of the kernels. Sizes in elements.

    Attributes:
        heads, group: KV heads, and query heads per KV head.
        dim_qk, dim_vo: sizes of heads. Queries and keys are computed in two parts, d1 and d2 (0: none), both powers of
            two of which the second is padded; values in one padded part, dv.
        page_size: tokens in a page; 0 for ragged rows.
        block_m, block_n: query rows and keys in a tile.
        split: whether programs take equal shares of all keys, cut anywhere, or one tile of queries each.
        invariant: whether the bits of a row depend on its own query and keys alone.
        unit: keys in a unit of the line, where programs are cut.
        scan: requests that a step of a prefix sum takes.
        qk_type, pv_type: what the two products are computed in.
        precision: of float32 products.
        e4m3, e5m2: keys and values are bytes to be widened without the GPU's help.
        shaped: logits are scaled before anything else happens to them (soft cap, ALiBi, scales that differ by row).
        keys_first: latent keys are the left side of their product with queries.
        reload: they are loaded again as values.
        far: the cache reaches 2**31 elements or further.
        by_length: tables have requests' lengths in place of those of their last pages.
        normed: rows of queries are brought near 1 by a power of two, so that halves hold them; implies shaped.
        pad_heads: query heads, padded to a power of two.
    """

    heads: int
    group: int
    dim_qk: int
    dim_vo: int
    d1: int
    d2: int
    dv: int
    page_size: int
    block_m: int
    block_n: int
    split: bool
    invariant: bool
    unit: int
    scan: int
    qk_type: tl.dtype
    pv_type: tl.dtype
    precision: str
    e4m3: bool
    e5m2: bool
    causal: bool
    window: bool
    cap: bool
    alibi: bool
    rope: bool
    mask: bool
    items: bool
    latent: bool
    keys_first: bool
    reload: bool
    far: bool
    by_length: bool
    sinks: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    shaped: bool
    normed: bool
    lse: bool
    pad_heads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU: multiprocessors, shared memory of one in bytes, whether it converts fp8 by itself, whether it is AMD's,
    whether groups of warps multiply together, from shared memory (Hopper).
    """

    processors: int
    shared_memory: int
    fp8: bool
    hip: bool
    wgmma: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes and what the compiler is told."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def parts(dim: int) -> tuple[int, int]:
    """A head's two parts: the largest power of two in it, and what is left, padded to a power of two."""
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, max(16, triton.next_power_of_2(dim - first)) if dim > first else 0


@lru_cache(maxsize=256)
def tune(spec: AttentionSpec, block_m: int, paged: bool, shared_memory: int) -> Tuning:
    """Tiles that fit the shared memory of a multiprocessor, in bytes, with room for two programs where rows are few."""
    if spec.latent:
        return _tune_latent(spec, block_m, shared_memory)
    width = max(sum(parts(spec.head_dim_qk)), triton.next_power_of_2(spec.head_dim_vo))
    wide_types = 4 if spec.pos_encoding == "ROPE_LLAMA" or spec.q_dtype == torch.float32 else 2
    key_bytes = 2 * width * max(wide_types, spec.kv_dtype.itemsize)
    room = shared_memory // (2 if block_m <= 64 else 1) - 2 * block_m * width * wide_types
    if block_m <= 64:  # bytes in flight count: halves of them for fp8
        block_n, stages = (128, 3) if spec.kv_dtype.itemsize == 1 and shared_memory > 200 << 10 else (64, 4)
    else:  # addresses of pages are paid for per block of keys, so that larger ones win if there are registers
        large = width <= 64 or (paged and shared_memory > 200 << 10)
        block_n, stages = (128, 2 if width > 64 else 3) if large else (64, 3)
    if wide_types == 4 or width > 256:
        block_n = 32
    while block_n * max(stages - 1, 1) * key_bytes > room and (block_n, stages) != (
        16,
        1,
    ):  # one buffer less than stages
        if stages > 2 or block_n == 16:
            stages -= 1
        else:
            block_n //= 2
    return Tuning(block_m, block_n, 8 if block_m >= 128 or width > 256 else 4, stages)


def _tune_latent(spec: AttentionSpec, block_m: int, shared_memory: int) -> Tuning:
    """One program has a multiprocessor for itself: accumulators leave no registers for two. 64 rows keep as many
    blocks of keys as there are stages, fewer one less.
    """
    token = sum(parts(spec.head_dim_qk)) * (4 if spec.q_dtype == torch.float32 else 2)
    room = shared_memory - block_m * token - (4 << 10)
    for block_n, stages in ((32, 3), (32, 2), (16, 2)):
        if block_n * (stages - (block_m < 64)) * token <= room:
            return Tuning(block_m, block_n, 8, stages)
    return Tuning(block_m, 16, 8, 1)


def product_types(spec: AttentionSpec, interpreted: bool, hip: bool) -> tuple[tl.dtype, tl.dtype, str]:
    """The types of Q K' and of P V, and the precision of float32 products.

    fp8 widens to fp16 without loss, and faster than to bf16. Rotated queries and keys stay float32, or rounding them
    would cost what attention may lose in all. Triton's interpreter multiplies bf16 wrongly.
    """
    if interpreted or spec.q_dtype == torch.float32:
        return tl.float32, tl.float32, "ieee"
    fp8 = spec.kv_dtype in FLOATS8
    qk = tl.float16 if fp8 else _TYPES[spec.q_dtype]
    pv = tl.float16 if fp8 else _TYPES[spec.kv_dtype]
    rope = spec.pos_encoding == "ROPE_LLAMA"
    return (tl.float32, pv, "ieee" if hip else "tf32x3") if rope else (qk, pv, "ieee")
