"""A paged cache that owns its page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor

from quire.cache.allocator import OutOfPages, PageAllocator
from quire.cache.block_copies import copy_blocks
from quire.definition.checks import as_dtype
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.tensors import check_layout, check_tensor, split_cache
from quire.page import append_paged_kv_cache, get_batch_indices_positions


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    # The number of committed tokens.
    length: int = 0
    # The number of tokens that are reserved, and not committed yet.
    pending: int = 0


def _check_count(num_tokens: int, sequence: int) -> None:
    if not isinstance(num_tokens, Integral):
        raise ValueError(f"sequence {sequence}: num_tokens = {num_tokens!r} is not an integer")


class PagedKVCache:
    """The keys and values of all layers in pages, and the sequences that own the pages.

    A sequence grows by `begin_forward(n)`, which reserves room for n tokens, `append` once per layer, and
    `end_forward`, which commits them. Every method either completes, or raises an error that names the sequence and
    changes nothing.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        page_size: tokens in a page.
        max_num_pages: pages in the cache.
        device, data_type: of the keys and values.
        kv_layout: NHD or HND, the order of dimensions in a page.

    Attributes:
        data: [num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim], or for HND [num_layers, max_num_pages,
            2, num_kv_heads, page_size, head_dim]; initially zeros.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        max_num_pages: int,
        device: torch.device | str = "cpu",
        data_type: torch.dtype | str = torch.float16,
        kv_layout: str = "NHD",
    ) -> None:
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: it must be a positive integer")
        self.num_layers, self.num_kv_heads, self.head_dim, self.page_size = sizes.values()
        self.kv_layout = check_layout(kv_layout)
        self.allocator = PageAllocator(max_num_pages)
        token = (page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, page_size)
        shape = (num_layers, max_num_pages, 2, *token, head_dim)
        self.data = torch.zeros(shape, dtype=as_dtype(data_type, "data_type"), device=device)
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def sequences(self) -> list[int]:
        """The ids of the sequences that have not been freed, oldest first."""
        return list(self._sequences)

    @property
    def num_free_pages(self) -> int:
        return self.allocator.num_free

    def layer(self, layer: int) -> Tensor:
        """The cache of one layer, [max_num_pages, 2, ...]."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer = {layer} is out of range: 0 to {self.num_layers - 1}")
        return self.data[layer]

    def length(self, sequence: int) -> int:
        """The number of committed tokens of a sequence."""
        return self._find(sequence).length

    def begin_forward(self, num_tokens: int, sequence: int | None = None) -> int:
        """Reserve room for `num_tokens` more tokens of a sequence (by default, a new one).

        Returns:
            the id of the sequence.

        Raises:
            OutOfPages: the cache has too few free pages.
            ValueError: the sequence is unknown or has reserved tokens already, or num_tokens is negative.
        """
        name = self._next if sequence is None else sequence
        state = _Sequence() if sequence is None else self._find(sequence)
        _check_count(num_tokens, name)
        if num_tokens < 0:
            raise ValueError(f"sequence {name}: num_tokens = {num_tokens} is negative")
        if state.pending:
            raise ValueError(f"sequence {name} has been begun with {state.pending} tokens and not ended")
        self._reserve(state, name, num_tokens)
        state.pending = num_tokens
        if sequence is None:
            self._sequences[name] = state
            self._next += 1
        return name

    def end_forward(self, sequence: int, num_tokens: int) -> None:
        """Commit the first `num_tokens` of the reserved tokens, and release the room of the others.

        Raises:
            ValueError: the sequence is unknown, or has fewer reserved tokens.
        """
        state = self._find(sequence)
        _check_count(num_tokens, sequence)
        if not 0 <= num_tokens <= state.pending:
            raise ValueError(f"sequence {sequence}: {num_tokens} tokens end, but {state.pending} were begun")
        state.length += num_tokens
        state.pending = 0
        count = -(-state.length // self.page_size)
        self.allocator.release(state.pages[count:])
        del state.pages[count:]

    def append(self, layer: int, key: Tensor, value: Tensor, sequences: Sequence[int] | None = None) -> None:
        """Write the keys and values of one layer for the reserved tokens. They are detached from autograd.

        Args:
            key, value: [tokens, num_kv_heads, head_dim], the reserved tokens of each sequence one after another.
            sequences: distinct ids; by default all sequences with reserved tokens.

        Raises:
            ValueError: key or value contradict the cache or the reserved tokens, or an id is unknown or repeated.
        """
        begun = [s for s, state in self._sequences.items() if state.pending]
        ids = begun if sequences is None else list(sequences)
        twice = next((s for i, s in enumerate(ids) if s in ids[:i]), None)
        if twice is not None:
            raise ValueError(f"sequences = {ids} names sequence {twice} twice: its tokens are appended once")
        pending = torch.tensor([self._find(s).pending for s in ids], dtype=torch.int32)
        rows = (None, self.num_kv_heads, self.head_dim)
        check_tensor(key, "key", rows, self.data.dtype, self.device)
        check_tensor(value, "value", rows, self.data.dtype, self.device)
        if len(key) != int(pending.sum()):
            raise ValueError(f"key has {len(key)} tokens: sequences {ids} have begun {int(pending.sum())}")
        table = self.page_table(ids)
        indptr = RaggedLayout.from_lengths(pending.to(self.device)).indptr
        places = get_batch_indices_positions(indptr, table.lengths(), len(key))
        tables = (table.indices, table.indptr, table.last_page_len)
        append_paged_kv_cache(key, value, *places, self.layer(layer), *tables, self.kv_layout)

    def fork(self, sequence: int) -> int:
        """Make a sequence with equal tokens that shares all pages. A shared page is copied before a write to it."""
        state = self._find(sequence)
        if state.pending:
            raise ValueError(f"sequence {sequence} has been begun and not ended: it can't be forked")
        self.allocator.retain(state.pages)
        name, self._next = self._next, self._next + 1
        self._sequences[name] = _Sequence(list(state.pages), state.length)
        return name

    def free(self, sequence: int) -> None:
        """Remove a sequence and release its pages."""
        self.allocator.release(self._find(sequence).pages)
        del self._sequences[sequence]

    def page_table(self, sequences: Sequence[int] | None = None) -> PageTable:
        """The page table of some sequences (by default all), with their reserved tokens, on the cache's device."""
        states = [self._find(s) for s in (self.sequences if sequences is None else sequences)]
        lengths = [s.length + s.pending for s in states]
        counts = torch.tensor([len(s.pages) for s in states], dtype=torch.int32)
        indices = torch.tensor([page for s in states for page in s.pages], dtype=torch.int32)
        last = torch.tensor([(n - 1) % self.page_size + 1 if n else 0 for n in lengths], dtype=torch.int32)
        indptr, indices, last = (x.to(self.device) for x in (RaggedLayout.from_lengths(counts).indptr, indices, last))
        return PageTable(indptr, indices, last, self.page_size)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and v of one layer as views [pages, page_size, heads, head_dim], for both layouts."""
        return split_cache(self.layer(layer), self.kv_layout)

    def _find(self, sequence: int) -> _Sequence:
        state = self._sequences.get(sequence)
        if state is None:
            raise ValueError(f"sequence {sequence} is unknown or has been freed; living are {self.sequences}")
        return state

    def _reserve(self, state: _Sequence, name: int, num_tokens: int) -> None:
        """Allocate pages for num_tokens more, and copy the last page if it is shared and will be written to."""
        needed = -(-(state.length + num_tokens) // self.page_size) - len(state.pages)
        partial = num_tokens > 0 and state.length % self.page_size > 0
        shared = partial and self.allocator.holders(state.pages[-1]) > 1
        try:
            pages = self.allocator.allocate(needed + shared)
        except OutOfPages as error:
            raise OutOfPages(f"sequence {name}: {error}") from None
        if shared:
            copy = pages.pop()
            copy_blocks(list(self.data), torch.tensor([[state.pages[-1], copy]]))
            self.allocator.release(state.pages[-1:])
            state.pages[-1] = copy
        state.pages.extend(pages)
