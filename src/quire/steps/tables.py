"""The tables of a step: offsets, page table, positions and slots, made on the host and copied to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.definition.pages import PageTable

_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True, eq=False, slots=True)
class StepTables:
    """The requests of a step, and the cache slots of their new tokens.

    Attributes:
        qo_indptr: int32 [batch_size + 1], the offsets of the requests among the new tokens.
        pages: the requests' pages, including those of the new tokens.
        lengths: int32 [batch_size], the number of tokens of each request, including the new ones.
        positions, slots: int64 [tokens], the position of each new token in its request, and its slot in the cache,
            page * page_size + offset in the page.
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
        """Make the tables from a scheduler's lists, with one copy to the device and without waiting for it.

        Args:
            pages: each request's pages in order, as memory of C ints: ``array("i")`` or int32 NumPy vectors. Pages
                beyond a request's last token are ignored.
            lengths: the number of tokens of each request, including the new ones.
            query_lens: the number of new tokens of each request, which are its last ones.
            num_pages: pages in the cache; None: the number is unknown, and page ids are only checked to be at least 0.
            pad_to: the batch size to reach by adding requests without tokens.

        Raises:
            ValueError: a request has fewer pages than its tokens need, a page outside the cache, or more new tokens
                than tokens.
        """
        total, new = np.asarray(lengths, dtype=np.int32), np.asarray(query_lens, dtype=np.int32)
        counts = -(-total // page_size)
        used, needed = pages, counts.tolist()
        if list(map(len, pages)) != needed:
            used = [own[:n] for own, n in zip(pages, needed, strict=True)]
        indices = np.frombuffer(b"".join(used), dtype=np.int32)
        _check_host(used, counts, total, new, indices, page_size, num_pages)
        kv_indptr, qo_indptr = _indptr(counts, pad_to), _indptr(new, pad_to)
        last_page_len = total - np.maximum(counts - 1, 0) * page_size

        request = np.repeat(np.arange(len(new)), new)
        position = np.arange(len(request)) + np.repeat(total - qo_indptr[1 : len(new) + 1], new)
        page, offset = np.divmod(position, page_size)
        slot = indices[kv_indptr[request] + page].astype(np.int64) * page_size + offset
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


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Copy an int32 or int64 host array of any shape to a device without waiting for it; the array may be changed
    right after the call.
    """
    on_cuda = torch.device(device).type == "cuda"
    host = torch.empty(array.shape, dtype=_TYPES[array.dtype], pin_memory=on_cuda)
    host.numpy()[...] = array
    return host.to(device, non_blocking=True) if on_cuda else host


def _check_host(
    pages: Sequence[Any],
    counts: np.ndarray,
    lengths: np.ndarray,
    query_lens: np.ndarray,
    indices: np.ndarray,
    page_size: int,
    num_pages: int | None,
) -> None:
    """Refuse requests, tokens and pages that contradict each other."""
    if lengths.shape != query_lens.shape or lengths.ndim != 1:
        raise ValueError(f"lengths has {len(lengths)} requests, query_lens {len(query_lens)}")
    bad = (query_lens < 0) | (query_lens > lengths)
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(f"request {b} has {lengths[b]} tokens, of which {query_lens[b]} cannot be new")
    if len(indices) != counts.sum():
        b = next(b for b, (own, n) in enumerate(zip(pages, counts, strict=True)) if len(own) != n)
        capacity = len(pages[b]) * page_size
        raise ValueError(f"request {b} has {lengths[b]} tokens, and pages for {capacity}")
    bound = np.iinfo(np.int32).max if num_pages is None else num_pages
    # As uint32, negative ids are above the bound.
    if len(indices) and indices.view(np.uint32).max() >= bound:
        i = int(((indices < 0) | (indices >= bound)).argmax())
        request = int((counts.cumsum() <= i).sum())
        raise ValueError(f"request {request} has page {indices[i]}: pages are 0 to {bound - 1}")


def _indptr(counts: np.ndarray, pad_to: int) -> np.ndarray:
    indptr = np.zeros(max(len(counts), pad_to) + 1, dtype=np.int32)
    counts.cumsum(out=indptr[1 : len(counts) + 1])
    indptr[len(counts) + 1 :] = indptr[len(counts)]
    return indptr


def _to_device(groups: Sequence[Sequence[np.ndarray]], device: torch.device | str) -> list[tuple[Tensor, ...]]:
    """Copy groups of vectors to a device in one transfer. The vectors of a group have one dtype, and groups of wider
    dtypes come first, which keeps every vector aligned.
    """
    sizes = [sum(x.nbytes for x in group) for group in groups]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    np.concatenate([x.view(np.uint8) for group in groups for x in group], out=packed.numpy())
    segments = packed.to(device, non_blocking=True).split_with_sizes(sizes)
    return [
        segment.view(_TYPES[group[0].dtype]).split_with_sizes([len(x) for x in group])
        for segment, group in zip(segments, groups, strict=True)
    ]
