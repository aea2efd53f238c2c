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
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import StepBatch
from quire.engine.inputs import IN_FLIGHT, adapter_slots, logit_indices, token_ids, token_positions
from quire.engine.request import Request
from quire.steps import upload


@dataclass(frozen=True, slots=True)
class StepShape:
    """The number of rows and of tokens of a captured step; steps with fewer are padded.

    Attributes:
        has_adapters: whether the step is computed with adapters.
    """

    rows: int
    tokens: int
    has_adapters: bool = False

    @property
    def max_row_tokens(self) -> int:
        """The most tokens that a row can have; rows of a step with as many tokens as rows have one each."""
        return 1 if self.rows == self.tokens else self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class CapturedInputs:
    """The tensors that a captured step reads.

    Attributes:
        kv_indptr, kv_indices, last_page_len: the tables of a `PageTable` on a device. Each row owns all its entries, so
            last_page_len is below 1 if the row does not use all.
        ids, source: int64 [tokens], see `quire.engine.inputs.token_ids`.
        positions, slots: int64 [tokens], as in `StepTables`; padding has slot -1.
        logit_indices: int64 [rows], the indices of the tokens whose logits are needed; padding is 0.
        last_at, last_page: int64 and int32 [rows], the entry of kv_indices for the page of each row's last token, and
            this page; for padding, an entry and the page that it has already.
        qo_indptr: int32 [rows + 1].
        adapter_slots: int32 [tokens], see `quire.engine.inputs.adapter_slots`; padding is -1. None: the step has no
            adapters.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    ids: Tensor
    source: Tensor
    positions: Tensor
    slots: Tensor
    logit_indices: Tensor
    last_at: Tensor
    qo_indptr: Tensor
    last_page_len: Tensor
    last_page: Tensor
    adapter_slots: Tensor | None = None

    def write_pages(self) -> None:
        """Write the pages of the rows' last tokens to kv_indices, before the step reads them."""
        self.kv_indices.scatter_(0, self.last_at, self.last_page)


@dataclass(frozen=True, eq=False, slots=True)
class HostInputs:
    """The inputs of one step on the host.

    Attributes:
        shape: of the step.
        packed: the vectors of `CapturedInputs` but for the tables of pages, uint8.
        pages: int64 [2, changes], the entries of the table of pages that have changed, and their pages; None: none has.
    """

    shape: StepShape
    packed: np.ndarray
    pages: np.ndarray | None


