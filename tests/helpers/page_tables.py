"""Page tables written out as lists of pages."""

from __future__ import annotations

from itertools import pairwise

import torch

from quire.definition import PageTable, RaggedLayout


def table(rows: list[list[int]], page_size: int = 16, last: int | None = None) -> PageTable:
    """Requests with these pages, the last of which hold `last` tokens, by default all that they can."""
    indptr = RaggedLayout.from_lengths(torch.tensor([len(row) for row in rows], dtype=torch.int32)).indptr
    indices = torch.tensor([page for row in rows for page in row], dtype=torch.int32)
    lasts = torch.full((len(rows),), last or page_size, dtype=torch.int32)
    return PageTable(indptr, indices, lasts, page_size)


def rows(kv: PageTable) -> list[list[int]]:
    return [kv.indices[a:b].tolist() for a, b in pairwise(kv.indptr.tolist())]


def empty_table(entries: int, device: str = "cpu") -> PageTable:
    """The page table of two requests with `entries` page ids together, all 0, and one token in their last pages."""
    counts = torch.tensor([0, entries // 2, entries], dtype=torch.int32, device=device)
    return PageTable(counts, torch.zeros(entries, dtype=torch.int32, device=device), counts[1:] * 0 + 1, 16)
