"""What adapters add to the embeddings of tokens on a GPU: a row of A's columns times B."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, wait_for_launch_before


@dataclass(frozen=True)
class EmbeddingConfig:
    """The constants that `add_embeddings` is compiled for."""

    # The number of columns of one row that a program adds to.
    block_n: int
    num_warps: int
    launch_pdl: bool


@triton.jit(do_not_specialize=["max_pages"])
def add_embeddings(
    y, ids, a, b, slots, rank_pages, num_rank_pages, max_pages, vocab, dim, y_row, a_page, b_page, c: tl.constexpr
):
    wait_for_launch_before(c.launch_pdl)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    n, r = tl.program_id(1) * c.block_n + tl.arange(0, c.block_n), tl.arange(0, 16)
    token, count = tl.load(ids + row).to(tl.int64), tl.load(num_rank_pages + slot)
    total = tl.full((c.block_n,), 0.0, tl.float32)
    for i in range(count):
        page = tl.load(rank_pages + slot * max_pages + i).to(tl.int64)
        h = tl.load(a + page * a_page + r.to(tl.int64) * vocab + token).to(tl.float32)
        own_b = tl.load(b + page * b_page + r[:, None] * dim + n[None, :], (n < dim)[None, :], 0.0).to(tl.float32)
        total += tl.sum(h[:, None] * own_b, 0)
    at = y + row.to(tl.int64) * y_row + n
    inside = (n < dim) & (count > 0)
    tl.store(at, (tl.load(at, inside, 0.0).to(tl.float32) + total).to(y.dtype.element_ty), inside)


_add_embeddings = SmallLauncher(add_embeddings)


@lru_cache(maxsize=64)
def embedding_config(dim: int, device: torch.device) -> EmbeddingConfig:
    """The constants for embeddings of `dim` elements."""
    return EmbeddingConfig(min(max(triton.next_power_of_2(dim), 128), 512), 4, has_dependent_launch(device))


def add_lora_embedding(
    y: Tensor, ids: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank_pages: Tensor, num_rank_pages: Tensor
) -> None:
    """`quire.kernels.lora.add_lora_embedding` of rows [tokens, dim] on a GPU."""
    c, dim = embedding_config(y.shape[1], y.device), y.shape[1]
    grid = len(y), triton.cdiv(dim, c.block_n)
    sizes = (a.shape[-1], dim, y.stride(0), a.stride(0), b.stride(0))
    _add_embeddings(grid, (y, ids, a, b, slots, rank_pages, num_rank_pages), (rank_pages.shape[1],), sizes, c)