class GraphInputs:
    """The memory of the inputs of all shapes, on a device.

    Args:
        largest: the numbers of rows and tokens that no shape exceeds.
        width: the most pages of a request.
        page_size: tokens in a page.
    """

    def __init__(self, largest: StepShape, width: int, page_size: int, device: torch.device) -> None:
        self.width, self.page_size = width, page_size
        self.device = device
        self._packed = torch.zeros(_size(largest), dtype=torch.uint8, device=device)
        self._table = torch.zeros(largest.rows * width, dtype=torch.int32, device=device)
        self._offsets = torch.arange(0, largest.rows + 1, dtype=torch.int32, device=device) * width
        self._host_table = np.zeros((largest.rows, width), dtype=np.int64)
        self._index = np.arange(largest.rows)
        # The requests of the last step, in the order of its chunks and in that of its rows; the chunk of each row, None
        # if the chunks have the order of their rows; and the row of each request.
        self._requests: list[Request] = []
        self._in_rows: list[Request] = []
        self._order: np.ndarray | None = None
        self._rows: dict[Request, int] = {}
        # The vectors of the last step, in one memory and one by one, and its shape.
        self._host = np.zeros(0, dtype=np.uint8)
        self._parts: list[np.ndarray] = []
        self._shape: StepShape | None = None
        # The last step, if all its chunks were decodes.
        self._last: StepBatch | None = None
        self.invalidate()

    def invalidate(self) -> None:
        """Write all pages of all rows in the next step, because the device's table is undefined."""
        # The pages that each row was written from, and how many of them.
        self._owners: list[array[int] | None] = [None] * len(self._host_table)
        self._written = np.zeros(len(self._host_table), dtype=np.int64)
        self._last = None

    def views(self, shape: StepShape) -> CapturedInputs:
        """The inputs of a shape."""
        table = self._offsets[: shape.rows + 1], self._table[: shape.rows * self.width]
        return CapturedInputs(*table, *_split(self._packed, shape))

    def prepare(self, batch: StepBatch, shape: StepShape) -> tuple[StepBatch, HostInputs]:
        """The inputs of a step, and its chunks in the order of their rows. The step fits the shape. The inputs are
        copied before those of the next step are prepared.
        """
        is_repeated = self._is_repeated(batch, shape)
        self._last = None
        batch = self._place(batch)
        if not is_repeated:
            self._lay_out(batch, shape)
        ids, source, positions, slots, _, last_at, _, last_page_len, last_page, *_ = self._parts
        row, lengths = self._index[: len(batch)], batch.ends
        row_of, position = token_positions(batch)
        if is_repeated:
            # The device has the tokens that the last step sampled, whether or not the host has read them.
            ids[: len(row)] = IN_FLIGHT
            source[: len(row)] = row
        page, offset = np.divmod(position, self.page_size)
        last = page if batch.decode_only else (lengths - 1) // self.page_size
        pages = self._changed_pages(last)
        positions[: len(page)] = position
        page_of_last = self._host_table[row, last]
        page_of_token = page_of_last if batch.decode_only else self._host_table[row_of, page]
        slots[: len(page)] = page_of_token * self.page_size + offset
        last_at[: len(row)] = row * self.width + last
        last_page[: len(row)] = page_of_last
        last_page_len[: len(row)] = lengths - (self.width - 1) * self.page_size
        self._last = batch if batch.decode_only else None
        return batch, HostInputs(shape, self._host, pages)

    def copy(self, inputs: HostInputs) -> None:
        """Start to copy the inputs of a step to the device, behind the kernels that read those of the last step."""
        if inputs.pages is not None:
            index, page = upload(inputs.pages, self.device)
            self._table.scatter_(0, index, page.int())
        # Torch does not give pinned memory to others before the copies from it have ended.
        host = torch.empty(len(inputs.packed), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = inputs.packed
        self._packed[: len(host)].copy_(host, non_blocking=True)

    def fill_padding(self, shape: StepShape) -> None:
        """Make the inputs of a shape those of a step without requests."""
        inputs = self.views(shape)
        for x in (
            inputs.ids,
            inputs.source,
            inputs.positions,
            inputs.logit_indices,
            inputs.qo_indptr,
            inputs.last_page,
        ):
            x.zero_()
        inputs.last_at.copy_(self._offsets[: shape.rows])
        inputs.slots.fill_(-1)
        if inputs.adapter_slots is not None:
            inputs.adapter_slots.fill_(-1)
        inputs.last_page_len.fill_(-(self.width - 1) * self.page_size)
        if shape.max_row_tokens == 1:
            inputs.qo_indptr.copy_(torch.arange(shape.rows + 1))

    def _is_repeated(self, batch: StepBatch, shape: StepShape) -> bool:
        """Whether a step decodes the tokens that the last one sampled, all of them. The scheduler makes a new list of
        requests when one of them has been preempted, though it may have the same requests.
        """
        last = self._last
        if last is None or not last.sampled or not batch.decode_only:
            return False
        return batch.requests is self._requests and shape == self._shape

    def _place(self, batch: StepBatch) -> StepBatch:
        """Give each request a row below len(batch), its old one if possible; return the chunks in that order."""
        requests, count = batch.requests, len(batch)
        if requests is not self._requests and requests != self._requests:
            old = self._rows
            self._rows = {r: old[r] for r in requests if old.get(r, count) < count}
            taken = set(self._rows.values())
            free = (row for row in range(count) if row not in taken)
            for request in requests:
                if request not in self._rows:
                    self._rows[request] = next(free)
            order = np.argsort([self._rows[r] for r in requests])
            self._order = None if (order[:-1] < order[1:]).all() else order
            self._in_rows = [requests[i] for i in order.tolist()]
        self._requests = requests
        return batch if self._order is None else batch.in_order(self._order, self._in_rows)

    def _lay_out(self, batch: StepBatch, shape: StepShape) -> None:
        """Fill the vectors of a step with padding, and with all that does not change while steps repeat it."""
        self._shape, self._host = shape, np.zeros(_size(shape), dtype=np.uint8)
        self._parts = _split_host(self._host, shape)
        ids, source, _, slots, logits, last_at, qo_indptr, last_page_len, last_page, *of_adapters = self._parts
        rows = len(batch)
        known, rows_of_known = token_ids(batch)
        ids[: len(known)] = known
        source[: len(known)] = rows_of_known
        ends = batch.counts.cumsum()
        qo_indptr[1 : rows + 1] = ends
        # In a step of decodes, padding has a token, and no keys.
        is_decode = shape.max_row_tokens == 1
        qo_indptr[rows + 1 :] = np.arange(rows + 1, shape.rows + 1) if is_decode else ends[-1]
        needed = logit_indices(batch)
        logits[: len(needed)] = needed
        slots[:] = -1
        for of_tokens in of_adapters:
            of_tokens[:] = -1
            of_tokens[: len(known)] = adapter_slots(batch)
        last_page_len[:] = -(self.width - 1) * self.page_size
        last_at[:] = self._index[: shape.rows] * self.width
        last_page[:] = self._host_table[: shape.rows, 0]
        # The pages of a row are written anew if another request had it, or its request was preempted in between.
        pages = [r.pages for r in self._in_rows]
        is_same = [old is new for old, new in zip(self._owners, pages, strict=False)]
        self._written[:rows][np.logical_not(is_same)] = 0
        self._owners[:rows] = pages

    def _changed_pages(self, last: np.ndarray) -> np.ndarray | None:
        """`HostInputs.pages`: the pages that requests have got since their rows were written. The pages of their last
        tokens, at the indices `last`, are left out, since the device writes them itself.
        """
        written, width = self._written, self.width
        new = np.flatnonzero(written[: len(last)] <= last)
        if not len(new):
            return None
        places: list[range] = []
        pages: list[array[int]] = []
        for row, known, end in zip(new.tolist(), written[new].tolist(), last[new].tolist(), strict=True):
            all_pages = self._in_rows[row].pages
            self._host_table[row, end] = all_pages[end]
            if known < end:
                places.append(range(row * width + known, row * width + end))
                pages.append(all_pages[known:end])
        written[new] = last[new] + 1
        if not places:
            return None
        both = np.array([list(chain(*places)), list(chain(*pages))], dtype=np.int64)
        self._host_table.reshape(-1)[both[0]] = both[1]
        return both


@cache
def _sizes(shape: StepShape) -> list[int]:
    """The bytes of the int64 and then the int32 vectors of `CapturedInputs`, which lie one after another in memory."""
    adapters = [4 * shape.tokens] if shape.has_adapters else []
    return (
        [8 * shape.tokens] * 4
        + [8 * shape.rows] * 2
        + [4 * (shape.rows + 1), 4 * shape.rows, 4 * shape.rows]
        + adapters
    )


def _split(packed: Tensor, shape: StepShape) -> list[Tensor]:
    """These vectors at the start of uint8 memory."""
    parts = packed[: _size(shape)].split_with_sizes(_sizes(shape))
    return [x.view(torch.int64 if i < 6 else torch.int32) for i, x in enumerate(parts)]


def _split_host(packed: np.ndarray, shape: StepShape) -> list[np.ndarray]:
    """`_split` of memory on the host."""
    words = packed.view(np.int32)
    ends = accumulate((size // 4 for size in _sizes(shape)), initial=0)
    return [words[a:b] if i >= 6 else words[a:b].view(np.int64) for i, (a, b) in enumerate(pairwise(ends))]


def _size(shape: StepShape) -> int:
    """The bytes of these vectors."""
    return sum(_sizes(shape))
