"""Block tables as engines keep them: a row of pages per request, whose unused entries nobody may read."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.bench.batches import Batch


def block_table_of(batch: Batch, spare: int = 0) -> tuple[Tensor, Tensor]:
    """The block table of a batch, int32 [batch_size, max_pages + spare], and its requests' lengths, int32. The rows lie
    in a larger matrix, and unused entries lead outside the pool.
    """
    lengths, counts = batch.kv.lengths(), batch.kv.indptr.diff()
    width = int(counts.max()) + spare
    rows = torch.full((len(lengths), width + 5), 1 << 30, dtype=torch.int32)
    for row, pages in zip(rows, batch.kv.indices.tensor_split(batch.kv.indptr[1:-1].long()), strict=True):
        row[: len(pages)] = pages
    return rows[:, :width], lengths
