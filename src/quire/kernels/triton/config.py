"""The compile-time constants of the attention kernel, and the choice of tile sizes for a layer and a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton import language as tl

from quire.definition.spec import FLOATS8, AttentionSpec
from quire.kernels.gpu.triton_internals import INTERPRETED
from quire.kernels.triton.mask import MaskKinds

# The number of keys of a work unit in batch-invariant mode, whatever the batch.
INVARIANT_SPLIT = 512
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The constants that an attention kernel is compiled for, passed as its one constexpr. Sizes count elements.

    Attributes:
        heads, group: KV heads, and query heads per KV head.
        head_dim_qk, head_dim_vo: sizes of heads. Queries and keys are computed in two blocks of block_d1 and block_d2
            elements (0: no second block), both powers of two, of which the second is padded; values in one padded
            block of block_dv elements.
        page_size: tokens in a page; 0 for ragged rows.
        block_m, block_n: query rows of a tile, and keys of a block.
        split_kv: programs take equal shares of all work units, and several may share a tile (split-KV); otherwise each
            program takes one whole tile.
        invariant: the bits of a row depend on its own query and keys alone (batch-invariant mode).
        unit: keys of a work unit.
        scan: requests that one step of the prefix sum over requests takes.
        mask: which kinds of masks there are.
        qk_type, pv_type: the types of the operands of Q K' and P V; precision: of float32 products.
        e4m3, e5m2: keys and values are bytes that the kernel widens itself, as the GPU does not convert fp8.
        transform_logits: logits are scaled before the softmax (for a soft cap, ALiBi, scales that differ by row, and
            an sm_scale that is not positive) rather than inside its exponential.
        normalize_q: rows of queries are divided by a power of two, so that float16 holds them; implies
            transform_logits.
        swap_qk: Q K' of a latent layer is computed as (K Q')'.
        reload_values: a latent layer loads its keys a second time as values.
        int64_offsets: the cache extends over 2**31 elements or more.
        has_kv_lens: page tables give the requests' numbers of keys in place of the lengths of their last pages.
        q_scales, k_scales, v_scales: there are scales per head.
        block_heads: query heads, padded to a power of two.
    """

    heads: int
    group: int
    head_dim_qk: int
    head_dim_vo: int
    block_d1: int
    block_d2: int
    block_dv: int
    page_size: int
    block_m: int
    block_n: int
    split_kv: bool
    invariant: bool
    unit: int
    scan: int
    mask: MaskKinds
    qk_type: tl.dtype
    pv_type: tl.dtype
    precision: str
    e4m3: bool
    e5m2: bool
    soft_cap: bool
    alibi: bool
    rope: bool
    transform_logits: bool
    normalize_q: bool
    latent: bool
    swap_qk: bool
    reload_values: bool
    int64_offsets: bool
    has_kv_lens: bool
    sinks: bool
    q_scales: bool
    k_scales: bool
    v_scales: bool
    lse: bool
    block_heads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU: its number of multiprocessors, the shared memory of one in bytes, whether it converts fp8, whether it is
    AMD's, and whether it has warp-group matrix products (Hopper).
    """

    num_sms: int
    shared_memory: int
    fp8: bool
    hip: bool
    wgmma: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes, and options of Triton's compiler."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def head_dim_blocks(dim: int) -> tuple[int, int]:
    """The two blocks of a query's or key's head: the largest power of two in it, and the rest, padded to one."""
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, max(16, triton.next_power_of_2(dim - first)) if dim > first else 0


def choose_block_m(spec: AttentionSpec, rows: int, machine: Machine) -> int:
    """Query rows of a tile, for requests of about `rows` query rows per KV head."""
    if spec.latent:
        rows = spec.group_size if spec.batch_invariant else rows
        return min(_latent_block_m(spec, machine), max(16, triton.next_power_of_2(rows)))
    max_block_m = 64 if spec.batch_invariant else 128
    if spec.q_dtype == torch.float32 or max(spec.head_dim_qk, spec.head_dim_vo) > 256:
        max_block_m = 16
    elif spec.pos_encoding == "ROPE_LLAMA":
        max_block_m = 32
    return max_block_m if spec.batch_invariant else min(max_block_m, max(16, triton.next_power_of_2(rows)))


def _latent_block_m(spec: AttentionSpec, machine: Machine) -> int:
    """The most query rows of a tile of a latent layer. Every tile reads all keys of its request, so that more rows are
    worth some registers that spill between the loops over keys. With fp8, or with the second accumulator of
    batch-invariant mode, registers would spill inside these loops.
    """
    if machine.hip or spec.q_dtype == torch.float32:
        return 16
    return 64 if machine.wgmma and spec.kv_dtype.itemsize == 2 and not spec.batch_invariant else 32


@lru_cache(maxsize=256)
def tune(spec: AttentionSpec, block_m: int, paged: bool, shared_memory: int) -> Tuning:
    """Tile sizes that fit the shared memory of a multiprocessor, in bytes; with few rows, that of two programs."""
    if spec.latent:
        return _tune_latent(spec, block_m, shared_memory)
    width = max(sum(head_dim_blocks(spec.head_dim_qk)), triton.next_power_of_2(spec.head_dim_vo))
    wide_types = 4 if spec.pos_encoding == "ROPE_LLAMA" or spec.q_dtype == torch.float32 else 2
    key_bytes = 2 * width * max(wide_types, spec.kv_dtype.itemsize)
    capacity = shared_memory // (2 if block_m <= 64 else 1) - 2 * block_m * width * wide_types
    # The speed of small tiles depends on the bytes in flight, which fp8 halves.
    if block_m <= 64:
        block_n, stages = (128, 3) if spec.kv_dtype.itemsize == 1 and shared_memory > 200 << 10 else (64, 4)
    else:
        # Looking up pages costs time for each block of keys, so larger blocks are faster while registers last.
        large = width <= 64 or (paged and shared_memory > 200 << 10)
        block_n, stages = (128, 2 if width > 64 else 3) if large else (64, 3)
    if wide_types == 4 or width > 256:
        block_n = 32
    # Triton's pipeline has one buffer fewer than stages.
    while block_n * max(stages - 1, 1) * key_bytes > capacity and (block_n, stages) != (16, 1):
        if stages > 2 or block_n == 16:
            stages -= 1
        else:
            block_n //= 2
    return Tuning(block_m, block_n, 8 if block_m >= 128 or width > 256 else 4, stages)


def _tune_latent(spec: AttentionSpec, block_m: int, shared_memory: int) -> Tuning:
    """One program has a multiprocessor for itself, as accumulators leave no registers for two. The pipeline has as many
    buffers as stages with 64 rows, and one fewer with less.
    """
    key_bytes = sum(head_dim_blocks(spec.head_dim_qk)) * (4 if spec.q_dtype == torch.float32 else 2)
    capacity = shared_memory - block_m * key_bytes - (4 << 10)
    for block_n, stages in ((32, 3), (32, 2), (16, 2)):
        if block_n * (stages - (block_m < 64)) * key_bytes <= capacity:
            return Tuning(block_m, block_n, 8, stages)
    return Tuning(block_m, 16, 8, 1)


def _product_types(spec: AttentionSpec, hip: bool) -> tuple[tl.dtype, tl.dtype, str]:
    """The types of the operands of Q K' and of P V, and the precision of float32 products.

    fp8 widens to float16 without loss, and faster than to bfloat16. Rotated queries and keys stay float32, because
    rounding them would cost all the error that attention may have. Triton's interpreter multiplies bfloat16 wrongly.
    """
    if INTERPRETED or spec.q_dtype == torch.float32:
        return tl.float32, tl.float32, "ieee"
    fp8 = spec.kv_dtype in FLOATS8
    qk = tl.float16 if fp8 else _TYPES[spec.q_dtype]
    pv = tl.float16 if fp8 else _TYPES[spec.kv_dtype]
    rope = spec.pos_encoding == "ROPE_LLAMA"
    return (tl.float32, pv, "ieee" if hip else "tf32x3") if rope else (qk, pv, "ieee")


@lru_cache(maxsize=1024)
def make_config(
    spec: AttentionSpec,
    page_size: int,
    tuning: Tuning,
    split_kv: bool,
    scan: int,
    flags: tuple[bool, ...],
    machine: Machine,
) -> AttentionConfig:
    """The constants for a layer. flags: whether q, k and v have scales per head, lse is written, the scale is not
    positive, the cache needs int64 offsets, and the page table has numbers of keys.
    """
    q_scales, k_scales, v_scales, lse, reverses, int64_offsets, has_kv_lens = flags
    block_d1, block_d2 = head_dim_blocks(spec.head_dim_qk)
    qk_type, pv_type, precision = _product_types(spec, machine.hip)
    normalize_q = qk_type == tl.float16 and spec.q_dtype == torch.bfloat16
    soft_cap, alibi = spec.logits_soft_cap > 0, spec.pos_encoding == "ALIBI"
    return AttentionConfig(
        heads=spec.num_kv_heads,
        group=spec.group_size,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        block_d1=block_d1,
        block_d2=block_d2,
        block_dv=max(16, triton.next_power_of_2(spec.head_dim_vo)),
        page_size=page_size,
        block_m=tuning.block_m,
        block_n=tuning.block_n,
        split_kv=split_kv,
        invariant=spec.batch_invariant,
        unit=INVARIANT_SPLIT if spec.batch_invariant else tuning.block_n,
        scan=scan,
        mask=MaskKinds.of(spec),
        qk_type=qk_type,
        pv_type=pv_type,
        precision=precision,
        e4m3=spec.kv_dtype == torch.float8_e4m3fn and not machine.fp8,
        e5m2=spec.kv_dtype == torch.float8_e5m2 and not machine.fp8,
        soft_cap=soft_cap,
        alibi=alibi,
        rope=spec.pos_encoding == "ROPE_LLAMA",
        transform_logits=soft_cap or alibi or q_scales or k_scales or normalize_q or reverses,
        normalize_q=normalize_q,
        latent=spec.latent,
        swap_qk=spec.latent and tuning.block_m < 64 and spec.kv_dtype.itemsize > 1,
        reload_values=spec.latent and spec.kv_dtype.itemsize == 1,
        int64_offsets=int64_offsets,
        has_kv_lens=has_kv_lens,
        sinks=spec.sinks,
        q_scales=q_scales,
        k_scales=k_scales,
        v_scales=v_scales,
        lse=lse,
        block_heads=triton.next_power_of_2(spec.num_qo_heads),
    )
