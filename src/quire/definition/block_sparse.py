"""Block-sparse attention as batches over pages: each row of blocks is a request, and the blocks in it are its pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.definition.checks import check
from quire.definition.pages import PageTable, RaggedLayout, check_indptr, refuse_first, table


def fixed_blocks(indptr: Tensor, indices: Tensor, M: int, N: int, R: int, C: int) -> tuple[RaggedLayout, PageTable]:
    """The query layout and the page table of an [M, N] mask of [R, C] blocks in SciPy's BSR format. A page has C keys.

    Args:
        indptr: int32 or int64 [ceil(M / R) + 1], the offset of each row's blocks in `indices`. The last row of blocks
            may have fewer than R rows.
        indices: int32 or int64 [blocks], the column of each block, 0 to N / C - 1.

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
    qo_indptr = (torch.arange(rows + 1, device=indptr.device) * R).clamp(max=M)
    return RaggedLayout(qo_indptr.int()), PageTable(indptr, indices, torch.full_like(indptr[1:], C), C)


def as_pages(x: Tensor, page_size: int) -> Tensor:
    """[tokens, heads, head_dim] as [tokens / page_size, page_size, heads, head_dim]."""
    return x.unflatten(0, (len(x) // page_size, page_size))


def mask_by_rows(mask: Tensor, indptr: Tensor) -> Tensor:
    """Reorder a mask that is stored block by block into flat custom masks, one per row of blocks, each row-major.

    Args:
        mask: [blocks, R, C].
        indptr: int [rows of blocks + 1], on mask's device, the offset of each row's blocks.

    Returns:
        [blocks * R * C]. Never waits for a device.
    """
    blocks, R, C = mask.shape
    block, row = torch.arange(blocks, device=mask.device), torch.arange(R, device=mask.device)
    block_row = torch.searchsorted(indptr, block.to(indptr.dtype), right=True)[:, None] - 1
    offsets, last = indptr.long(), len(indptr) - 1
    start = offsets[block_row.clamp(min=0)]
    width = offsets[(block_row + 1).clamp(max=last)] - start
    column = block[:, None] - start
    # Blocks that belong to no row are written to an extra one.
    spare = blocks * R
    target = torch.where((column >= 0) & (column < width), start * R + column + row * width, spare).clamp(0, spare)
    rows = mask.new_empty(spare + 1, C).index_copy_(0, target.flatten(), mask.reshape(spare, C))
    return rows[:spare].flatten()


@dataclass(frozen=True, eq=False)
class VariableBlocks:
    """Masks of blocks with variable sizes, one mask per KV head, as a batch whose requests are rows of blocks.

    Attributes:
        qo: the query layout; row m of KV head h is row ``h * num_rows + m``.
        kv: the page table, with pages of size 1; key n of KV head h is page ``h * num_keys + n``.
        num_rows, num_keys: the queries and the keys of each KV head.
    """

    qo: RaggedLayout
    kv: PageTable
    num_rows: int
    num_keys: int

    @classmethod
    def from_map(cls, mask_map: Tensor, row_sizes: Tensor, col_sizes: Tensor) -> VariableBlocks:
        """From the blocks that are visible, and the sizes of all blocks. Waits once for the device, for the numbers of
        rows and keys.

        Args:
            mask_map: bool [kv_heads, rows of blocks, columns of blocks].
            row_sizes: int32 or int64 [kv_heads, rows of blocks], the queries in each.
            col_sizes: int32 or int64 [kv_heads, columns of blocks], the keys in each.

        Raises:
            ValueError: shapes that do not fit, negative sizes, or KV heads with different numbers of queries or keys.
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
        starts = (col_sizes.flatten().cumsum(0).view_as(col_sizes) - col_sizes)[:, None].expand(mask_map.shape)
        shift = (starts.flatten() - (ends - widths)).int()
        indices = torch.arange(total, dtype=torch.int32, device=ends.device)
        indices += torch.repeat_interleave(shift, widths, output_size=total)
        indptr = pad(ends.view(-1, mask_map.shape[2])[:, -1], (1, 0)).int()
        rows = RaggedLayout(pad(row_sizes.flatten().cumsum(0), (1, 0)).int())
        return cls(rows, PageTable.from_slots(indices, indptr), num_rows, num_keys)

    def flatten_queries(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """[num_qo_heads, num_rows, head_dim] as a batch's queries [num_kv_heads * num_rows, group, head_dim]."""
        return q.unflatten(0, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1)

    def unflatten_outputs(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """[num_kv_heads * num_rows, group, ...] as [num_qo_heads, num_rows, ...], contiguous."""
        return x.unflatten(0, (num_kv_heads, self.num_rows)).transpose(1, 2).flatten(0, 1).contiguous()


def _totals(row_sizes: Tensor, col_sizes: Tensor, selected: Tensor) -> tuple[int, int, int]:
    """Queries and keys of a KV head, and visible keys of all requests, on the host. Refuses sizes that are invalid."""
    both = [f for sizes in (row_sizes, col_sizes) for f in (sizes.min(), *sizes.sum(1).aminmax())]
    *facts, total = torch.stack([*both, selected]).tolist()
    for name, (smallest, low, high) in (("block_row_sz", facts[:3]), ("block_col_sz", facts[3:])):
        check(smallest >= 0, f"{name}.min()", smallest, "0 or more")
        check(low == high, f"{name}.sum(1)", [low, high], "the same for each head")
        check(len(row_sizes) * high < 1 << 31, f"{name}.sum()", len(row_sizes) * high, "less than 2**31")
    check(total < 1 << 31, "block_mask_map", f"{total} keys in all rows of blocks", "less than 2**31")
    return facts[2], facts[5], total
