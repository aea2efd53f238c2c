"""The inputs of captured steps: tensors at fixed addresses, filled by one copy from the host per step.

A captured step reads one row per request. Row b owns entries b * width to (b + 1) * width of the page table, whatever
the number of its pages, so only new pages are written: the time on the host does not grow with the requests' lengths.
The step itself writes the page of each row's last token, which is the only new one where a request decodes. A request
keeps its row as long as it is in every step and its row is below the number of requests.

Most steps decode the requests of the step before. Their tokens are on the device, in the same order, and what has
changed on the host since the last step are the positions and a few pages.
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
        kv_indptr, kv_indices, last_page_len: the tables of a `PageTable` on a device. Each row owns all its entries, so
            last_page_len is below 1 if the row does not use all.
        ids: int64 [tokens], token ids; -1 for a pending token.
        source: int64 [tokens], where a pending token is among the tokens of the last step; any row for other tokens.
        positions, slots: int64 [tokens], as in `StepTables`; padding has slot -1.
        sampled: int64 [rows], the indices of the tokens whose logits are needed (`Chunk.rows`); padding is 0.
        last_at, last_page: int64 and int32 [rows], the entry of kv_indices for the page of each row's last token, and
            this page; of padding, an entry as it is.
        qo_indptr: int32 [rows + 1].
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    ids: Tensor
    source: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    last_at: Tensor
    qo_indptr: Tensor
    last_page_len: Tensor
    last_page: Tensor

    def write_pages(self) -> None:
        """Write the pages of the rows' last tokens to kv_indices, before the step reads them."""
        self.kv_indices.scatter_(0, self.last_at, self.last_page)


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
        self._host_table = np.zeros((largest.rows, width), dtype=np.int64)
        self._requests: list[Request] = []  # of the last step, in the order of its chunks
        self._order = np.zeros(0, dtype=np.int64)  # the index of the chunk of each row
        self._in_rows: list[Request] = []  # the request of each row
        self._rows: dict[Request, int] = {}
        self._index = np.arange(largest.rows)
        self._host = np.zeros(0, dtype=np.uint8)  # the vectors of the last step
        self._parts: list[np.ndarray] = []  # these vectors one by one
        self._shape: Shape | None = None  # of the last step
        self._last: Decodes | None = None  # the last step, if it was decodes
        self.forget()

    def forget(self) -> None:
        """Write all pages of all rows in the next step, because the device's table is undefined."""
        self._owners: list[array[int] | None] = [None] * len(self._host_table)  # the pages that a row was written from
        self._written = np.zeros(len(self._host_table), dtype=np.int64)  # how many of them
        self._last = None

    def views(self, shape: Shape) -> Inputs:
        """The inputs of a shape."""
        table = self._offsets[: shape.rows + 1], self._table[: shape.rows * self.width]
        return Inputs(*table, *_split(self._packed, shape))

    def fill(self, chunks: Sequence[Chunk], shape: Shape) -> Sequence[Chunk]:
        """Start to copy the inputs of a step to the device; return its chunks in the order of their rows. The step fits
        the shape, and the device executes what reads the inputs of the last step before the copy.
        """
        again = self._is_repeated(chunks, shape)
        self._last = None
        chunks = self._place(chunks)
        if not again:
            self._lay_out(chunks, shape)
        ids, source, positions, slots, _, last_at, _, last_page_len, last_page = self._parts
        row = self._index[: len(chunks)]
        if isinstance(chunks, Decodes):
            lengths, row_of, position = chunks.starts + 1, row, chunks.starts
        else:
            starts, counts = np.array([c.start for c in chunks]), np.array([c.count for c in chunks])
            lengths, row_of = starts + counts, np.repeat(row, counts)
            position = np.arange(len(row_of)) + (lengths - counts.cumsum())[row_of]
        if again:  # the device has the tokens that the last step sampled, whether or not the host has read them
            ids[: len(row)], source[: len(row)] = -1, row
        page, offset = np.divmod(position, self.page_size)
        last = page if row_of is row else (lengths - 1) // self.page_size
        self._write_pages(last)
        positions[: len(page)] = position
        own = self._host_table[row, last]
        slots[: len(page)] = (own if page is last else self._host_table[row_of, page]) * self.page_size + offset
        last_at[: len(row)], last_page[: len(row)] = row * self.width + last, own
        last_page_len[: len(row)] = lengths - (self.width - 1) * self.page_size
        # Torch does not give pinned memory to others before the copies from it have ended.
        host = torch.empty(len(self._host), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = self._host
        self._packed[: len(host)].copy_(host, non_blocking=True)
        self._last = chunks if isinstance(chunks, Decodes) else None
        return chunks

    def fill_padding(self, shape: Shape) -> None:
        """Make the inputs of a shape those of a step without requests."""
        inputs = self.views(shape)
        for x in (inputs.ids, inputs.source, inputs.positions, inputs.sampled, inputs.qo_indptr, inputs.last_page):
            x.zero_()
        inputs.last_at.copy_(self._offsets[: shape.rows])
        inputs.slots.fill_(-1)
        inputs.last_page_len.fill_(-(self.width - 1) * self.page_size)
        if shape.longest == 1:
            inputs.qo_indptr.copy_(torch.arange(shape.rows + 1))

    def _is_repeated(self, chunks: Sequence[Chunk], shape: Shape) -> bool:
        """Whether a step decodes the tokens that the last one sampled, all of them. The scheduler makes a new list of
        requests when one of them has been preempted, though it may have the same requests.
        """
        last = self._last
        if last is None or not last.sampled or not isinstance(chunks, Decodes):
            return False
        return chunks.requests is self._requests and shape == self._shape

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
            self._order = np.argsort([self._rows[r] for r in requests])
            self._in_rows = [requests[i] for i in self._order.tolist()]
        self._requests = requests
        if isinstance(chunks, Decodes):
            return Decodes(self._in_rows, chunks.starts[self._order])
        return [chunks[i] for i in self._order.tolist()]

    def _lay_out(self, chunks: Sequence[Chunk], shape: Shape) -> None:
        """Begin the vectors of a step with what does not change while steps repeat it, and with padding."""
        self._shape, self._host = shape, np.zeros(_size(shape), dtype=np.uint8)
        self._parts = _split_host(self._host, shape)
        ids, source, _, slots, sampled, last_at, qo_indptr, last_page_len, last_page = self._parts
        rows = len(chunks)
        self._fill_tokens(chunks, ids, source)
        ends = np.arange(1, rows + 1) if isinstance(chunks, Decodes) else np.cumsum([c.count for c in chunks])
        qo_indptr[1 : rows + 1], qo_indptr[rows + 1 :] = ends, ends[-1]
        if shape.longest == 1:
            qo_indptr[rows + 1 :] = np.arange(rows + 1, shape.rows + 1)  # padding has a token, and no keys
        samples = ends - 1 if isinstance(chunks, Decodes) else _sampled(chunks, ends)
        sampled[: len(samples)] = samples
        slots[:] = -1
        last_page_len[:] = -(self.width - 1) * self.page_size
        last_at[:], last_page[:] = self._index[: shape.rows] * self.width, self._host_table[: shape.rows, 0]
        # A row of another request, or of one that was preempted in between, has none of its pages.
        pages = [r.pages for r in self._in_rows]
        same = [old is own for old, own in zip(self._owners, pages, strict=False)]
        self._written[:rows][np.logical_not(same)] = 0
        self._owners[:rows] = pages

    def _write_pages(self, last: np.ndarray) -> None:
        """Write the pages that requests have got since their rows were written, up to those of their last tokens, the
        `last` ones, which the device writes itself.
        """
        written, width = self._written, self.width
        new = np.flatnonzero(written[: len(last)] <= last)
        if not len(new):
            return
        places: list[range] = []
        pages: list[array[int]] = []
        for row, known, end in zip(new.tolist(), written[new].tolist(), last[new].tolist(), strict=True):
            own = self._in_rows[row].pages
            self._host_table[row, end] = own[end]
            if known < end:
                places.append(range(row * width + known, row * width + end))
                pages.append(own[known:end])
        written[new] = last[new] + 1
        if places:
            both = np.array([list(chain(*places)), list(chain(*pages))], dtype=np.int64)
            self._host_table.reshape(-1)[both[0]] = both[1]
            index, page = upload(both, self.device)
            self._table.scatter_(0, index, page.int())

    @staticmethod
    def _fill_tokens(chunks: Sequence[Chunk], ids: np.ndarray, source: np.ndarray) -> None:
        """Token ids, and the places of pending tokens, in vectors of zeros."""
        if isinstance(chunks, Decodes):
            ids[: len(chunks)] = [-1 if r.pending else r.tokens[-1] for r in chunks.requests]
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
        ids[: len(known)] = known
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
    return [8 * shape.tokens] * 4 + [8 * shape.rows] * 2 + [4 * (shape.rows + 1), 4 * shape.rows, 4 * shape.rows]


def _split(packed: Tensor, shape: Shape) -> list[Tensor]:
    """These vectors at the start of uint8 memory."""
    parts = packed[: _size(shape)].split_with_sizes(_sizes(shape))
    return [x.view(torch.int64 if i < 6 else torch.int32) for i, x in enumerate(parts)]


def _split_host(packed: np.ndarray, shape: Shape) -> list[np.ndarray]:
    """`_split` of memory on the host."""
    words = packed.view(np.int32)
    ends = accumulate((size // 4 for size in _sizes(shape)), initial=0)
    return [words[a:b] if i >= 6 else words[a:b].view(np.int64) for i, (a, b) in enumerate(pairwise(ends))]


def _size(shape: Shape) -> int:
    """The bytes of these vectors."""
    return sum(_sizes(shape))
