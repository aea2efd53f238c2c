"""Which keys and query rows belong to the requests of a step: tables on the device, read from SGLang's pools."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.definition.block_tables import row_starts
from quire.definition.pages import RaggedLayout
from quire.kernels.page_table import fill_page_table


class PageBuffers(NamedTuple):
    """A page table: int32 [requests + 1], [pages] and [requests], see `quire.definition.PageTable`."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @classmethod
    def allocate(cls, requests: int, pages: int, device: torch.device) -> PageBuffers:
        """A table of unused pages, for so many requests and pages."""
        sizes = requests + 1, pages, requests
        return cls(*(torch.zeros(n, dtype=torch.int32, device=device) for n in sizes))

    def first(self, requests: int) -> PageBuffers:
        """The table of the first requests, in the same memory."""
        return PageBuffers(self.indptr[: requests + 1], self.indices, self.last_page_len[:requests])


class QueryRows(NamedTuple):
    """The query rows of a step.

    Attributes:
        qo_indptr: int32 [requests + 1].
        max_q_len: the most query rows of a request; None if that is not known.
        extra: tokens of each request that SGLang's lengths leave out, which are its drafted ones.
        mask: uint8, the packed masks of drafted tokens; None if they are causal.
        alone: whether no request has keys before its new tokens.
    """

    qo_indptr: Tensor
    max_q_len: int | None
    extra: int = 0
    mask: Tensor | None = None
    alone: bool = False


def equal_rows(requests: int, q_len: int, device: torch.device) -> Tensor:
    """int32 [requests + 1], the offsets of requests with q_len query rows each, at an address that never changes."""
    return row_starts(device, requests, q_len)


def extend_rows(batch: Any) -> QueryRows:
    """The query rows of a step of mode extend or mixed, from the lengths on the device and, if known, on the host."""
    counts, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    longest = max(counts) if counts else None
    alone = prefixes is not None and not any(prefixes)
    return QueryRows(RaggedLayout.from_lengths(batch.extend_seq_lens).indptr, longest, alone=alone)


def max_pages(batch: Any, req_to_token: Tensor, page_size: int, extra: int) -> int:
    """The most pages that the requests of a step can have: from their lengths on the host, if SGLang has them there."""
    count, width = batch.batch_size, req_to_token.shape[1]
    max_pages = count * -(-width // page_size)
    if batch.seq_lens_cpu is None:
        return max_pages
    tokens = int(batch.seq_lens_cpu[:count].sum()) + count * extra
    return min(max_pages, tokens // page_size + count)


def fill(
    buffers: PageBuffers, batch: Any, req_to_token: Tensor, slot_map: Tensor | None, page_size: int, extra: int
) -> None:
    """Write the page table of a step's requests, without waiting for the device."""
    count = batch.batch_size
    rows, lengths = batch.req_pool_indices[:count], batch.seq_lens[:count]
    fill_page_table(*buffers, req_to_token, rows, lengths, slot_map, page_size, extra)
