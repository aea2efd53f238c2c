"""How calls of layers with heads of their own meet the kernel in `decode.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from quire.definition.spec import FLOATS8, LOG2E, AttentionSpec
from quire.kernels.call import Call
from quire.kernels.gpu.launch import Launcher, LaunchReplay, extent_in_elements, is_aligned, kv_strides, split_scales
from quire.kernels.hopper.decode.kernel import Config, decode
from quire.kernels.hopper.schedule import FEW, scanned

_ROWS = 64  # of a tile
_UNIT, _RUN = 128, 8  # keys between two cuts, and such units folded together, in batch-invariant mode
_MOST = 120 << 20  # bytes for parts then
_AHEAD = 128 << 10  # bytes that a multiprocessor asks for ahead: more of them wait for each other in memory


def declines(spec: AttentionSpec, max_q_len: int) -> str | None:
    """Why there is no kernel for a layer that is not latent."""
    rows = max_q_len * spec.group_size
    if not (0 < rows <= _ROWS or spec.batch_invariant):
        return f"it decodes: at most {_ROWS} query rows per request and KV head" + (f", not {rows}" if rows else "")
    if spec.items or spec.pos_encoding != "NONE":
        return "it knows no items, nor position encodings"
    if spec.head_dim_qk not in (64, 128, 256) or spec.head_dim_vo != spec.head_dim_qk:
        return f"head_dim is 64, 128 or 256, not {spec.head_dim_qk} and {spec.head_dim_vo}"
    if spec.q_dtype not in (torch.float16, torch.bfloat16):
        return f"queries are float16 or bfloat16, not {spec.q_dtype}"
    if spec.kv_dtype in FLOATS8 and spec.head_dim_qk == 64:
        return "caches of fp8 have a head_dim of 128 or 256, not 64"
    return None


@dataclass(frozen=True, slots=True)
class Tuning:
    """KV heads that are read together, query rows of theirs and the columns that these take, numbers of two bytes in a
    stored head, keys of a block, blocks in the ring, programs on a multiprocessor, registers of a thread.
    """

    pair: int
    rows: int
    columns: int
    words: int
    block: int
    stages: int
    programs: int
    registers: int


@lru_cache(maxsize=1024)
def tune(spec: AttentionSpec, max_q_len: int) -> Tuning:
    """Two heads where one has only 128 bytes and their queries have room in eight columns; two programs where registers
    let them be.
    """
    rows, words = max_q_len * spec.group_size, spec.head_dim_qk * spec.kv_dtype.itemsize // 2
    if _whole(spec, max_q_len):
        rows = _ROWS // 2
    pair = 2 if words == 64 and rows <= 4 and spec.num_kv_heads % 2 == 0 else 1
    rows *= pair
    columns = max(8, triton.next_power_of_2(rows))
    sums = columns * (spec.head_dim_qk // words)  # fp8 adds up even and odd elements apart
    programs, block = 2 if words <= 128 and sums <= 32 else 1, 64 * max(1, 128 // (words * pair))
    if spec.batch_invariant:  # weights of as many keys are added up together, whatever else is chosen
        block = 64
    stages = _AHEAD // (programs * 4 * words * pair * block)
    return Tuning(pair, rows, columns, words, block, stages, programs, 128 if programs == 2 else 255)


def _whole(spec: AttentionSpec, max_q_len: int) -> bool:
    """Whether tiles are not cut: to be batch-invariant requests are computed here whatever their rows."""
    return not 0 < max_q_len * spec.group_size <= _ROWS


@lru_cache(maxsize=1024)
def _launcher(c: Config, registers: int) -> Launcher:
    # What is rounded must not depend on what else is in the kernel, to be batch-invariant.
    return Launcher(decode, c, num_warps=4, maxnreg=registers, launch_pdl=True, enable_fp_fusion=c.run == 0)


@lru_cache(maxsize=1024)
def config(spec: AttentionSpec, page_size: int, batch: int, max_q_len: int, flags: tuple[bool, ...]) -> Config:
    """What the kernel is compiled for. flags: scales of q, k, v that are tensors, lse, a far cache, lengths in place of
    those of last pages.
    """
    tuning, whole = tune(spec, max_q_len), _whole(spec, max_q_len)
    q_scale, k_scale, v_scale, lse, far, by_length = flags
    return Config(
        heads=spec.num_kv_heads // tuning.pair,
        group=spec.group_size * tuning.pair,
        pair=tuning.pair,
        dim=spec.head_dim_qk,
        words=tuning.words,
        page_size=page_size,
        block=tuning.block,
        unit=_UNIT if spec.batch_invariant else tuning.block,
        run=_RUN if spec.batch_invariant else 0,
        whole=whole,
        tile_rows=tuning.rows if whole else 0,
        stages=tuning.stages,
        programs=tuning.programs,
        scan=scanned(batch),
        rows=tuning.columns,
        part_rows=_part_rows(tuning),
        part_cost=0 if spec.batch_invariant else _part_rows(tuning) * spec.head_dim_vo // 128,
        fetchers=72 if tuning.programs == 2 else 152,
        causal=spec.causal and max_q_len != 1,
        window=spec.window_left >= 0,
        cap=spec.logits_soft_cap > 0,
        mask=spec.custom_mask,
        sinks=spec.sinks,
        far=far,
        by_length=by_length,
        lse=lse,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        fp8=spec.kv_dtype in FLOATS8,
        e5m2=spec.kv_dtype == torch.float8_e5m2,
    )


def _part_rows(tuning: Tuning) -> int:
    return max(4, triton.next_power_of_2(tuning.rows))


def _slots(spec: AttentionSpec, max_q_len: int, processors: int, batch: int, keys: int) -> tuple[int, int]:
    """Programs of a batch-invariant launch, and slots for what they leave: for the units of a run each, but its first,
    and for all runs of the line. Where parts are large, programs are as many as have room.
    """
    tuning = tune(spec, max_q_len)
    each = _part_rows(tuning) * (spec.head_dim_vo + 2) * 4
    runs = spec.num_kv_heads // tuning.pair * (keys // _UNIT + batch) // _RUN
    programs = processors * tuning.programs
    room = (_MOST - runs * each) // (_RUN * each)
    programs = max(min(programs, room), processors // 2)
    return programs, _RUN * programs + runs


def zeros(spec: AttentionSpec, processors: int, max_q_len: int, batch: int, keys: int) -> int:
    """Bytes for parts of tiles of a batch-invariant layer: see `quire.kernels.registry`."""
    if _whole(spec, max_q_len):
        return 0
    slots = _slots(spec, max_q_len, processors, batch, keys)[1]
    return slots * _part_rows(tune(spec, max_q_len)) * (spec.head_dim_vo + 2) * 4


def refuses(call: Call) -> str | None:
    """Copies of 16 bytes want keys and values that are aligned to them, by strides as the kernel is compiled for."""
    step = 16 * _width(call.k)
    if all(is_aligned(x, x.ndim - 1, step) for x in (call.k, call.v)):
        return None
    return f"keys and values must be aligned to 16 bytes, their strides to {step} elements"


def _width(x: Tensor) -> int:
    """Elements in a number of two bytes, of which the kernel sees the cache made."""
    return 2 // x.element_size()


def _few(c: Config, processors: int, batch: int) -> int:
    """Entries of a table that one program on each multiprocessor is enough for, whatever it says; -1 where there are
    no more, or where it is not known how many tiles a request has.
    """
    blocks = processors * c.programs * FEW.value // c.heads - batch  # of a head
    return -1 if c.whole or c.programs == 1 else blocks * c.block // max(c.page_size, 1)


def launch(call: Call, out: Tensor, lse: Tensor | None, processors: int) -> LaunchReplay | None:
    """Compute a call, with programs for as many as run at a time, if there is room for their parts of tiles."""
    spec, kv, q, k, v, mask = call.spec, call.kv, call.q, call.k, call.v, call.mask
    page_size, indices, lengths, by_length, entries = call.table()
    (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale) = split_scales(call)
    tokens, batch = q.shape[0], kv.indptr.shape[0] - 1
    far = max(extent_in_elements(k), extent_in_elements(v)) >= 1 << 31
    flags = (q_scale is not None, k_scale is not None, v_scale is not None, lse is not None, far, by_length)
    c, tuning = config(spec, page_size, batch, call.max_q_len, flags), tune(spec, call.max_q_len)
    each, programs = c.part_rows * (spec.head_dim_vo + 2), processors * tuning.programs
    slots, part = 0, None
    if spec.batch_invariant and not c.whole:
        programs, slots = _slots(spec, call.max_q_len, processors, batch, entries * max(page_size, 1))
        part = call.zeros_for(slots * each, slots * each)
    elif not c.whole:
        part = call.zeros_for(programs * each)
        programs = min(programs, part.numel() // each)
    few = _few(c, processors, batch)
    if entries <= few:
        programs = min(programs, processors)  # others would find that nothing is left for them
    repeat = _launcher(c, tuning.registers)(
        programs,
        (q, None, k, v, None, out, lse, call.sinks),
        (
            part,
            call.qo.indptr,
            kv.indptr,
            lengths,
            indices,
            mask.bits if mask is not None else None,
            mask.indptr if mask is not None else None,
            q_scale,
            k_scale,
            v_scale,
        ),
        (
            processors,
            slots,
            mask.bits.shape[0] if mask is not None else 0,
            batch,
            tokens,
            entries,
            k.shape[0],
            spec.window_left,
            spec.sm_scale * LOG2E * q_gain * k_gain,
            v_gain,
            spec.logits_soft_cap * LOG2E,
        ),
        (*q.stride()[:2], *(n // _width(x) for x in (k, v) for n in kv_strides(x)), *out.stride()[:2]),
    )
    if repeat is not None and entries <= few:
        repeat.max_entries = few
    # What is to be repeated must read the caller's own tensors.
    return repeat if (part is None or part is call.zeros) and q_scale is k_scale is v_scale is None else None
