"""Page tables from rows of req_to_token: the pool's slots as pages of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.definition.pages import PageTable, refuse_first


class WrapperDispatch(Enum):
    """The reason why a backend has two wrappers of each kind.

    SLIDING_WINDOW: the first is for layers with a window, the second for layers without. CROSS_ATTENTION: the first is
    for self-attention, the second for attention over an encoder's tokens.
    """

    SLIDING_WINDOW = auto()
    CROSS_ATTENTION = auto()


def total(lengths: Tensor, on_host: Tensor | Sequence[int] | None = None, known: int | None = None) -> int | None:
    """The sum of lengths, or None if it is not known without waiting for the device."""
    if lengths.device.type == "cpu":
        on_host = lengths
    return known if on_host is None else int(torch.as_tensor(on_host).sum())


class Requests(NamedTuple):
    """The rows, lengths and encoders of the requests of a batch; the attributes are those of `ForwardBatch`."""

    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    seq_lens_sum: int | None
    encoder_lens: Tensor | None = None
    encoder_lens_cpu: Sequence[int] | None = None

    @classmethod
    def of(cls, batch: Any) -> Requests:
        """The requests of a batch."""
        encoder = (getattr(batch, "encoder_lens", None), getattr(batch, "encoder_lens_cpu", None))
        return cls(batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum, *encoder)

    @property
    def entries(self) -> int | None:
        """The sum of the lengths, or None if it is not known without waiting for the device."""
        return total(self.seq_lens, self.seq_lens_cpu, self.seq_lens_sum)

    def drafting(self, count: int) -> Requests:
        """The requests with `count` more tokens each."""
        entries = self.entries
        entries = None if entries is None else entries + len(self.seq_lens) * count
        return self._replace(seq_lens=self.seq_lens.int() + count, seq_lens_cpu=None, seq_lens_sum=entries)

    def first(self, bs: int) -> Requests:
        """The first bs requests of the graph of a batch size; ValueError if a table has fewer."""
        tables: dict[str, Any] = {}
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "encoder_lens"):
            values = getattr(self, name)
            if values is not None and len(values) < bs:
                raise ValueError(f"{name} has {len(values)} requests: the graph has bs = {bs}")
            tables[name] = None if values is None else values[:bs]
        return self._replace(**tables)


@dataclass(frozen=True, eq=False)
class Slots:
    """Page tables of requests, read from the matrix of their slots.

    The row of a request holds the slots of its encoder's tokens, if it has any, followed by those of its own tokens.

    Attributes:
        req_to_token: int32 [max_reqs, max_context_len].
        wrappers: the number of wrappers of each kind, 1 or 2.
        reason: the reason for two wrappers.
    """

    req_to_token: Tensor
    wrappers: int
    reason: WrapperDispatch | None

    def pages(self, rows: Tensor, lengths: Tensor, entries: int | None, starts: Tensor | None = None) -> PageTable:
        """The slots of `lengths` tokens of each request from column `starts` on; entries: their sum, or more."""
        if len(rows) != len(lengths):
            raise ValueError(f"req_pool_indices has {len(rows)} requests, seq_lens {len(lengths)}")
        entries = None if lengths.device.type == "cpu" else entries
        table = PageTable.from_req_to_token(self.req_to_token, rows, lengths.int(), starts=starts, entries=entries)
        # All entries of last_page_len are 1, as two graph wrappers share it.
        return PageTable.from_slots(table.indices, table.indptr)

    def tables(self, requests: Requests) -> list[PageTable]:
        """A page table for each wrapper."""
        rows, lengths = requests.req_pool_indices, requests.seq_lens
        entries = requests.entries
        if self.reason is not WrapperDispatch.CROSS_ATTENTION:
            return [self.pages(rows, lengths, entries)] * self.wrappers
        starts = self.encoder(requests.encoder_lens)
        own = self.pages(rows, lengths, entries, starts)
        return [own, self.pages(rows, starts, total(starts, requests.encoder_lens_cpu))]

    def encoder(self, encoder_lens: Tensor | None) -> Tensor:
        """The lengths of the encoders as int32; ValueError if they are missing."""
        if encoder_lens is None:
            raise ValueError("encoder_lens is None: a backend for cross-attention needs them, 0 for requests without")
        return encoder_lens.int()

    def check(self, seq_lens_cpu: Tensor | None) -> None:
        """Refuse requests that are longer than their rows, if their lengths are known on the host."""
        if seq_lens_cpu is not None:
            width = self.req_to_token.shape[1]
            bad = (seq_lens_cpu < 0) | (seq_lens_cpu > width)
            refuse_first(bad, "seq_lens", seq_lens_cpu, f"0 to max_context_len = {width}")
