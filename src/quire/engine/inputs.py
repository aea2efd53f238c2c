"""The inputs of captured steps: tensors at fixed addresses, filled by one copy from the host per step.

A captured step reads one row per request. Row b owns entries b * width to (b + 1) * width of the page table, whatever
the number of its pages, so a step in which requests get new pages writes these alone: the time on the host does not
grow with the requests' lengths. A request keeps its row as long as it is in every step and its row is below the number
of requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor

from quire.engine.chunks import Chunk, Decodes
from quire.engine.request import Request
from quire.steps import upload


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of rows and of tokens of a captured step; steps with fewer are padded."""

    rows: int
    tokens: int

    @property
    def longest(self) -> int:
        """The most tokens that a row can have; rows of a step with as many tokens as rows have one each."""
        return 1 if self.rows == self.tokens else self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """The tensors that a captured step reads.

    Attributes:
        ids: int64 [tokens], token ids; -1 for a pending token.
        source: int64 [tokens], where a pending token is among the tokens of the last step; any row for other tokens.
        positions, slots: int64 [tokens], as in `StepTables`; padding has slot -1.
        sampled: int64 [rows], the indices of the tokens whose logits are needed (`Chunk.rows`); padding is 0.
        qo_indptr: int32 [rows + 1].
        kv_indptr, kv_indices, last_page_len: the tables of a `PageTable` on a device. Each row owns all its entries, so
            last_page_len is below 1 if the row does not use all.
    """

    ids: Tensor
    source: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


