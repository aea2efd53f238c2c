"""Page tables that are rows of a block table, as engines keep them: read where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.pages import LengthTable, PageTable, table

_MIN_ROWS = 1024
# Offsets of rows by device and row stride. They are never freed, because captured CUDA graphs may read them.
_ROW_STARTS: dict[tuple[torch.device, int], list[Tensor]] = {}


def block_table(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> PageTable:
    """The page table of requests whose pages are the rows of a block table.

    On a device, the table reads both tensors where they are: nothing is copied or launched, so that a captured CUDA
    graph sees what they hold when it is replayed. On the host it is `PageTable.from_block_tables`.

    Args:
        block_tables: int32 [batch_size, max_pages], page ids, with any row stride of at least max_pages. Entries beyond
            a request's length may be anything.
        seq_lens: int32 or uint32 [batch_size], the requests' lengths in tokens.

    Raises:
        ValueError: tensors of other shapes, dtypes, devices or strides, or, on the host, a length that does not fit.
    """
    _check(block_tables, seq_lens)
    if block_tables.is_cpu:
        return PageTable.from_block_tables(block_tables, seq_lens.view(torch.int32), page_size)
    return rows_in_place(block_tables, seq_lens, page_size)


def rows_in_place(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> LengthTable:
    """The table of checked tensors, which kernels for GPUs read where they are."""
    (count, width), stride = block_tables.shape, block_tables.stride(0)
    starts = row_starts(block_tables.device, count, max(stride, width))
    entries = (count - 1) * stride + width if count and width else 0
    pages = block_tables.as_strided((entries,), (1,))
    return LengthTable.of(starts, pages, seq_lens.view(torch.int32), page_size, "seq_lens")


def row_starts(device: torch.device, count: int, stride: int) -> Tensor:
    """int32 [count + 1], the multiples of `stride`, on a device: the offsets of equal rows. Never waits for it."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        known = _ROW_STARTS.get((device, stride), [])
        found = next((x for x in known if len(x) > count), None)
        # A vector that is made during a capture belongs to the graph, which fills it when it is replayed.
        return _multiples(device, count, stride) if found is None else found[: count + 1]
    kept = _ROW_STARTS.setdefault((device, stride), [])
    if not kept or len(kept[-1]) <= count:
        kept.append(_multiples(device, max(_MIN_ROWS, 1 << count.bit_length()), stride))
    return kept[-1][: count + 1]


def _multiples(device: torch.device, count: int, stride: int) -> Tensor:
    starts = torch.arange(count + 1, dtype=torch.int64, device=device) * stride
    return starts.clamp_(max=(1 << 31) - 1).int()


def _check(block_tables: Tensor, seq_lens: Tensor) -> None:
    if not isinstance(block_tables, Tensor) or block_tables.ndim != 2 or block_tables.dtype != torch.int32:
        shape = list(block_tables.shape) if isinstance(block_tables, Tensor) else type(block_tables).__name__
        raise ValueError(f"block_tables has shape {shape}: it must be an int32 matrix [batch_size, max_pages]")
    count, width = block_tables.shape
    if (width > 1 and block_tables.stride(1) != 1) or (count > 1 and block_tables.stride(0) < width):
        strides = list(block_tables.stride())
        raise ValueError(f"block_tables has strides {strides}: rows must lie one after another, and their entries, too")
    if not isinstance(seq_lens, Tensor) or seq_lens.dtype not in (torch.int32, torch.uint32):
        found = seq_lens.dtype if isinstance(seq_lens, Tensor) else type(seq_lens).__name__
        raise ValueError(f"seq_lens is {found}: it must be an int32 vector, which kernels read where it is")
    table(seq_lens.view(torch.int32), "seq_lens", count)
    if not seq_lens.is_contiguous():
        raise ValueError(f"seq_lens has strides {list(seq_lens.stride())}: it must be contiguous")
