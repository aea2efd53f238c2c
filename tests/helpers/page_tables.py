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
