"""Page tables from a matrix of cache slots, as engines keep one: by torch on the CPU, by a Triton kernel on a GPU.

The kernel reads the lengths on the device. Nothing waits for it, so a CUDA graph may capture the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.pages import PageTable, refuse_first
from quire.definition.tensors import check_tensor
from quire.kernels.ops import env_flag, on_triton, operation


@operation("fill_page_table", "indptr", "indices", "last_page_len")
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
    """Write the page table of requests whose slots are rows of a matrix.

    Args:
        indptr, indices, last_page_len: contiguous int32 [batch_size + 1], [capacity] and [batch_size], see
            `quire.definition.PageTable`. Entries of `indices` that no request needs keep their values.
        req_to_token: int32 [max_requests, max_context], the slots of each request's tokens in order; those of a page
            are consecutive, page * page_size + the index in the page.
        rows: int32 or int64 [batch_size], the requests' rows of req_to_token.
        lengths: int32 or int64 [batch_size], the requests' lengths in tokens, without `extra` tokens of each.
        slot_map: int32 or int64 [slots], the slot in another pool for each slot; None: the slots are as they are.

    Raises:
        ValueError: tensors that do not fit together. A row outside the matrix, a length that it has no columns for, or
            more pages than `indices` holds, on the host and, if QUIRE_CHECK is set, on a GPU. Otherwise the GPU's
            kernel takes the nearest row and length, and leaves out the pages beyond the capacity.
    """
    _check_tensors((indptr, indices, last_page_len), req_to_token, rows, lengths, slot_map)
    if env_flag("QUIRE_CHECK") or rows.is_cpu:
        _check_values(rows.cpu(), lengths.cpu(), req_to_token, page_size, extra, len(indices))
    if on_triton(rows.device):
        from quire.kernels.triton.page_table import fill_page_table as fill_on_gpu

        fill_on_gpu(indptr, indices, last_page_len, req_to_token, rows, lengths, slot_map, page_size, extra)
        return
    table = PageTable.from_req_to_token(req_to_token, rows, lengths + extra, page_size)
    pages = table.indices
    if slot_map is not None:
        pages = (slot_map[pages.long() * page_size] // page_size).int()
    indptr.copy_(table.indptr)
    indices[: len(pages)] = pages
    last_page_len.copy_(table.last_page_len)


def _check_tensors(
    table: tuple[Tensor, Tensor, Tensor], req_to_token: Tensor, rows: Tensor, lengths: Tensor, slot_map: Tensor | None
) -> None:
    """Refuse tensors whose shapes, dtypes or devices do not fit together."""
    device, batch_size = req_to_token.device, lengths.numel()
    check_tensor(req_to_token, "req_to_token", (None, None), torch.int32, device)
    sizes = {"indptr": batch_size + 1, "indices": None, "last_page_len": batch_size}
    for (name, size), x in zip(sizes.items(), table, strict=True):
        check_tensor(x, name, (size,), torch.int32, device)
    for name, ids, count in (
        ("rows", rows, batch_size),
        ("lengths", lengths, batch_size),
        ("slot_map", slot_map, None),
    ):
        if ids is not None:
            dtype = torch.int32 if ids.dtype == torch.int32 else torch.int64
            check_tensor(ids, name, (count,), dtype, device)


def _check_values(
    rows: Tensor, lengths: Tensor, req_to_token: Tensor, page_size: int, extra: int, capacity: int
) -> None:
    count, width = req_to_token.shape
    refuse_first((rows < 0) | (rows >= count), "rows", rows, f"0 to {count - 1}, the rows of req_to_token")
    bad = (lengths + extra < 0) | (lengths + extra > width)
    refuse_first(bad, "lengths", lengths, f"with {extra} more tokens it must be 0 to {width}, the columns")
    pages = int(((lengths + extra + page_size - 1) // page_size).sum())
    if pages > capacity:
        raise ValueError(f"indices has {capacity} entries: the requests have {pages} pages")
