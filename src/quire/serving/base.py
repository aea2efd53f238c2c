"""What all serving backends do, once: a step's tables, keys and values into pages, buffers that graphs read, plans.

An engine knows, for each request of a step, how long it is, how many of its tokens are new, and which pages it has.
`StepTables` makes of that what operations need; `store` writes the new tokens' keys and values; `plan` tells a wrapper;
and since scale, window, soft cap and sinks are given to each run, one plan serves all layers that have the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.masks import byte_indptr, pack_segments
from quire.definition.pages import PageTable
from quire.definition.tensors import check_cache, check_no_overlap, check_tensor, check_tensors
from quire.kernels.append import write
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper

_NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True, slots=True)
class Heads:
    """What layers must have in common to share a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer asks of attention."""

    heads: Heads
    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class StepTables:
    """Which tokens of a step belong to whom, and where their keys and values go.

    Attributes:
        qo_indptr: int32 [batch_size + 1], the requests' begins among the new tokens.
        pages: the requests' pages, those of the new tokens among them.
        lengths: int32 [batch_size], the requests' tokens, the new ones counted.
        positions, slots: int64 [tokens], each new token's position in its request, and its place in the cache:
            page * page_size + place in the page.
    """

    qo_indptr: Tensor
    pages: PageTable
    lengths: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def from_host(
        cls,
        pages: Sequence[Any],
        lengths: Sequence[int],
        query_lens: Sequence[int],
        page_size: int,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
        *,
        pad_to: int = 0,
    ) -> StepTables:
        """From what a scheduler knows. Never waits for the device, and copies to it once.

        Args:
            pages: each request's pages in order, as memory of C ints: ``array("i")`` or int32 NumPy vectors. There may
                be more than its tokens fill.
            lengths: each request's tokens, the new ones counted.
            query_lens: how many of them are new; they are the last.
            num_pages: of the cache; None: nobody knows, and page ids are only checked to be no less than 0.
            pad_to: the batch size to reach with requests that have no tokens.

        Raises:
            ValueError: fewer pages than tokens need, a page beyond the cache, or new tokens that are too many.
        """
        total, new = np.asarray(lengths, dtype=np.int32), np.asarray(query_lens, dtype=np.int32)
        counts = -(-total // page_size)
        parts, needed = pages, counts.tolist()
        if list(map(len, pages)) != needed:
            parts = [own[:n] for own, n in zip(pages, needed, strict=True)]
        indices = np.frombuffer(b"".join(parts), dtype=np.int32)
        _check_host(parts, counts, total, new, indices, page_size, num_pages)
        kv_indptr, qo_indptr = _indptr(counts, pad_to), _indptr(new, pad_to)
        last_page_len = total - np.maximum(counts - 1, 0) * page_size

        request = np.repeat(np.arange(len(new)), new)
        position = np.arange(len(request)) + np.repeat(total - qo_indptr[1 : len(new) + 1], new)
        page, within = np.divmod(position, page_size)
        slot = indices[kv_indptr[request] + page].astype(np.int64) * page_size + within
        if pad_to > len(new):
            last_page_len, total = (np.pad(x, (0, pad_to - len(new))) for x in (last_page_len, total))
        (positions, slots), (on_qo, on_kv, on_last, on_lengths, on_indices) = _to_device(
            ((position, slot), (qo_indptr, kv_indptr, last_page_len, total, indices)), device
        )
        table = PageTable(on_kv, on_indices, on_last, page_size)
        return cls(on_qo, table, on_lengths, positions, slots)

    @property
    def batch_size(self) -> int:
        return self.pages.batch_size


def _check_host(
    parts: Sequence[Any],
    counts: np.ndarray,
    lengths: np.ndarray,
    query_lens: np.ndarray,
    indices: np.ndarray,
    page_size: int,
    num_pages: int | None,
) -> None:
    """Refuse a step whose requests, tokens and pages do not fit together."""
    if lengths.shape != query_lens.shape or lengths.ndim != 1:
        raise ValueError(f"lengths has {len(lengths)} requests, query_lens {len(query_lens)}")
    bad = (query_lens < 0) | (query_lens > lengths)
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(f"request {b} has {lengths[b]} tokens, of which {query_lens[b]} cannot be new")
    if len(indices) != counts.sum():
        b = next(b for b, (part, n) in enumerate(zip(parts, counts, strict=True)) if len(part) != n)
        room = len(parts[b]) * page_size
        raise ValueError(f"request {b} has {lengths[b]} tokens, and pages for {room}")
    beyond = np.iinfo(np.int32).max if num_pages is None else num_pages
    if len(indices) and indices.view(np.uint32).max() >= beyond:  # where ids below 0 are large ones
        b = int(((indices < 0) | (indices >= beyond)).argmax())
        request = int((counts.cumsum() <= b).sum())
        raise ValueError(f"request {request} has page {indices[b]}: pages are 0 to {beyond - 1}")


def _indptr(counts: np.ndarray, pad_to: int) -> np.ndarray:
    indptr = np.zeros(max(len(counts), pad_to) + 1, dtype=np.int32)
    counts.cumsum(out=indptr[1 : len(counts) + 1])
    indptr[len(counts) + 1 :] = indptr[len(counts)]
    return indptr


def _to_device(groups: Sequence[Sequence[np.ndarray]], device: torch.device | str) -> list[tuple[Tensor, ...]]:
    """Groups of vectors on a device, by one copy. A group has one dtype, and wider ones come first, to be aligned."""
    sizes = [sum(x.nbytes for x in group) for group in groups]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    np.concatenate([x.view(np.uint8) for group in groups for x in group], out=packed.numpy())
    parts = packed.to(device, non_blocking=True).split_with_sizes(sizes)
    return [
        part.view(_TYPES[group[0].dtype]).split_with_sizes([len(x) for x in group])
        for part, group in zip(parts, groups, strict=True)
    ]


def store(
    cache: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write new keys and values into pages, divided by their scales where the cache is fp8.

    Args:
        cache: k and v, NHD views [pages, page_size, num_kv_heads, head_dim].
        key, value: [tokens, num_kv_heads, head_dim].
        slots: int32 or int64 [tokens], see `StepTables`; tokens of slot -1 are skipped.

    Raises:
        ValueError: tensors that do not fit the cache, or, on the host, a slot beyond it.
    """
    check_cache(cache, "cache")
    check_tensors(key=key, value=value, slots=slots)
    k_cache, v_cache = cache
    dtype, device = k_cache.dtype, k_cache.device
    check_tensor(k_cache, "k_cache", (None,) * 4, dtype, device)
    check_tensor(v_cache, "v_cache", (*k_cache.shape[:3], None), dtype, device)
    check_no_overlap(k_cache, "k_cache")
    check_no_overlap(v_cache, "v_cache")
    check_tensor(slots, "slots", (None,), torch.int32 if slots.dtype == torch.int32 else torch.int64, device)
    key, value = quantize(key, dtype, k_scale), quantize(value, dtype, v_scale)
    check_tensor(key, "key", (len(slots), *k_cache.shape[2:]), dtype, device)
    check_tensor(value, "value", (len(slots), *v_cache.shape[2:]), dtype, device)
    write(k_cache, v_cache, key, value, slots)


