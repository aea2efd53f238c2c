"""A paged cache that owns its page tables, so that nobody can get them wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor

from quire.cache.allocator import OutOfPages, PageAllocator
from quire.cache.blocks import copy_blocks
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import as_dtype
from quire.definition.tensors import check_layout, check_tensor, split_cache
from quire.page import append_paged_kv_cache, get_batch_indices_positions


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0  # committed tokens
    pending: int = 0  # tokens begun, not committed


def _check_count(num_tokens: int, sequence: int) -> None:
    if not isinstance(num_tokens, Integral):
        raise ValueError(f"sequence {sequence}: num_tokens = {num_tokens!r} is not an integer")


class PagedKVCache:
    """Keys and values of all layers, in pages, and the sequences that own them.

    A sequence grows by `begin_forward(n)`, which reserves room for n tokens, `append` once per layer, and
    `end_forward`, which commits them. Every method either happens as a whole or raises, naming the sequence, and
    changes nothing.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        page_size: tokens in a page.
        max_num_pages: pages in the pool.
        device, data_type: of the storage.
        kv_layout: NHD or HND, the order inside a page.

    Attributes:
        data: [num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim] (for HND the heads come before the
            tokens of a page), zeros at first.
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
        """The ids of the living sequences, oldest first."""
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
        """The committed tokens of a sequence."""
        return self._find(sequence).length

    def begin_forward(self, num_tokens: int, sequence: int | None = None) -> int:
        """Reserve room for `num_tokens` more tokens of a sequence (by default, a new one).

        Returns:
            the sequence's id.

        Raises:
            OutOfPages: the pool has too few free pages.
            ValueError: an unknown sequence, one that has been begun and not ended, or a negative number of tokens.
        """
        name = self._next if sequence is None else sequence
        found = _Sequence() if sequence is None else self._find(sequence)
        _check_count(num_tokens, name)
        if num_tokens < 0:
            raise ValueError(f"sequence {name}: num_tokens = {num_tokens} is negative")
        if found.pending:
            raise ValueError(f"sequence {name} has been begun with {found.pending} tokens and not ended")
        self._reserve(found, name, num_tokens)
        found.pending = num_tokens
        if sequence is None:
            self._sequences[name] = found
            self._next += 1
        return name

    def end_forward(self, sequence: int, num_tokens: int) -> None:
        """Commit the first `num_tokens` of the tokens begun; room for the others is given back.

        Raises:
            ValueError: an unknown sequence, or more tokens than were begun.
        """
        found = self._find(sequence)
        _check_count(num_tokens, sequence)
        if not 0 <= num_tokens <= found.pending:
            raise ValueError(f"sequence {sequence}: {num_tokens} tokens end, but {found.pending} were begun")
        found.length += num_tokens
        found.pending = 0
        kept = -(-found.length // self.page_size)
        self.allocator.release(found.pages[kept:])
        del found.pages[kept:]

    def append(self, layer: int, key: Tensor, value: Tensor, sequences: Sequence[int] | None = None) -> None:
        """Write the begun tokens' keys and values of one layer.

        Args:
            key, value: [tokens, num_kv_heads, head_dim], the begun tokens of each sequence one after another.
            sequences: whose, each once; by default all sequences that have been begun.

        Raises:
            ValueError: tensors that do not fit the cache or the tokens begun, an unknown sequence, or one named twice.

        What is stored is detached: the cache never becomes part of an autograd graph.
        """
        begun = [s for s, found in self._sequences.items() if found.pending]
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
        """A new sequence with the same tokens, sharing all pages; a page is copied when one of them writes to it."""
        found = self._find(sequence)
        if found.pending:
            raise ValueError(f"sequence {sequence} has been begun and not ended: it can't be forked")
        self.allocator.retain(found.pages)
        name, self._next = self._next, self._next + 1
        self._sequences[name] = _Sequence(list(found.pages), found.length)
        return name

    def free(self, sequence: int) -> None:
        """Forget a sequence and give its pages back."""
        self.allocator.release(self._find(sequence).pages)
        del self._sequences[sequence]

    def page_table(self, sequences: Sequence[int] | None = None) -> PageTable:
        """The page table of some sequences (by default all), begun tokens included, on the cache's device."""
        found = [self._find(s) for s in (self.sequences if sequences is None else sequences)]
        lengths = [s.length + s.pending for s in found]
        counts = torch.tensor([len(s.pages) for s in found], dtype=torch.int32)
        indices = torch.tensor([page for s in found for page in s.pages], dtype=torch.int32)
        last = torch.tensor([(n - 1) % self.page_size + 1 if n else 0 for n in lengths], dtype=torch.int32)
        indptr, indices, last = (x.to(self.device) for x in (RaggedLayout.from_lengths(counts).indptr, indices, last))
        return PageTable(indptr, indices, last, self.page_size)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and v of one layer as [pages, page_size, heads, head_dim] views, whatever the layout."""
        return split_cache(self.layer(layer), self.kv_layout)

    def _find(self, sequence: int) -> _Sequence:
        found = self._sequences.get(sequence)
        if found is None:
            raise ValueError(f"sequence {sequence} is unknown or has been freed; living are {self.sequences}")
        return found

    def _reserve(self, found: _Sequence, name: int, num_tokens: int) -> None:
        """Pages for num_tokens more, and a copy of the last page if it is shared and about to be written to."""
        wanted = -(-(found.length + num_tokens) // self.page_size) - len(found.pages)
        partial = num_tokens > 0 and found.length % self.page_size > 0
        shared = partial and self.allocator.holders(found.pages[-1]) > 1
        try:
            fresh = self.allocator.allocate(wanted + shared)
        except OutOfPages as error:
            raise OutOfPages(f"sequence {name}: {error}") from None
        if shared:
            copy = fresh.pop()
            copy_blocks(list(self.data), torch.tensor([[found.pages[-1], copy]]))
            self.allocator.release(found.pages[-1:])
            found.pages[-1] = copy
        found.pages.extend(fresh)
