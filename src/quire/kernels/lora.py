"""The products of adapters (LoRA) for a batch whose rows belong to different ones: torch on the CPU, Triton on a GPU.

An adapter adds (x A^T) B to the product of a linear layer. Its factors lie in pools of rank pages, each of which has
RANK_PAGE rows of A and of B, so that adapters of different ranks share memory and a batch. An adapter on the device has
a slot, and a row of a table with the ids of its rank pages, which are the same in the pools of every layer.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from quire.kernels.ops import on_triton, operation

# Rows of A and of B in a page of the pools. An adapter's rank is rounded up to a multiple of it, with rows of zeros.
RANK_PAGE = 16


@torch.library.custom_op("quire::group_by_slot", mutates_args=())
def group_by_slot(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Sort the rows that have an adapter by its slot, without changing the order of a slot's rows.

    Args:
        slots: int32 [rows], the slot of each row's adapter, from 0 to num_slots - 1; -1: it has none.

    Returns:
        order int32 [rows]: the row at each place of the sorted order. Rows without an adapter have no place; what the
            places beyond the others hold is undefined.
        ends int32 [num_slots]: the end of each slot's places, where those of the next one begin.
    """
    if on_triton(slots.device):
        from quire.kernels.triton.lora import group_by_slot as group_on_gpu

        order, ends = _groups(slots, num_slots)
        group_on_gpu(slots.contiguous(), order, ends)
        return order, ends
    groups = slots.where((slots >= 0) & (slots < num_slots), num_slots)
    ends = groups.bincount(minlength=num_slots + 1)[:num_slots].cumsum(0)
    return groups.argsort(stable=True).int(), ends.int()


@group_by_slot.register_fake
def _groups(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    # A traced len(slots) would become a constant.
    return torch.empty_like(slots, dtype=torch.int32, memory_format=torch.contiguous_format), slots.new_empty(
        num_slots, dtype=torch.int32
    )


@operation("add_lora", "y")
def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    part_ends: list[int],
    order: Tensor,
    ends: Tensor,
    rank_pages: Tensor,
    num_rank_pages: Tensor,
) -> None:
    """Add the products of the rows' adapters to the product of one linear layer, or of several that are merged.

    Each row of y becomes y + (x A^T) B, with A and B of the row's adapter. It is added up in float32, without rounding
    in between, and rounded to the dtype of y once. The order of a row's sums depends on the number of rows, and not on
    what the other rows are. Rows without an adapter are neither read nor written.

    Args:
        y: float16, bfloat16 or float32 [..., out_features], in which rows follow each other at equal distances and the
            last dimension is contiguous.
        x: [..., in_features] of the dtype and the leading dimensions of y.
        a: [num_pages, parts, RANK_PAGE, in_features], the pool of A, each of whose pages is contiguous.
        b: [num_pages, RANK_PAGE, out_features], the pool of B, likewise.
        part_ends: for each of the merged layers, which are the parts, the end of its columns of y. The columns of a
            part take rows of A of that part alone.
        order, ends: as `group_by_slot` returns them.
        rank_pages: int32 [num_slots, max_rank_pages], contiguous, the pages of each slot's adapter. Others are not
            read, nor are other entries.
        num_rank_pages: int32 [num_slots], how many pages each slot's adapter has; 0: it adds nothing.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together.
    """
    _check_pools(y, a, b, part_ends[-1], (x.shape[-1], len(part_ends)))
    _check_tables(rank_pages, num_rank_pages, ends)
    if x.dtype != y.dtype or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: it must have the dtype and the rows of y, {list(y.shape)}")
    if order.numel() * y.shape[-1] != y.numel():
        raise ValueError(f"order has {order.numel()} places: it must have one for each row of y, {list(y.shape)}")
    rows, given = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    if not on_triton(y.device):
        _add_blocks(rows, given, a, b, part_ends, order, ends, rank_pages, num_rank_pages)
    elif len(rows) > 0:
        from quire.kernels.triton.lora import add_lora as add_on_gpu

        given = given if given.stride(-1) == 1 else given.contiguous()
        add_on_gpu(rows, given, a, b, tuple(part_ends), order, ends, rank_pages, num_rank_pages)


def _check_pools(y: Tensor, a: Tensor, b: Tensor, width: int, sizes: tuple[int, int]) -> None:
    """Refuse pools that do not fit y, of whose columns there must be `width`, and each other.

    Args:
        sizes: columns and parts of a.
    """
    columns, parts = sizes
    if y.shape[-1] != width or y.stride(-1) != 1:
        raise ValueError(f"y has shape {list(y.shape)} and strides {y.stride()}: it must have {width} adjacent columns")
    for name, pool, page in (("a", a, (parts, RANK_PAGE, columns)), ("b", b, (RANK_PAGE, width))):
        if pool.dtype != y.dtype or tuple(pool.shape[1:]) != page:
            what = f"{y.dtype} [num_pages, {', '.join(map(str, page))}]"
            raise ValueError(f"{name} is {pool.dtype} {list(pool.shape)}: it must be {what}")
        # A single part may have any stride.
        if pool.stride()[-2:] != (page[-1], 1) or (
            len(page) == 3 and parts > 1 and pool.stride(1) != page[1] * page[2]
        ):
            raise ValueError(f"{name} has strides {pool.stride()}: its pages must be contiguous")


