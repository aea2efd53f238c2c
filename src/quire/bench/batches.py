"""Random batches for checks, tests and timing. Cache slots that hold no token are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.definition import oracle
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Batch:
    """Queries, paged keys and values, and tables; k and v are NHD views [pages, page_size, num_kv_heads, head_dim]."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    qo: RaggedLayout
    kv: PageTable
    bool_mask: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0

    @property
    def mask(self) -> PackedMask | None:
        if self.bool_mask is None:
            return None
        return PackedMask.from_bool(self.bool_mask, self.qo.lengths(), self.kv.lengths())

    def exact(self) -> tuple[Tensor, Tensor]:
        """The oracle's output and lse, in float64."""
        return oracle.attend_batch(
            self.q,
            self.k,
            self.v,
            self.qo,
            self.kv,
            self.spec,
            mask=self.mask,
            sinks=self.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ragged k and v, [tokens, num_kv_heads, head_dim] in the order of the requests, and their kv_indptr."""
        lengths = self.kv.lengths()
        k, v = (_rows(x, self.kv) for x in (self.k, self.v))
        return k, v, RaggedLayout.from_lengths(lengths).indptr


def slots(table: PageTable) -> Tensor:
    """The cache slot (page * page_size + offset) of every token, in the order of the requests, int64."""
    lengths = table.lengths()
    request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    start = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=start[1:])
    position = torch.arange(len(request), device=lengths.device) - start[request]
    page = table.indices.long()[table.indptr.long()[request] + position // table.page_size]
    return page * table.page_size + position % table.page_size


def _rows(cache: Tensor, table: PageTable) -> Tensor:
    filled = slots(table)
    return cache[filled // table.page_size, filled % table.page_size]


def random_table(
    kv_lens: Sequence[int], page_size: int, spare: int = 3, device: torch.device | str = "cpu"
) -> tuple[PageTable, int]:
    """A page table of randomly chosen pages of a pool that has `spare` unused pages, and the pool's number of pages."""
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    pages = (lengths + page_size - 1) // page_size
    total = int(pages.sum())
    indices = torch.randperm(total + spare)[:total].int()
    last = torch.where(lengths > 0, (lengths - 1) % page_size + 1, 0).int()
    indptr = RaggedLayout.from_lengths(pages).indptr
    return PageTable(indptr.to(device), indices.to(device), last.to(device), page_size), total + spare


def random_batch(
    spec: AttentionSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
    *,
    kv_layout: str = "NHD",
    padding: int = 0,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    device: torch.device | str = "cpu",
) -> Batch:
    """A batch of normally distributed q, k and v, with a mask and sinks if the spec has them.

    Args:
        padding: rows of q after those of the last request.
        kv_layout: memory layout of a page, NHD or HND; the batch's views are NHD in either case.
    """
    table, pool = random_table(kv_lens, page_size, device=device)
    qo = RaggedLayout.from_lengths(torch.tensor(q_lens, dtype=torch.int32, device=device))
    q = torch.randn(sum(q_lens) + padding, spec.num_qo_heads, spec.head_dim_qk, device=device).to(spec.q_dtype)
    k, v = (
        _filled_cache(table, pool, spec.num_kv_heads, dim, spec.kv_dtype, kv_layout)
        for dim in (spec.head_dim_qk, spec.head_dim_vo)
    )
    area = sum(a * b for a, b in zip(q_lens, kv_lens, strict=True))
    mask = torch.rand(area, device=device) < 0.7 if spec.mask.custom_mask else None
    sinks = torch.randn(spec.num_qo_heads, device=device) if spec.sinks else None
    return Batch(spec, q, k, v, qo, table, bool_mask=mask, sinks=sinks, k_scale=k_scale, v_scale=v_scale)


def _filled_cache(table: PageTable, pool: int, heads: int, dim: int, dtype: torch.dtype, kv_layout: str) -> Tensor:
    filled = slots(table)
    cache = torch.full((pool * table.page_size, heads, dim), torch.nan, device=filled.device)
    cache[filled] = torch.randn(len(filled), heads, dim, device=filled.device)
    pages = cache.to(dtype).view(pool, table.page_size, heads, dim)
    return pages if kv_layout == "NHD" else pages.transpose(1, 2).contiguous().transpose(1, 2)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """The norm of `result - exact` over the norm of `exact`; NaN if `result` contains a NaN."""
    difference = (result.double() - exact).norm()
    return float(difference / exact.norm().clamp(min=1e-30))
