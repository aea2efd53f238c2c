"""Block-sparse matrices as batches: a row of blocks is a request, the blocks that it has are its keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.definition.pages import PageTable, RaggedLayout, check_indptr, refuse_first, table
from quire.definition.spec import check


def fixed_blocks(indptr: Tensor, indices: Tensor, M: int, N: int, R: int, C: int) -> tuple[RaggedLayout, PageTable]:
    """Rows and pages of an [M, N] matrix of blocks [R, C], in SciPy's BSR form; blocks are pages of C keys.

    Args:
        indptr: int32 or int64 [ceil(M / R) + 1], where each row's blocks begin in `indices`; the last row may be lower
            than R.
        indices: int32 or int64 [blocks], the blocks' columns, 0 to N / C - 1.

    Raises:
        ValueError: sizes that do not fit; on the host also columns that are out of range.
    """
    for name, value in (("M", M), ("N", N)):
        check(isinstance(value, int) and 0 <= value < 1 << 31, name, value, "an integer, 0 to 2**31 - 1")
    for name, value in (("R", R), ("C", C)):
        check(isinstance(value, int) and value > 0, name, value, "a positive integer")
    check(N % C == 0, "N", N, f"a multiple of C = {C}")
    rows = -(-M // R)
    indptr, indices = table(indptr, "indptr", rows + 1), table(indices, "indices")
    check_indptr(indptr, "indptr", len(indices), "the number of indices")
    if indices.device.type == "cpu":
        refuse_first((indices < 0) | (indices >= N // C), "indices", indices, f"0 to N / C - 1 = {N // C - 1}")
    begins = (torch.arange(rows + 1, device=indptr.device) * R).clamp(max=M)
    return RaggedLayout(begins.int()), PageTable(indptr, indices, torch.full_like(indptr[1:], C), C)


def mask_by_rows(mask: Tensor, indptr: Tensor) -> Tensor:
    """A mask given block by block, as attention wants it: one row of blocks after another, each of them row by row.

    Args:
        mask: [blocks, R, C].
        indptr: int [rows of blocks + 1], on mask's device, where each one's blocks begin.

    Returns:
        [blocks * R * C]. Never waits for a device.
    """
    blocks, R, C = mask.shape
    block, line = torch.arange(blocks, device=mask.device), torch.arange(R, device=mask.device)
    row = torch.searchsorted(indptr, block.to(indptr.dtype), right=True)[:, None] - 1
    begins, last = indptr.long(), len(indptr) - 1
    first = begins[row.clamp(min=0)]
    width = begins[(row + 1).clamp(max=last)] - first
    within = block[:, None] - first
    spare = blocks * R  # a line past the end takes blocks of no row
    target = torch.where((within >= 0) & (within < width), first * R + within + line * width, spare).clamp(0, spare)
    lines = mask.new_empty(spare + 1, C).index_copy_(0, target.flatten(), mask.reshape(spare, C))
    return lines[:spare].flatten()


@dataclass(frozen=True, eq=False)
class VariableBlocks:
    """Matrices of blocks that have sizes of their own, one for each head, as a batch: a request is a row of blocks.

    Attributes:
        qo: row m of head h is row ``h * num_rows + m`` of the queries.
        kv: key n of head h is page ``h * num_keys + n``; pages have size 1.
        num_rows, num_keys: of each head.
    """

    qo: RaggedLayout
    kv: PageTable
    num_rows: int
    num_keys: int

    @classmethod
    def from_map(cls, mask_map: Tensor, row_sizes: Tensor, col_sizes: Tensor) -> VariableBlocks:
        """From the blocks that are there, and their sizes. Reads once from a device: how many keys there are in all.

        Args:
            mask_map: bool [heads, rows of blocks, columns of blocks].
            row_sizes, col_sizes: int32 or int64 [heads, rows of blocks] and [heads, columns of blocks].

        Raises:
            ValueError: shapes that do not fit, sizes below 0, or heads that do not have the same size.
        """
        check(mask_map.ndim == 3 and mask_map.numel() > 0, "block_mask_map.shape", list(mask_map.shape), "three sizes")
        for name, sizes, dim in (("block_row_sz", row_sizes, 1), ("block_col_sz", col_sizes, 2)):
            shape = [len(mask_map), mask_map.shape[dim]]
            check(list(sizes.shape) == shape, f"{name}.shape", list(sizes.shape), f"{shape}, as block_mask_map")
            check(sizes.dtype in (torch.int32, torch.int64), f"{name}.dtype", sizes.dtype, "int32 or int64")
        row_sizes, col_sizes = row_sizes.to(mask_map.device).long(), col_sizes.to(mask_map.device).long()
        widths = (mask_map.bool() * col_sizes[:, None]).flatten()
        ends = widths.cumsum(0)
        num_rows, num_keys, total = _totals(row_sizes, col_sizes, ends[-1])
        begins = (col_sizes.flatten().cumsum(0).view_as(col_sizes) - col_sizes)[:, None].expand(mask_map.shape)
        shift = (begins.flatten() - (ends - widths)).int()
        indices = torch.arange(total, dtype=torch.int32, device=ends.device)
        indices += torch.repeat_interleave(shift, widths, output_size=total)
        indptr = pad(ends.view(-1, mask_map.shape[2])[:, -1], (1, 0)).int()
        rows = RaggedLayout(pad(row_sizes.flatten().cumsum(0), (1, 0)).int())
        return cls(rows, PageTable.from_slots(indices, indptr), num_rows, num_keys)


def _totals(row_sizes: Tensor, col_sizes: Tensor, selected: Tensor) -> tuple[int, int, int]:
    """Rows and keys of a head, and selected keys of all requests, on the host; refuses sizes that cannot be."""
    both = [f for sizes in (row_sizes, col_sizes) for f in (sizes.min(), *sizes.sum(1).aminmax())]
    *facts, total = torch.stack([*both, selected]).tolist()
    for name, (least, low, high) in (("block_row_sz", facts[:3]), ("block_col_sz", facts[3:])):
        check(least >= 0, f"{name}.min()", least, "0 or more")
        check(low == high, f"{name}.sum(1)", [low, high], "the same for each head")
        check(len(row_sizes) * high < 1 << 31, f"{name}.sum()", len(row_sizes) * high, "less than 2**31")
    check(total < 1 << 31, "block_mask_map", f"{total} keys in all rows of blocks", "less than 2**31")
    return facts[2], facts[5], total