def _check_tables(rank_pages: Tensor, num_rank_pages: Tensor, *others: Tensor) -> None:
    """Refuse tables of different numbers of slots, or which kernels can't read."""
    sizes = {len(rank_pages), *(len(table) for table in (num_rank_pages, *others))}
    if rank_pages.ndim != 2 or len(sizes) > 1 or not rank_pages.is_contiguous():
        what = f"contiguous [num_slots, max_rank_pages], for {len(num_rank_pages)} slots in num_rank_pages"
        what += "".join(f" and {len(table)} in ends" for table in others)
        raise ValueError(f"rank_pages has shape {list(rank_pages.shape)}: it must be {what}")


def _add_blocks(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    part_ends: list[int],
    order: Tensor,
    ends: Tensor,
    rank_pages: Tensor,
    num_rank_pages: Tensor,
) -> None:
    """`add_lora` of rows [rows, features] by torch. All blocks of rows that are multiplied at once have one size, which
    depends on the number of rows, as the order of a product's sums may depend on how many rows it has.
    """
    block = min(len(x), 16) if len(x) <= 256 else 128
    columns = [slice(start, end) for start, end in pairwise([0, *part_ends])]
    counts = num_rank_pages.tolist()
    for slot, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if start == end or counts[slot] == 0:
            continue
        pages = rank_pages[slot, : counts[slot]]
        # [parts, rank, in_features] and [rank, out_features].
        factor_a, factor_b = a[pages].float().transpose(0, 1).flatten(1, 2), b[pages].float().flatten(0, 1)
        rows_of_slot, missing = order[start:end], (start - end) % block
        if missing:
            # The last row fills the last block.
            rows_of_slot = torch.cat([rows_of_slot, order[end - 1].expand(missing)])
        for first, rows in zip(range(start, end, block), rows_of_slot.split(block), strict=True):
            h = x[rows].float() @ factor_a.mT
            added = [part @ factor_b[:, own] for part, own in zip(h, columns, strict=True)]
            rows, own_added = rows[: end - first], (added[0] if len(added) == 1 else torch.cat(added, 1))[: end - first]
            if y.dtype == torch.float32:
                y.index_add_(0, rows, own_added)
            else:
                y[rows] = (y[rows].float() + own_added).to(y.dtype)


@operation("add_lora_embedding", "y")
def add_lora_embedding(
    y: Tensor,
    ids: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    rank_pages: Tensor,
    num_rank_pages: Tensor,
) -> None:
    """Add what the tokens' adapters add to their embeddings: `add_lora` of a row of zeros with a one at the token's id.

    Args:
        y: float16, bfloat16 or float32 [..., dim], as `add_lora` takes it.
        ids: int32 or int64 [...], the tokens, with the leading dimensions of y.
        a: [num_pages, RANK_PAGE, vocab_size] of the dtype of y, the pool of A, each of whose pages is contiguous.
        b: [num_pages, RANK_PAGE, dim], the pool of B, likewise.
        slots: int32 [tokens], the slot of each token's adapter; -1: it has none, and its row is not written.
        rank_pages, num_rank_pages: as `add_lora` takes them.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together.
    """
    _check_pools(y, a.unsqueeze(1), b, b.shape[-1], (a.shape[-1], 1))
    _check_tables(rank_pages, num_rank_pages)
    if ids.numel() != slots.numel() or ids.shape != y.shape[:-1]:
        raise ValueError(f"ids has shape {list(ids.shape)}, for {slots.numel()} slots and y of {list(y.shape)}")
    rows, tokens = y.view(-1, y.shape[-1]), ids.flatten()
    if not on_triton(y.device):
        _add_tokens(rows, tokens, a, b, slots, rank_pages, num_rank_pages)
    elif len(rows) > 0:
        from quire.kernels.triton.lora_embedding import add_lora_embedding as add_on_gpu

        add_on_gpu(rows, tokens, a, b, slots.contiguous(), rank_pages, num_rank_pages)


def _add_tokens(
    y: Tensor, tokens: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank_pages: Tensor, num_rank_pages: Tensor
) -> None:
    """`add_lora_embedding` of rows [tokens, dim] by torch."""
    for slot in slots.unique().tolist():
        pages = rank_pages[slot, : int(num_rank_pages[slot])].long() if slot >= 0 else ()
        if len(pages) == 0:
            continue
        mine = (slots == slot).nonzero().flatten()
        factor_a, added = a[pages].flatten(0, 1), torch.zeros(len(mine), y.shape[-1], device=y.device)
        for own_a, own_b in zip(factor_a, b[pages].flatten(0, 1), strict=True):
            added += own_a[tokens[mine].long()].float()[:, None] * own_b.float()
        y[mine] = (y[mine].float() + added).to(y.dtype)
