"""The kernel that copies requests' pages from a matrix of slots, one after another, into a page table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, wait_for_launch_before


@dataclass(frozen=True)
class PageTableConfig:
    """The constants that the kernel is compiled for."""

    # A program copies `block` pages of one request at a time. `programs` programs share the pages of a request.
    block: int
    programs: int
    # The number of requests whose lengths are added up at a time.
    batch_block: int
    num_warps: int
    launch_pdl: bool


@lru_cache(maxsize=1024)
def page_table_config(batch_size: int, max_pages: int, device: torch.device) -> PageTableConfig:
    """The constants for requests of at most max_pages pages. Short requests leave most of their programs idle."""
    block = 1024
    batch_block = min(triton.next_power_of_2(batch_size), block)
    return PageTableConfig(block, min(triton.cdiv(max_pages, block), 16), batch_block, 4, has_dependent_launch(device))


@triton.jit
def page_count(lengths, b, batch, extra, width, page_size):
    """The tokens of requests b, at most the columns of the matrix, and their pages; 0 for requests beyond the batch."""
    tokens = tl.load(lengths + b, b < batch, -extra).to(tl.int64) + extra
    tokens = tl.minimum(tl.maximum(tokens, 0), width).to(tl.int32)
    return tokens, (tokens + page_size - 1) // page_size


@triton.jit(do_not_specialize=["batch", "capacity", "num_rows", "width", "num_slots", "extra"])
def copy_pages(
    indptr, indices, last_page_len, req_to_token, rows, lengths, slot_map,
    batch, capacity, num_rows, width, num_slots, extra, row_stride, page_size, c: tl.constexpr,
):  # fmt: skip
    """Program (b, part) copies every c.programs-th block of the pages of request b, and part 0 writes its lengths."""
    wait_for_launch_before(c.launch_pdl)
    b, part = tl.program_id(0), tl.program_id(1)
    start = tl.zeros((), tl.int64)
    for i in range(0, b, c.batch_block):
        others = i + tl.arange(0, c.batch_block)
        _, counts = page_count(lengths, others, b, extra, width, page_size)
        start += tl.sum(counts.to(tl.int64), 0)
    tokens, pages = page_count(lengths, b, batch, extra, width, page_size)
    if part == 0:
        if b == 0:
            tl.store(indptr, 0)
        tl.store(indptr + b + 1, tl.minimum(start + pages, capacity).to(tl.int32))
        tl.store(last_page_len + b, tokens - tl.maximum(pages - 1, 0) * page_size)
    row = tl.minimum(tl.maximum(tl.load(rows + b).to(tl.int64), 0), num_rows - 1)
    for first in range(part * c.block, pages, c.programs * c.block):
        page = first + tl.arange(0, c.block)
        inside = (page < pages) & (start + page < capacity)
        slot = tl.load(req_to_token + row * row_stride + page * page_size, inside, 0)
        if slot_map is not None:
            slot = tl.load(slot_map + tl.minimum(tl.maximum(slot, 0), num_slots - 1), inside, 0).to(tl.int32)
        tl.store(indices + start + page, slot // page_size, inside)


_launch = SmallLauncher(copy_pages)


def fill_page_table(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    lengths: Tensor,
    slot_map: Tensor | None,
    page_size: int,
    extra: int,
) -> None:
    """`quire.kernels.page_table.fill_page_table` on a GPU."""
    batch_size, (num_rows, width) = len(rows), req_to_token.shape
    if not batch_size:
        indptr.zero_()
        return
    c = page_table_config(batch_size, -(-width // page_size), rows.device)
    tensors = (indptr, indices, last_page_len, req_to_token, rows.contiguous(), lengths.contiguous(), slot_map)
    num_slots = 0 if slot_map is None else len(slot_map)
    numbers = (batch_size, len(indices), num_rows, width, num_slots, extra)
    _launch((batch_size, c.programs), tensors, numbers, (req_to_token.stride(0), page_size), c)
