"""The adapters of a step: which adapter each row has, and the products that are added for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.engine.adapters.hooks import ALL_PARTS, AdapterSwitch
from quire.steps import add_lora, add_lora_embedding, group_by_slot


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AdaptedProduct:
    """A product of the network that adapters add to: that of a linear layer, of several that are merged, or the lookup
    of an embedding.

    Attributes:
        kind: `Target.kind` of its modules.
        paths: the paths of its modules, each of which computes a part of the columns.
        part_ends: the end of each part's columns.
        start, start_b, end: the indices in a rank page at which its A begins, at which its B begins, and at which it
            ends.
        a: [num_pages, parts, RANK_PAGE, in_features], its A in all rank pages, a view.
        b: [num_pages, RANK_PAGE, out_features], its B, likewise.
    """

    kind: Literal["linear", "embedding", "head"]
    paths: list[str]
    part_ends: list[int]
    start: int
    start_b: int
    end: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AdapterTables:
    """The tables and factors of adapters on a device. Their addresses never change, so CUDA graphs may read them.

    Attributes:
        products: of the network.
        head_has_rows: whether the head computes the logits of those rows alone that are needed.
        rank_pages: int32 [num_slots, max_rank_pages], the rank pages of the adapter in each slot.
        num_rank_pages: int32 [products, num_slots], how many of these pages have factors of each product.
        switch: of the network.
    """

    products: Sequence[AdaptedProduct]
    head_has_rows: bool
    rank_pages: Tensor
    num_rank_pages: Tensor
    switch: AdapterSwitch

    @property
    def num_slots(self) -> int:
        return len(self.rank_pages)


class AdapterStep:
    """A step in which some requests have adapters.

    Args:
        tables: of the network.
        slots: int32 [tokens], that of each token's adapter; -1: it has none.
        rows: int64 [rows], the tokens whose logits are needed; all tokens in order if there are as many.
        width: the number of tokens, and of rows, up to which the forward pass is padded; None: it is not.
    """

    def __init__(self, tables: AdapterTables, slots: Tensor, rows: Tensor, width: int | None = None) -> None:
        self._tables = tables
        self._slots = _padded(slots, width)
        self._of_tokens = self._of_rows = group_by_slot(self._slots, tables.num_slots)
        if tables.head_has_rows and len(rows) != len(slots):
            self._of_rows = group_by_slot(_padded(slots[rows], width), tables.num_slots)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the network computes this step."""
        with self._tables.switch.adding(self):
            yield

    def add(self, index: int, y: Tensor, x: Tensor, part: int) -> None:
        """`Additions.add`.

        Raises:
            ValueError: the product has another number of rows than the step.
        """
        tables = self._tables
        product, num_rank_pages = tables.products[index], tables.num_rank_pages[index]
        order, ends = self._of_rows if product.kind == "head" else self._of_tokens
        count = y.numel() // y.shape[-1]
        if count != len(order):
            what = f"{product.paths[0]} computes {count} rows of a step of {len(order)}"
            raise ValueError(f"{what}: the adapters of the rows are not known")
        if product.kind == "embedding":
            a = product.a.squeeze(1)
            add_lora_embedding(y, x, a, product.b, self._slots, tables.rank_pages, num_rank_pages)
            return
        ends_of_parts = product.part_ends
        shared = (order, ends, tables.rank_pages, num_rank_pages)
        if part == ALL_PARTS:
            add_lora(y, x, product.a, product.b, ends_of_parts, *shared)
            return
        # The pages of one part are not contiguous. Modelling code seldom computes a merged layer alone.
        whole = torch.zeros(*y.shape[:-1], ends_of_parts[-1], dtype=y.dtype, device=y.device)
        add_lora(whole, x, product.a, product.b, ends_of_parts, *shared)
        start = ends_of_parts[part - 1] if part else 0
        y += whole[..., start : ends_of_parts[part]]


def _padded(slots: Tensor, width: int | None) -> Tensor:
    """Slots of rows, with padding that has no adapter."""
    return slots if width is None else F.pad(slots, (0, max(0, width - len(slots))), value=-1)
