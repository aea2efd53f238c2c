"""Which tokens belong to which request: ragged layouts and page tables, their constructors and their checks.

The values of tables on the host are checked wherever a table is made, since that needs no synchronization. Tables on a
device are checked by shape and dtype only, because reading their values would wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.definition.checks import is_int


def as_int32(x: Tensor) -> Tensor:
    """An int64 tensor as int32, any other tensor unchanged. Values beyond int32 saturate, because every check
    refuses the limits of int32, while a wrapped value might pass. Never waits for a device.
    """
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        return x
    limits = torch.iinfo(torch.int32)
    return x.clamp(limits.min, limits.max).int()


def table(x: Tensor, name: str, length: int | None = None) -> Tensor:
    """An int32 or int64 vector as int32. ValueError for anything else, for another length than `length`, and for an
    empty vector whose name contains indptr.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: it must be an int32 or int64 tensor")
    if x.dtype is not torch.int32:
        x = as_int32(x)
    if x.dtype is not torch.int32 or x.ndim != 1:
        raise ValueError(f"{name} is {x.dtype} of shape {list(x.shape)}: it must be an int32 or int64 vector")
    # numel() takes less time than len(x) or x.shape[0].
    count = x.numel()
    if length is not None and count != length:
        raise ValueError(f"{name} has {count} entries: {length} are needed")
    if count == 0 and "indptr" in name:
        raise ValueError(f"{name} is empty: it must have batch size + 1 entries, at least 1")
    return x


def refuse_first(bad: Tensor | np.ndarray, name: str, values: Tensor | np.ndarray, bound: str) -> None:
    """Raise a ValueError that names the first entry of a host table for which `bad` is set, if there is one."""
    if bool(bad.any()):
        i = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name}[{i}] = {int(values[i])} is out of range: {bound}")


def _check_page_size(page_size: int) -> None:
    if not is_int(page_size) or page_size < 1:
        raise ValueError(f"page_size = {page_size!r}: it must be a positive integer")


def _refuse_devices(**tables: Tensor) -> None:
    """Refuse tables that are on different devices."""
    first, *others = (x.device for x in tables.values())
    if any(device != first for device in others):
        devices, (*names, last) = sorted({str(x.device) for x in tables.values()}), tables
        raise ValueError(f"{', '.join(names)} and {last} lie on different devices: {devices}")


def _page_count(lengths: Tensor, page_size: int) -> Tensor:
    """The number of pages of requests of these lengths, int32."""
    _check_page_size(page_size)
    return (lengths + (page_size - 1)) // page_size


def _last_page_len(lengths: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Tokens in the last page of requests of these lengths, int32: 0 without pages, less than 1 with more pages than
    the length fills.
    """
    return torch.sub(lengths, (pages - 1).clamp_(min=0), alpha=page_size)


def page_lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """The requests' lengths in tokens, int32 [batch_size], from an indptr in pages; 0 without pages."""
    pages = indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).int()


