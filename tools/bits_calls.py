"""Public calls on random inputs, for `bits.py`: functions that make a call, and `cases`, which lists what they are
called with. Only names are used that users have, too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

quire: Any = import_module("quire")  # untyped, since calls unpack options and tables

BF16, F16 = torch.bfloat16, torch.float16
F32 = torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LONG, SHORT = (9000, 700) if DEVICE == "cuda" else (90, 20) if INTERPRETED else (500, 60)  # tokens of a request
WRAPPERS: dict[str, Any] = {
    "decode": quire.BatchDecodeWithPagedKVCacheWrapper,
    "paged": quire.BatchPrefillWithPagedKVCacheWrapper,
    "ragged": quire.BatchPrefillWithRaggedKVCacheWrapper,
}


class Inputs:
    """Random inputs of one call, made on the host, where a seed gives the same numbers whatever the device."""

    def __init__(self, name: str, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        self.workspace = torch.empty(0, device=DEVICE)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(DEVICE)

    def bools(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < 0.7).to(DEVICE)

    def ints(self, low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=self.generator).tolist()

    def pages(self, lens: list[int], size: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """indptr, indices and last_page_len of requests at random ones of `count` pages."""
        order = torch.randperm(count, generator=self.generator)
        used, last = [-(-n // size) for n in lens], [(n - 1) % size + 1 if n else 1 for n in lens]
        return indptr(used), order[: sum(used)].int().to(DEVICE), table(last)


def table(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def indptr(lens: list[int]) -> Tensor:
    return table([0, *torch.tensor(lens).cumsum(0).tolist()])


def batch(
    x: Inputs, backend: str, kind: str, heads: Any = (8, 2), dims: Any = (128, 128), page: int = 16, dtype: Any = BF16,
    kv_dtype: Any = None, layout: str = "NHD", q_len: int = 1, mask: str = "", scales: str = "", sinks: bool = False,
    invariant: bool = False, ints: Any = torch.int32, run: Any = None, **plan: Any,
) -> Iterator[Any]:  # fmt: skip
    """A plan and two runs, of which the second may repeat the first one's launch; then a plan of other lengths."""
    wrapper = WRAPPERS[kind](x.workspace, layout[:3], backend=backend, batch_invariant=invariant or None)
    types = {"q_data_type": dtype, "kv_data_type": kv_dtype or dtype, "head_dim_vo": dims[1]}
    run = dict(run or {}) | ({"sinks": x.normal(heads[0], dtype=F32)} if sinks else {})
    if scales:
        run |= {f"{a}_scale": x.normal(heads[1], dtype=F32) if scales == "heads" else 0.75 for a in "kv"}
    for lens, runs in (([LONG, 1, *x.ints(1, SHORT, 3)], 2), ([*x.ints(0, SHORT, 4), 0], 1)):
        q_lens = [q_len] * 5 if kind == "decode" else [*x.ints(1, SHORT, 2), 0, 1, 0]
        lens = lens if kind == "decode" else [n + m for n, m in zip(lens, q_lens, strict=True)]
        q, pages = x.normal(sum(q_lens), heads[0], dims[0], dtype=dtype), -(-LONG // page) + 4 * -(-2 * SHORT // page)
        if mask == "items":
            numbers = (torch.arange(max(lens)) % 7).int().repeat(5).to(DEVICE)
            plan |= {"prefix_len_ptr": table([3, 1, 4, 0, 2]), "token_pos_in_items_ptr": numbers}
            plan["token_pos_in_items_len"] = max(lens)
        elif mask:
            sizes = [n * m for n, m in zip(q_lens, lens, strict=True)]
            bits = x.bools(sum(sizes))
            packed = quire.segment_packbits(bits, indptr(sizes), "little")[0]
            plan |= {"custom_mask": bits} if mask == "bools" else {"packed_custom_mask": packed}
        shape = (sum(lens),) if kind == "ragged" else (pages, page)
        k, v = (x.normal(*shape, heads[1], dim, dtype=kv_dtype or dtype) for dim in dims)
        k, v = (y if layout[:3] == "NHD" else y.transpose(-2, -3).contiguous() for y in (k, v))
        cache: Any = (k, v) if kind == "ragged" else [torch.stack([k, v], 1) if layout[3:] else (k, v)]
        if kind == "ragged":
            wrapper.plan(indptr(q_lens), indptr(lens), *heads, dims[0], **types, **plan)
        else:
            tables = [] if kind == "decode" else [indptr(q_lens)]
            tables = [t.to(ints) for t in (*tables, *x.pages(lens, page, pages))]
            plan |= {"q_len_per_req": q_len} if kind == "decode" else {}
            wrapper.plan(*tables, *heads, dims[0], page, **types, **plan)
        for _ in range(runs):
            yield wrapper.run(q, *cache, **run)


def shared_prefix(x: Inputs, backend: str, dtype: Any, q_len: int) -> Iterator[Any]:
    """16 requests that share 64 pages, and have 3 of their own."""
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(x.workspace, backend=backend)
    pages = [n for i in range(16) for n in (*range(64), *range(64 + i * 3, 67 + i * 3))]
    tables, types = (indptr([67] * 16), table(pages), table(x.ints(5, 17, 16))), {"data_type": dtype}
    wrapper.plan(*tables, 32, 8, 128, 16, shared_prefix=True, q_len_per_req=q_len, **types)
    q, kv = x.normal(16 * q_len, 32, 128, dtype=dtype), x.normal(2, 112, 16, 8, 128, dtype=dtype)
    yield torch.tensor(wrapper.shared_prefix.tokens_saved if wrapper.shared_prefix else 0)
    yield from (wrapper.run(q, tuple(kv), return_lse=True) for _ in range(2))


def single(x: Inputs, backend: str, kind: str, **options: Any) -> Iterator[Any]:
    k, v = x.normal(2, LONG, 2, 128, dtype=F16)
    if kind == "decode":
        yield quire.single_decode_with_kv_cache(x.normal(8, 128, dtype=F16), k, v, backend=backend, **options)
    else:
        mask = {"custom_mask": x.bools(SHORT, LONG)} if options.pop("mask", False) else {}
        q = x.normal(SHORT, 8, 128, dtype=F16)
        yield quire.single_prefill_with_kv_cache(q, k, v, backend=backend, **options, **mask)


def mla(
    x: Inputs, backend: str, heads: int, page: int, dtype: Any, kv_dtype: Any, q_len: int, causal: bool = True,
    invariant: bool = False, run: Any = None,
) -> Iterator[Any]:  # fmt: skip
    wrapper = quire.BatchMLAPagedAttentionWrapper(x.workspace, backend=backend, batch_invariant=invariant or None)
    scales = {"ckv_scale": 0.5, "kpe_scale": 0.75} if kv_dtype in (E4M3, E5M2) else {}
    count = -(-LONG // page) + 4 * -(-SHORT // page)
    cache = x.normal(count, page, 576, dtype=kv_dtype).split((512, 64), -1)
    for lens, runs in (([LONG, 1, *x.ints(1, SHORT, 3)], 2), (x.ints(0, SHORT, 5), 1)):
        q_lens = [1] * 5 if q_len == 1 else [1, *x.ints(0, q_len, 3), q_len]
        kv = x.pages(lens, page, count)[:2]
        wrapper.plan(indptr(q_lens), *kv, table(lens), heads, 512, 64, page, causal, 0.07, dtype, kv_dtype)
        q = x.normal(sum(q_lens), heads, 576, dtype=dtype).split((512, 64), -1)
        yield from (wrapper.run(*q, *cache, **scales, **(run or {})) for _ in range(runs))


def mla_decode(x: Inputs, backend: str, dtype: Any, dim: int) -> Iterator[Any]:
    wrapper = quire.BatchDecodeMlaWithPagedKVCacheWrapper(x.workspace, backend=backend)
    count = LONG // 16 + SHORT
    wrapper.plan(*x.pages([LONG, 1, 0, SHORT], 16, count), 16, dim, 16, 0.07, data_type=dtype)
    q, cache = (x.normal(*shape, dim + 64, dtype=dtype).split((dim, 64), -1) for shape in ((4, 16), (count, 16)))
    yield wrapper.run(*q, *cache, return_lse=True)


def block_sparse(x: Inputs, backend: str, masked: bool, dtype: Any, **layer: Any) -> Iterator[Any]:
    """A matrix of blocks of 8 rows and 16 columns, the last row of blocks cut."""
    wrapper, blocks = quire.BlockSparseAttentionWrapper(x.workspace, backend=backend), x.bools(7, SHORT)
    begin, indices = indptr(blocks.sum(1).tolist()), blocks.nonzero()[:, 1].int()
    mask = x.bools(len(indices), 8, 16) if masked else None
    types = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": dtype}
    wrapper.plan(begin, indices, 51, 16 * SHORT, 8, 16, 8, 2, 64, mask, **types, **layer)
    q, (k, v) = x.normal(51, 8, 64, dtype=dtype), x.normal(2, 16 * SHORT, 2, 64, dtype=dtype)
    yield wrapper.run(q, k, v, return_lse=True)
    yield quire.sparse.convert_bsr_mask_layout(x.bools(len(indices), 8, 16), begin)


def variable_block_sparse(x: Inputs, backend: str, dtype: Any, **layer: Any) -> Iterator[Any]:
    wrapper = quire.VariableBlockSparseAttentionWrapper(x.workspace, backend=backend)
    rows, columns = torch.tensor([[5, 9, 1], [7, 7, 1]]), torch.tensor([[30, 1, 9], [2, 3, 35]])
    sizes = rows.to(DEVICE), columns.to(DEVICE)
    wrapper.plan(x.bools(2, 3, 3), *sizes, 8, 2, 64, q_data_type=dtype, **layer)
    k, v = x.normal(2, 2, 40, 64, dtype=dtype)
    yield wrapper.run(x.normal(8, 15, 64, dtype=dtype), k, v, return_lse=True)


def cascade(x: Inputs, dtype: Any, causal: bool) -> Iterator[Any]:
    """Three levels: all requests, two halves of them, and each of four."""
    wrapper = quire.MultiLevelCascadeAttentionWrapper(3, x.workspace)
    queries, keys = [[20], [9, 11], [1, 8, 5, 6]], [[LONG], x.ints(1, SHORT, 2), [SHORT, *x.ints(8, SHORT, 3)]]
    tables = zip(*(x.pages(lens, 16, LONG // 16 + SHORT) for lens in keys), strict=True)
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan([indptr(n) for n in queries], *map(list, tables), 8, 2, 128, 16, causal, **types)
    kv = x.normal(2, LONG // 16 + SHORT, 16, 2, 128, dtype=dtype)
    yield from (wrapper.run(x.normal(20, 8, 128, dtype=dtype), tuple(kv)) for _ in range(2))


def own_prefix(x: Inputs, dtype: Any) -> Iterator[Any]:
    """The wrappers whose shared prefix is a tensor of its own."""
    q, shared = x.normal(9, 8, 128, dtype=dtype), x.normal(2, LONG, 2, 128, dtype=dtype)
    tables, kv = x.pages([SHORT, 5, 0], 16, 3 * SHORT), tuple(x.normal(2, 3 * SHORT, 16, 2, 128, dtype=dtype))
    decoding = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(x.workspace)
    decoding.begin_forward(*tables, 8, 2, 128, 16, data_type=dtype)
    yield decoding.forward(q[:3], *shared, kv)
    prefilling = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(x.workspace)
    prefilling.begin_forward(indptr([5, 4, 0]), *tables, 8, 2, 128, 16, data_type=dtype)
    yield prefilling.forward(q, *shared, kv, causal=True)


def pod(x: Inputs, dtype: Any, causal: bool) -> Iterator[Any]:
    count = 3 * SHORT
    kv, q = tuple(x.normal(2, count, 16, 2, 128, dtype=dtype)), x.normal(SHORT, 8, 128, dtype=dtype)
    decodes, types = x.pages([SHORT, 1, 33], 16, count), {"q_data_type": dtype, "kv_data_type": dtype}
    one = quire.PODWithPagedKVCacheWrapper(x.workspace)
    one.plan(*decodes, 8, 2, 128, 16, **types)
    yield one.run(q, *x.normal(2, LONG, 2, 128, dtype=dtype), q[:3], kv, causal_p=causal)
    both = quire.BatchPODWithPagedKVCacheWrapper(x.workspace)
    prefills = indptr([SHORT - 1, 1]), *x.pages([SHORT, 7], 16, count)
    both.plan(*prefills, indptr([1, 1, 1]), *decodes, 8, 2, 128, 16, **types)
    yield from (both.run(q, kv, q[:3], kv, causal_p=causal, return_lse=True) for _ in range(2))


def attention_of_batch(x: Inputs, dtype: Any, causal: bool) -> Iterator[Any]:
    count, lens = LONG // 16 + SHORT, [LONG, SHORT, 1, 0]
    pages, kv = x.pages(lens, 16, count), tuple(x.normal(2, count, 16, 2, 128, dtype=dtype))
    q, types = x.normal(10, 8, 128, dtype=dtype), {"q_data_type": dtype, "kv_data_type": dtype}
    wrapper = quire.BatchAttention(device=DEVICE)
    wrapper.plan(indptr([1, 8, 1, 0]), *pages[:2], table(lens), 8, 2, 128, 128, 16, causal, **types)
    yield from (wrapper.run(q, kv) for _ in range(2))
    sinks = quire.BatchAttentionWithAttentionSinkWrapper(x.workspace, window_left=31, **types)
    sinks.plan(indptr([1, 8, 1, 0]), *pages, 8, 2, 128, 16, causal=causal, **types)
    yield sinks.run(q, kv, x.normal(8, dtype=F32), 0.1)


def merge(x: Inputs, dtype: Any, dim: int) -> Iterator[Any]:
    v, s = x.normal(3, 40, 7, dim, dtype=dtype), x.normal(3, 40, 7, dtype=F32)
    s[:2, 3], s[0, 4] = -torch.inf, -torch.inf
    yield quire.merge_state(v[0], s[0], v[1], s[1])
    yield quire.merge_states(v.transpose(0, 1).contiguous(), s.transpose(0, 1).contiguous())
    yield quire.cascade.variable_length_merge_states(v[0], s[0], indptr([0, 3, 30, 1, 6]))
    quire.merge_state_in_place(v[0], s[0], v[2], s[2], x.bools(40))
    yield v[0], s[0]


def append(x: Inputs, dtype: Any, layout: str, page: int) -> Iterator[Any]:
    lens, new = [SHORT, 1, 33, 0], [SHORT // 2, 1, 20, 0]
    pages, count = x.pages(lens, page, 3 * SHORT), sum(new)
    yield quire.get_seq_lens(pages[0], pages[2], page)
    yield (places := quire.get_batch_indices_positions(indptr(new), table(lens), count + 2))
    places, where = tuple(p[:count] for p in places), (pages[1], pages[0], pages[2])
    k, v = x.normal(2, count, 2, 64).to(dtype)
    kv = x.normal(2, 3 * SHORT, *((page, 2) if layout == "NHD" else (2, page)), 64).to(dtype)
    quire.append_paged_kv_cache(k, v, *places, tuple(kv), *where, layout)
    ckv, kpe = x.normal(3 * SHORT, page, 576).to(dtype).split((512, 64), -1)
    quire.append_paged_mla_kv_cache(
        x.normal(count, 512).to(dtype), x.normal(count, 64).to(dtype), *places, ckv, kpe, *where
    )
    yield kv, ckv, kpe


def rope(x: Inputs, dtype: Any, interleave: bool, rotary_dim: int) -> Iterator[Any]:
    requests, positions = (indptr([7, 1, 22]), table([5, 100_000, 0])), table(x.ints(0, 10_000, 30))
    for name in ("apply_rope", "apply_llama31_rope"):
        for middle, where in (("", requests), ("_pos_ids", (positions,))):
            qk = x.normal(30, 8, 128, dtype=dtype), x.normal(30, 2, 128, dtype=dtype)
            yield getattr(quire, name + middle)(*qk, *where, rotary_dim, interleave)
            getattr(quire, name + middle + "_inplace")(*qk, *where, rotary_dim, interleave)
            yield qk
    angles = x.normal(50, rotary_dim, dtype=F32)
    yield quire.apply_rope_with_cos_sin_cache(positions % 50, *qk, 128, angles, not interleave)
    quire.apply_rope_with_cos_sin_cache_inplace(positions % 50, *qk, 128, angles, not interleave)
    yield qk
    parts = [y[..., :rotary_dim] for y in qk] + [y[..., rotary_dim:] for y in qk]
    yield quire.rope.rope_quantize_fp8(*parts, angles, positions % 50, not interleave, E5M2, 2.0, 0.5)
    yield quire.rope.mla_rope_quantize_fp8(*parts, angles, positions % 50, not interleave)
    cache = tuple(torch.zeros(9, 16, 2, 128, device=DEVICE).to(E4M3) for _ in "kv")
    places = table([4, 2, 0, 8]), indptr([3, 1]), table([0] * 22 + [1] * 8), table([*range(9, 31), *range(8)])
    yield quire.rope.rope_quantize_fp8_append_paged_kv_cache(
        *parts, x.normal(30, 2, 128, dtype=dtype), angles, positions % 50, cache, *places, not interleave
    )
    yield cache


def pack(x: Inputs, order: str) -> Iterator[Any]:
    bits = x.bools(1003)
    yield quire.packbits(bits, order)
    yield quire.segment_packbits(bits, indptr([0, 13, 900, 90]), order)


LAYERS: tuple[dict[str, Any], ...] = (
    {"run": {"return_lse": True}},
    {"window_left": 20},
    {"logits_soft_cap": 5.0, "run": {"window_left": 30}},
    {"sinks": True, "run": {"return_lse": True}},
    {"pos_encoding_mode": "ALIBI"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0},
    {"invariant": True},
    {"fixed_split_size": 256, "run": {"return_lse": True}},
    {"kv_dtype": E4M3, "scales": "numbers"},
    {"kv_dtype": E5M2, "scales": "heads", "invariant": True},
    {"sm_scale": -0.1, "o_data_type": F32},
    {"window_left": 20, "logits_soft_cap": 5.0, "sinks": True, "invariant": True, "run": {"return_lse": True}},
    {"layout": "HND"},
    {"layout": "NHD, 5-D", "kv_dtype": E4M3},
    {"layout": "HND, 5-D", "ints": torch.int64},
)
PREFILLS: tuple[dict[str, Any], ...] = (
    {"mask": "bools"},
    {"mask": "packed", "run": {"return_lse": True}},
    {"mask": "items"},
    {"run": {"return_lse": True, "lse_base": "ln", "lse_layout": "HN"}},
    {"mask": "bools", "invariant": True, "logits_soft_cap": 5.0},
)
SINGLES: tuple[dict[str, Any], ...] = (
    {"return_lse": True},
    {"window_left": 20, "k_scale": 0.5, "v_scale": 2.0},
    {"logits_soft_cap": 5.0},
    {"pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ALIBI"},
)


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Functions above and their arguments."""
    dims, dtypes = ((128, 128), (64, 64), (256, 256), (192, 128)), (BF16, F16, F32)
    for i, (page, heads) in enumerate((p, h) for p in (1, 16, 64) for h in ((4, 4), (8, 2), (14, 2), (16, 2))):
        shape = {"heads": heads, "page": page, "dims": dims[(i + i // 4) % 4], "dtype": dtypes[i % 3]}
        other = {"heads": heads, "page": page, "dims": dims[(i + i // 4 + 1) % 4], "dtype": dtypes[i % 2]}
        yield batch, {"kind": "decode", **shape}
        yield batch, {"kind": "decode", **other, "kv_dtype": (E4M3, E5M2, None)[i % 3]}
        yield batch, {"kind": ("paged", "ragged")[i % 2], **shape, "causal": i % 3 > 0}
    small = {"page": 1, "heads": (14, 2), "dims": (64, 64), "dtype": F16}
    for layer in LAYERS:
        yield batch, {"kind": "decode", **layer}
        yield batch, {"kind": "decode", **small, **layer}
        yield batch, {"kind": "decode", "q_len": 4, "heads": (8, 1), **layer}
        yield batch, {"kind": "paged", "causal": True, **layer}
    for layer in (*LAYERS[:12], *PREFILLS):
        yield batch, {"kind": "ragged", "dims": (192, 128), "dtype": F16, **layer}
    for layer in PREFILLS:
        yield batch, {"kind": "paged", **small, **layer}
    for kind, layer in ((kind, layer) for kind in ("decode", "prefill") for layer in SINGLES):
        yield single, {"kind": kind, **layer}
    yield single, {"kind": "prefill", "mask": True}
    yield single, {"kind": "prefill", "causal": True}
    yield shared_prefix, {"dtype": BF16, "q_len": 1}
    yield shared_prefix, {"dtype": F16, "q_len": 4}
    for latent_heads, page in ((16, 1), (16, 64), (128, 1), (128, 64)):
        yield mla, {"heads": latent_heads, "page": page, "dtype": BF16, "kv_dtype": BF16, "q_len": 1}
        yield mla, {"heads": latent_heads, "page": page, "dtype": BF16, "kv_dtype": E4M3, "q_len": page}
    for more in ({"run": {"return_lse": True}}, {"invariant": True}, {"causal": False}):
        yield mla, {"heads": 16, "page": 16, "dtype": F16, "kv_dtype": F16, "q_len": 3, **more}
    for dtype in (BF16, F16):
        yield mla_decode, {"dtype": dtype, "dim": 512 if dtype == BF16 else 256}
        yield block_sparse, {"masked": dtype == BF16, "dtype": dtype}
        yield block_sparse, {"masked": False, "dtype": dtype, "causal": True, "pos_encoding_mode": "ROPE_LLAMA"}
        yield variable_block_sparse, {"dtype": dtype, "logits_soft_cap": 5.0 if dtype == BF16 else None}
        for function in (cascade, pod, attention_of_batch):
            yield function, {"dtype": dtype, "causal": False}
            yield function, {"dtype": dtype, "causal": True}
        yield own_prefix, {"dtype": dtype}
        yield merge, {"dtype": dtype, "dim": 128}
        yield merge, {"dtype": F32, "dim": 64 if dtype == BF16 else 80}
        yield append, {"dtype": dtype, "layout": "NHD", "page": 16}
        yield append, {"dtype": E4M3, "layout": "HND", "page": 1 if dtype == BF16 else 64}
        yield rope, {"dtype": dtype, "interleave": True, "rotary_dim": 64}
        yield rope, {"dtype": dtype, "interleave": False, "rotary_dim": 128}
        yield rope, {"dtype": F32, "interleave": dtype == BF16, "rotary_dim": 96}
    yield pack, {"order": "big"}
    yield pack, {"order": "little"}