def quantize(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """X as a cache (or an output) of this dtype holds it: divided by its scale and saturated, if that is fp8."""
    if x.dtype == dtype or dtype.itemsize > 1:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def fp8_dtype(name: str) -> torch.dtype:
    """The dtype that engines call fp8, fp8_e4m3 or fp8_e5m2."""
    if name not in _NAMES:
        raise ValueError(f"fp8 dtype {name!r} is not known: {', '.join(_NAMES)} are")
    return _NAMES[name]


@lru_cache(maxsize=32)
def workspace(device: torch.device, size: int) -> Tensor:
    """Bytes that wrappers which run one after another share; the same ones for each device and size."""
    return torch.empty(size, dtype=torch.uint8, device=device)


@dataclass(frozen=True, eq=False, slots=True)
class GraphBuffers:
    """Tables that captured graphs read: plans of the wrappers made here go into them, in place.

    Attributes:
        indptr, last_page_len: int32 [max_requests + 1] and [max_requests].
        indices: int32 [entries], pages of all requests together.
        qo_indptr, mask, mask_indptr: for wrappers of several query tokens per request; mask: uint8, packed.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    qo_indptr: Tensor | None = None
    mask: Tensor | None = None
    mask_indptr: Tensor | None = None

    def decode(self, batch_size: int, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> Any:
        """A decode wrapper for graphs of this many requests."""
        self._check(batch_size)
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.indptr[: batch_size + 1],
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page_len[:batch_size],
            **options,
        )

    def prefill(self, batch_size: int, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> Any:
        """A wrapper for graphs of this many requests with several query tokens each."""
        self._check(batch_size)
        if self.qo_indptr is None:
            raise ValueError("these buffers are for decode: qo_indptr is missing")
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            kv_layout,
            use_cuda_graph=True,
            qo_indptr_buf=self.qo_indptr[: batch_size + 1],
            paged_kv_indptr_buf=self.indptr[: batch_size + 1],
            paged_kv_indices_buf=self.indices,
            paged_kv_last_page_len_buf=self.last_page_len[:batch_size],
            custom_mask_buf=self.mask,
            mask_indptr_buf=None if self.mask_indptr is None else self.mask_indptr[: batch_size + 1],
            **options,
        )

    def _check(self, batch_size: int) -> None:
        room = len(self.last_page_len)
        if not 0 < batch_size <= room:
            raise ValueError(f"a graph of {batch_size} requests does not fit buffers made for {room}")


def plan(
    wrapper: Any,
    pages: PageTable,
    heads: Heads,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    qo_indptr: Tensor | None = None,
    **options: Any,
) -> None:
    """Plan a wrapper for a step: one of decode or, with qo_indptr, one of prefill.

    `options` are those of the wrapper's plan: causal, custom_mask, q_len_per_req, ...
    """
    tables = (pages.indptr, pages.indices, pages.last_page_len)
    counts = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk, pages.page_size)
    dtypes = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
    if qo_indptr is None:
        wrapper.plan(*tables, *counts, head_dim_vo=heads.head_dim_vo, **dtypes, **options)
    else:
        wrapper.plan(qo_indptr, *tables, *counts, heads.head_dim_vo, **dtypes, **options)


def pack_mask(mask: Tensor, q_lens: Tensor, kv_lens: Tensor) -> Tensor:
    """Custom masks packed for a wrapper's `packed_custom_mask`, without waiting for the device.

    Args:
        mask: bool [sum of q_len * kv_len], the requests' masks one after another, row by row. What it lacks is unseen.
        q_lens, kv_lens: int32 [batch_size], on the mask's device.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"custom_mask is {mask.dtype}: it must be bool")
    areas = q_lens.long() * kv_lens
    room = mask.numel() // 8 + len(areas)  # each request begins on a new byte
    return pack_segments(mask.flatten(), pad(areas.cumsum(0), (1, 0)), byte_indptr(areas), room)


def prefix_window_mask(q_lens: Tensor, tails: Tensor, window_left: int, num_queries: int, area: int) -> Tensor:
    """Which of the last keys before a request's new tokens each of these still sees through a window: a custom mask,
    bool [area], without waiting for the device.

    Args:
        q_lens: int32 [batch_size], new tokens of each request; num_queries: their sum.
        tails: int32 [batch_size], the keys before them that are looked at: the last ones, at most window_left.
        area: the sum of q_len * tail.
    """
    place = torch.arange(num_queries, device=q_lens.device)
    owner = torch.repeat_interleave(q_lens, output_size=num_queries).long()
    place -= (q_lens.cumsum(0) - q_lens)[owner]
    ends = tails[owner].cumsum(0)
    seen = (window_left - place).clamp(min=0).minimum(tails[owner])  # the last ones of each row
    steps = torch.zeros(area + 1, dtype=torch.int8, device=q_lens.device)
    one = torch.ones_like(place, dtype=torch.int8)
    steps.index_add_(0, ends - seen, one).index_add_(0, ends, -one)
    return steps[:-1].cumsum(0, dtype=torch.int8).bool()


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A host array of any shape on a device. Never waits for it, and the array may change at once."""
    ((flat,),) = _to_device(((array.ravel(),),), device)
    return flat.view(array.shape)