def appended_tokens(indptr: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The request and the position of each appended token, int32 [count] each; appended tokens are a request's last.

    Args:
        indptr: int32 [batch_size + 1], where each request starts among the appended tokens.
        lengths: int32 [batch_size], the requests' lengths with the appended tokens.
        count: the number of entries to return; those outside indptr have request -1 and position 0.
    """
    token = torch.arange(count, dtype=torch.int32, device=indptr.device)
    request = torch.searchsorted(indptr, token, right=True, out_int32=True) - 1
    inside = (token >= indptr[0]) & (token < indptr[-1])
    position = token
    if len(lengths):
        owner = request.clamp(0, len(lengths) - 1).long()
        position = token - indptr[owner + 1] + lengths.to(token.device)[owner]
    return torch.where(inside, request, -1), torch.where(inside, position, 0)


def _largest(x: np.ndarray) -> int:
    """The largest element as an unsigned number, so that negative ones are 2**31 or more; 0 if x is empty."""
    x = x.view(np.uint32 if x.itemsize == 4 else np.uint64)
    # max() takes several times as long as argmax().
    return x.item(x.argmax()) if x.size else 0


def check_indptr(indptr: Tensor, name: str, total: int | None = None, total_name: str = "") -> int:
    """Refuse a host indptr that starts below 0, decreases anywhere, or ends beyond `total`. Returns the length of the
    longest request, and 0 for an indptr on a device.
    """
    if not indptr.is_cpu:
        return 0
    # NumPy's operations take a fifth of the time of torch's.
    offsets = indptr.numpy()
    first, longest = offsets.item(0), _largest(offsets[1:] - offsets[:-1])
    count = offsets.size - 1
    # If both conditions are false, no offset is less than the one before, and no difference has overflowed.
    if first < 0 or first + longest * count >= 1 << 31:
        _check_offsets(offsets, name)
    if total is not None and offsets.item(-1) > total:
        raise ValueError(f"{name}[-1] = {offsets[-1]} is beyond {total_name} = {total}")
    return longest


def _check_offsets(offsets: np.ndarray, name: str) -> None:
    """Refuse offsets that start below 0 or decrease anywhere."""
    if offsets[0] < 0:
        raise ValueError(f"{name}[0] = {offsets[0]}: an indptr starts at 0")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        i = int(falls.argmax())
        raise ValueError(f"{name} falls at request {i}, from {offsets[i]} to {offsets[i + 1]}")


def check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor | None, page_size: int) -> None:
    """Refuse the values of a page table as far as they lie on the host; a request without pages may have any."""
    if not indptr.is_cpu:
        return
    check_indptr(indptr, "kv_indptr", indices.shape[0], "the number of kv_indices")
    offsets = indptr.numpy()
    if last_page_len is not None and last_page_len.is_cpu:
        last = last_page_len.numpy()
        if _largest(last - 1) >= min(page_size, 1 << 31):
            used = offsets[1:] > offsets[:-1]
            bad = used & ((last < 1) | (last > page_size))
            refuse_first(bad, "kv_last_page_len", last, f"1 to page_size = {page_size}")
    if indices.is_cpu:
        pages = indices.numpy()[offsets[0] : offsets[-1]]
        if _largest(pages) >= 1 << 31:
            refuse_first(pages < 0, "kv_indices", pages, "page ids start at 0")


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """Requests of different lengths stored one after another: request b owns rows indptr[b] to indptr[b + 1].

    Attributes:
        indptr: int32 [batch_size + 1]; int64 is converted.
        longest: the most rows of a request, where that was checked on the host; 0 where it is not known.
    """

    indptr: Tensor
    longest: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        indptr = table(self.indptr, "indptr")
        self.__dict__.update(indptr=indptr, longest=check_indptr(indptr, "indptr"))

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> RaggedLayout:
        """From int32 or int64 [batch_size] lengths."""
        lengths = table(lengths, "lengths")
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(lengths, 0, out=indptr[1:])
        return cls(indptr)

    def with_tables(self, indptr: Any, *, non_blocking: bool = True) -> RaggedLayout | None:
        """A layout of this indptr on this one's device, without the constructor's checks. None if the indptr is not a
        contiguous int32 vector, or if this layout is on the host. A host indptr is checked, and copied.
        """
        here = self.indptr.device
        if self.indptr.is_cpu or type(indptr) is not Tensor or indptr.dtype is not torch.int32:
            return None
        if indptr.stride() != (1,) or not indptr.numel():
            return None
        # This makes an object without the checks of its constructor.
        other = object.__new__(RaggedLayout)
        if indptr.device != here:
            other.__dict__["longest"] = check_indptr(indptr, "indptr")
            indptr = indptr.to(here, non_blocking=non_blocking)
        other.__dict__["indptr"] = indptr
        return other

    @property
    def tables(self) -> tuple[Tensor]:
        """The tensors that a plan keeps."""
        return (self.indptr,)

    @property
    def batch_size(self) -> int:
        # len() of a tensor takes microseconds.
        return self.indptr.shape[0] - 1

    def lengths(self) -> Tensor:
        """int32 [batch_size]"""
        return self.indptr.diff()


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of each request, in order: request b owns ``indices[indptr[b]:indptr[b + 1]]``.

    Int64 tensors are converted (see `as_int32`).

    Attributes:
        indptr: int32 [batch_size + 1]; a slice of a longer indptr is fine, so it need not start at 0.
        indices: int32 [at least indptr[-1]], page ids.
        last_page_len: int32 [batch_size], tokens in the last page, 1 to page_size; any value without pages. On a device
            it may be less than 1: a request has (pages - 1) * page_size + last_page_len tokens.
        page_size: tokens in a page.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int
    _per_request: ClassVar[str] = "last_page_len"

    @property
    def per_request(self) -> Tensor:
        """int32 [batch_size]: last_page_len or, in a `LengthTable`, kv_lens."""
        lengths: Tensor = self.__dict__[self._per_request]
        return lengths

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that a plan keeps: indptr, indices, and last_page_len or, in a `LengthTable`, kv_lens."""
        return self.indptr, self.indices, self.per_request

    def __post_init__(self) -> None:
        _check_page_size(self.page_size)
        indptr, indices = table(self.indptr, "kv_indptr"), table(self.indices, "kv_indices")
        last = table(self.last_page_len, "kv_last_page_len", indptr.shape[0] - 1)
        self.__dict__.update(indptr=indptr, indices=indices, last_page_len=last)
        _refuse_devices(kv_indptr=self.indptr, kv_indices=self.indices, kv_last_page_len=self.last_page_len)
        check_pages(self.indptr, self.indices, self.last_page_len, self.page_size)

    @cached_property
    def largest_page(self) -> int:
        """The largest page id in use, -1 if there is none; for host tables."""
        pages = self.indices[self.indptr[0] : self.indptr[-1]]
        return int(pages.max()) if len(pages) else -1

    def check_pool(self, num_pages: int) -> None:
        """Refuse a host table that names pages beyond a pool of `num_pages`."""
        if self.indices.device.type == "cpu" and self.largest_page >= num_pages:
            bad = int((self.indices[: self.indptr[-1]] >= num_pages).nonzero()[0])
            request = int((self.indptr[1:] <= bad).sum())
            page = int(self.indices[bad])
            raise ValueError(f"kv_indices[{bad}] = {page} of request {request} is out of range: 0 to {num_pages - 1}")

    def with_tables(
        self, indptr: Any, indices: Any, per_request: Any, *, non_blocking: bool = True
    ) -> PageTable | None:
        """A table of these tensors on this one's device, without the constructor's checks. None if they are not
        contiguous int32 vectors that fit, or if this table is on the host. Host tensors are checked, and copied.
        """
        if self.indptr.is_cpu:
            return None
        device, int32 = self.indptr.device, torch.int32
        moves = False
        for x in (indptr, indices, per_request):
            if type(x) is not Tensor or x.dtype is not int32 or x.stride() != (1,):
                return None
            moves = moves or x.device != device
        if per_request.numel() != indptr.numel() - 1:
            return None
        # This makes an object without the checks of its constructor.
        other = object.__new__(type(self))
        fields, name = other.__dict__, self._per_request
        fields["indptr"], fields["indices"] = indptr, indices
        fields[name] = per_request
        fields["page_size"] = self.page_size
        if moves:
            # `from_lengths` checks the lengths of requests if all tables lie on the host.
            lengths = type(self) is not PageTable
            if lengths and indptr.is_cpu and indices.is_cpu and per_request.is_cpu:
                return None
            check_pages(indptr, indices, None if lengths else per_request, self.page_size)
            for key in ("indptr", "indices", name):
                fields[key] = fields[key].to(device, non_blocking=non_blocking)
        return other

    def to(self, device: torch.device | str) -> PageTable:
        """The table on another device. Its values are checked if that device is the host."""
        return PageTable(self.indptr.to(device), self.indices.to(device), self.last_page_len.to(device), self.page_size)

    @property
    def batch_size(self) -> int:
        return self.indptr.shape[0] - 1

    def lengths(self) -> Tensor:
        """int32 [batch_size]: tokens of each request."""
        return page_lengths(self.indptr, self.last_page_len, self.page_size)

    @classmethod
    def from_block_tables(cls, block_tables: Tensor, lengths: Tensor, page_size: int) -> PageTable:
        """From padded block tables [batch_size, max_pages] and [batch_size] lengths in tokens, int32 or int64.

        Never waits for a device: `indices` has batch_size * max_pages entries, of which indptr[-1] are used.
        """
        lengths, block_tables = table(lengths, "lengths", len(block_tables)), as_int32(block_tables)
        if block_tables.ndim != 2 or block_tables.dtype != torch.int32:
            shape = list(block_tables.shape)
            raise ValueError(
                f"block_tables is {block_tables.dtype} of shape {shape}: it must be an int32 or int64 matrix"
            )
        width = block_tables.shape[1]
        if lengths.device.type == "cpu":
            long = (lengths < 0) | (lengths > width * page_size)
            refuse_first(long, "lengths", lengths, f"0 to max_pages * page_size = {width * page_size}")
        pages = _page_count(lengths, page_size)
        indptr = RaggedLayout.from_lengths(pages).indptr
        columns = torch.arange(width, dtype=torch.int32, device=lengths.device)
        used = columns < pages[:, None]
        # Unused pages are scattered to an entry past the end.
        spare = block_tables.numel()
        target = torch.where(used, indptr[:-1, None] + columns, spare).flatten().long()
        indices = block_tables.new_zeros(spare + 1).scatter_(0, target, block_tables.flatten())
        return cls(indptr, indices[:spare], _last_page_len(lengths, pages, page_size), page_size)

    @classmethod
    def from_pages(cls, indices: Tensor, lengths: Tensor, page_size: int) -> PageTable:
        """From the requests' pages, concatenated, and [batch_size] lengths in tokens, int32 or int64. A request has as
        many pages as its length fills.

        Never waits for a device; `indices` may be longer than the pages of all requests.
        """
        lengths = table(lengths, "lengths")
        pages = _page_count(lengths, page_size)
        packed = RaggedLayout.from_lengths(pages).indptr
        return cls(packed, indices, _last_page_len(lengths, pages, page_size), page_size)

    @classmethod
    def from_lengths(
        cls, indptr: Tensor, indices: Tensor, lengths: Tensor, page_size: int, name: str = "lengths"
    ) -> PageTable:
        """From [batch_size] lengths in tokens, int32 or int64. A request may own more pages than its length fills: the
        host's table leaves these out, and a device's table has them as empty pages.

        indptr and indices are as in a PageTable, and not changed. Never waits for a device.
        """
        _check_page_size(page_size)
        lengths, indices = table(lengths, name), table(indices, "kv_indices")
        indptr = table(indptr, "kv_indptr", len(lengths) + 1)
        # On a device, removing empty pages would take a dozen launches.
        if not lengths.is_cpu:
            return LengthTable.of(indptr, indices, lengths, page_size, name)
        check_indptr(indptr, "kv_indptr", len(indices), "the number of kv_indices")
        owned = indptr[1:] - indptr[:-1]
        long = (lengths < 0) | (lengths > owned * page_size)
        refuse_first(long, name, lengths, "0 to what the request's pages hold")
        pages = _page_count(lengths, page_size)
        packed = RaggedLayout.from_lengths(pages).indptr
        used = torch.arange(int(packed[-1])) + (indptr - packed)[:-1].repeat_interleave(pages)
        return cls(packed, indices[used], _last_page_len(lengths, pages, page_size), page_size)

    @classmethod
    def from_slots(cls, slots: Tensor, indptr: Tensor) -> PageTable:
        """From a cache slot per token: slots [tokens] and indptr [batch_size + 1]. Pages have size 1."""
        return cls(indptr, slots, torch.ones_like(indptr[1:]), page_size=1)

    @classmethod
    def from_ragged(cls, layout: RaggedLayout, tokens: int) -> PageTable:
        """From `tokens` rows stored one after another, each of which is a page of size 1."""
        indices = torch.arange(tokens, dtype=torch.int32, device=layout.indptr.device)
        return cls.from_slots(indices, layout.indptr)

    @classmethod
    def from_req_to_token(
        cls,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        lengths: Tensor,
        page_size: int = 1,
        starts: Tensor | None = None,
        entries: int | None = None,
    ) -> PageTable:
        """From a matrix of cache slots, int [max_requests, max_context]: row req_pool_indices[b] holds the slots of
        request b in order. With page_size > 1, the slots of a page are consecutive.

        Args:
            starts: [batch_size], the requests' first columns, multiples of page_size; None: 0.
            entries: an upper bound of the number of pages of all requests. None: on the host, their number; on a
                device, where lengths are not read, the number of pages of batch_size requests of max_context tokens.
        """
        lengths = table(lengths, "lengths")
        count, width = len(lengths), req_to_token.shape[1]
        if lengths.device.type == "cpu":
            first = lengths * 0 if starts is None else starts
            refuse_first((lengths < 0) | (first + lengths > width), "lengths", lengths, f"0 to max_context = {width}")
            wrong = (req_pool_indices < 0) | (req_pool_indices >= len(req_to_token))
            refuse_first(wrong, "req_pool_indices", req_pool_indices, f"0 to {len(req_to_token) - 1}")
        pages = _page_count(lengths, page_size)
        indptr = RaggedLayout.from_lengths(pages).indptr
        if entries is None:
            entries = count * -(-width // page_size) if lengths.device.type != "cpu" else int(indptr[-1])
        last_page_len = _last_page_len(lengths, pages, page_size)
        if count == 0:
            return cls(indptr, lengths, last_page_len, page_size)
        entry = torch.arange(entries, dtype=torch.int32, device=lengths.device)
        owner = torch.searchsorted(indptr[1:], entry, right=True).clamp(max=count - 1)
        column = (entry - indptr[owner]) * page_size
        if starts is not None:
            column += starts[owner].int()
        slots = req_to_token[req_pool_indices[owner].long(), column.clamp(0, width - 1)]
        return cls(indptr, as_int32(slots // page_size), last_page_len, page_size)


class LengthTable(PageTable):
    """A page table on a device that stores the requests' lengths in tokens, int32 [batch_size] `kv_lens`, which GPU
    kernels read in place of last_page_len. Here last_page_len is computed at each access, by a few launches.
    """

    kv_lens: Tensor
    _per_request = "kv_lens"

    @classmethod
    def of(cls, indptr: Tensor, indices: Tensor, kv_lens: Tensor, page_size: int, name: str) -> LengthTable:
        """From int32 vectors; error messages call the lengths `name`. ValueError if devices differ."""
        _refuse_devices(kv_indptr=indptr, kv_indices=indices, **{name: kv_lens})
        made = object.__new__(cls)
        made.__dict__.update(indptr=indptr, indices=indices, kv_lens=kv_lens, page_size=page_size)
        return made

    @property
    def last_page_len(self) -> Tensor:
        return _last_page_len(self.kv_lens, self.indptr.diff(), self.page_size)