class InputBuffers:
    """The memory of the inputs of all shapes, on a device.

    Args:
        largest: the numbers of rows and tokens that no shape exceeds.
        width: the most pages of a request.
        page_size: tokens in a page.
    """

    def __init__(self, largest: Shape, width: int, page_size: int, device: torch.device) -> None:
        self.width, self.page_size, self.device = width, page_size, device
        self._packed = torch.zeros(_size(largest), dtype=torch.uint8, device=device)
        self._table = torch.zeros(largest.rows * width, dtype=torch.int32, device=device)
        self._offsets = torch.arange(0, largest.rows + 1, dtype=torch.int32, device=device) * width
        self._host_table = np.zeros((largest.rows, width), dtype=np.int32)
        self._requests: list[Request] = []  # of the last step, in the order of its chunks
        self._order = np.zeros(0, dtype=np.int64)  # the index of the chunk of each row
        self._in_rows: list[Request] = []  # the request of each row
        self._rows: dict[Request, int] = {}
        self.forget()

    def forget(self) -> None:
        """Write all pages of all rows in the next step, because the device's table is undefined."""
        self._owners: list[array[int] | None] = [None] * len(self._host_table)  # the pages that a row was written from
        self._written = np.zeros(len(self._host_table), dtype=np.int64)  # how many of them

    def views(self, shape: Shape) -> Inputs:
        """The inputs of a shape."""
        ids, source, positions, slots, sampled, qo_indptr, last_page_len = _split(self._packed, shape)
        kv_indptr, kv_indices = self._offsets[: shape.rows + 1], self._table[: shape.rows * self.width]
        return Inputs(ids, source, positions, slots, sampled, qo_indptr, kv_indptr, kv_indices, last_page_len)

    def fill(self, chunks: Sequence[Chunk], shape: Shape) -> Sequence[Chunk]:
        """Start to copy the inputs of a step to the device; return its chunks in the order of their rows. The step fits
        the shape, and the device executes what reads the inputs of the last step before the copy.
        """
        chunks = self._place(chunks)
        self._write_pages(self._in_rows)
        # Torch does not give pinned memory to others before the copies from it have ended.
        host = torch.empty(_size(shape), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        parts = _split_host(host.numpy(), shape)
        ids, source, positions, slots, sampled, qo_indptr, last_page_len = parts
        self._fill_tokens(chunks, ids, source)

        rows = len(chunks)
        if isinstance(chunks, Decodes):
            starts, counts = chunks.starts, np.ones(rows, dtype=np.int64)
        else:
            starts, counts = np.array([c.start for c in chunks]), np.array([c.count for c in chunks])
        lengths, ends = starts + counts, counts.cumsum()
        tokens = int(ends[-1])
        qo_indptr[0], qo_indptr[1 : rows + 1], qo_indptr[rows + 1 :] = 0, ends, tokens
        if shape.longest == 1:
            qo_indptr[rows + 1 :] = np.arange(rows + 1, shape.rows + 1)  # padding has a token, and no keys
        last_page_len[:rows], last_page_len[rows:] = lengths, 0
        last_page_len -= (self.width - 1) * self.page_size
        row = np.arange(rows) if shape.longest == 1 else np.repeat(np.arange(rows), counts)
        position = np.arange(tokens) + (lengths - ends)[row]
        page, offset = np.divmod(position, self.page_size)
        positions[:tokens], positions[tokens:] = position, 0
        slots[:tokens], slots[tokens:] = self._host_table[row, page].astype(np.int64) * self.page_size + offset, -1
        samples = np.arange(rows) if isinstance(chunks, Decodes) else _sampled(chunks, ends)
        sampled[: len(samples)], sampled[len(samples) :] = samples, 0
        self._packed[: len(host)].copy_(host, non_blocking=True)
        return chunks

    def fill_padding(self, shape: Shape) -> None:
        """Make the inputs of a shape those of a step without requests."""
        inputs = self.views(shape)
        for x in (inputs.ids, inputs.source, inputs.positions, inputs.sampled, inputs.qo_indptr):
            x.zero_()
        inputs.slots.fill_(-1)
        inputs.last_page_len.fill_(-(self.width - 1) * self.page_size)
        if shape.longest == 1:
            inputs.qo_indptr.copy_(torch.arange(shape.rows + 1))

    def _place(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Give each request a row below len(chunks), its old one if possible; return the chunks in that order."""
        requests = chunks.requests if isinstance(chunks, Decodes) else [c.request for c in chunks]
        count = len(requests)
        if requests != self._requests:
            old = self._rows
            self._rows = {r: old[r] for r in requests if old.get(r, count) < count}
            taken = set(self._rows.values())
            free = (row for row in range(count) if row not in taken)
            for request in requests:
                if request not in self._rows:
                    self._rows[request] = next(free)
            self._requests = requests
            self._order = np.argsort([self._rows[r] for r in requests])
            self._in_rows = [requests[i] for i in self._order.tolist()]
        if isinstance(chunks, Decodes):
            return Decodes(self._in_rows, chunks.starts[self._order])
        return [chunks[i] for i in self._order.tolist()]

    def _write_pages(self, requests: Sequence[Request]) -> None:
        """Write the pages that requests have got since their rows were written."""
        pages = [r.pages for r in requests]
        count, written = len(pages), self._written
        if self._owners[:count] != pages:  # a row of another request, or of one that was preempted in between
            written[:count][[old is not own for old, own in zip(self._owners, pages, strict=False)]] = 0
            self._owners[:count] = pages
        lengths = np.fromiter(map(len, pages), dtype=np.int64, count=count)
        places: list[range] = []
        new: list[array[int]] = []
        for row in np.flatnonzero(written[:count] != lengths).tolist():
            known, length = int(written[row]), len(pages[row])
            places.append(range(row * self.width + known, row * self.width + length))
            new.append(pages[row][known:])
        written[:count] = lengths
        if new:
            both = np.array([list(chain(*places)), list(chain(*new))], dtype=np.int64)
            self._host_table.reshape(-1)[both[0]] = both[1]
            index, page = upload(both, self.device)
            self._table.scatter_(0, index, page.int())

    @staticmethod
    def _fill_tokens(chunks: Sequence[Chunk], ids: np.ndarray, source: np.ndarray) -> None:
        """Token ids, and the places of pending tokens."""
        source[:] = 0
        if isinstance(chunks, Decodes):
            ids[: len(chunks)] = [-1 if r.pending else r.tokens[-1] for r in chunks.requests]
            ids[len(chunks) :] = 0
            source[: len(chunks)] = [r.row for r in chunks.requests]  # not read where the token is known
            return
        known: list[int] = []
        pending = []
        for chunk in chunks:
            tokens, start = chunk.request.tokens, chunk.start
            end = start + chunk.count - len(chunk.drafts)
            if end > len(tokens):
                known += tokens[start:]
                pending.append((len(known), chunk.request.row))
                known.append(-1)
            elif end - start == 1:
                known.append(tokens[start])
            else:
                known += tokens[start:end]
            known += chunk.drafts
        ids[: len(known)], ids[len(known) :] = known, 0
        if pending:
            places = np.array(pending)
            source[places[:, 0]] = places[:, 1]


def _sampled(chunks: Sequence[Chunk], ends: np.ndarray) -> np.ndarray:
    """The indices of tokens whose logits are needed; the tokens of each chunk end at one of `ends`."""
    rows = np.array([c.rows for c in chunks])
    return np.repeat(ends - rows.cumsum(), rows) + np.arange(rows.sum())


@cache
def _sizes(shape: Shape) -> list[int]:
    """The bytes of the int64 and then the int32 vectors of `Inputs`, which lie one after another in one memory."""
    return [8 * shape.tokens] * 4 + [8 * shape.rows, 4 * (shape.rows + 1), 4 * shape.rows]


def _split(packed: Tensor, shape: Shape) -> list[Tensor]:
    """These vectors at the start of uint8 memory."""
    parts = packed[: _size(shape)].split_with_sizes(_sizes(shape))
    return [x.view(torch.int64 if i < 5 else torch.int32) for i, x in enumerate(parts)]


def _split_host(packed: np.ndarray, shape: Shape) -> list[np.ndarray]:
    """`_split` of memory on the host."""
    words = packed.view(np.int32)
    ends = accumulate((size // 4 for size in _sizes(shape)), initial=0)
    return [words[a:b] if i >= 5 else words[a:b].view(np.int64) for i, (a, b) in enumerate(pairwise(ends))]


def _size(shape: Shape) -> int:
    """The bytes of these vectors."""
    return sum(_sizes(shape))
