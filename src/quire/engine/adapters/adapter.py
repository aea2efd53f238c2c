"""An adapter in the host's memory, as the pool of a model takes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor


class Values(NamedTuple):
    """Neighbouring elements of a rank page.

    Attributes:
        page: of the adapter's rank pages, 0 the first.
        start: the first element's place in the page.
        elements: [count], in pinned memory where the pool is on a GPU.
    """

    page: int
    start: int
    elements: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """The factors of an adapter's products.

    Attributes:
        digest: of what it computes; adapters with equal digests compute the same.
        rank: the largest of its products.
        num_pages: the rank pages that it takes on the device.
        product_pages: int32 [products of the pool], how many of these each product has; 0 where the adapter has none.
        contents: the elements of the rank pages; those of products that the adapter does not have are left out.
        other_contents: those of the ranks 1, 2, ... of a model that several compute.
    """

    digest: str
    rank: int
    num_pages: int
    product_pages: Tensor
    contents: list[Values]
    other_contents: list[list[Values]] = field(default_factory=list)

    def of_rank(self, rank: int) -> Adapter:
        """The adapter as another rank has it."""
        return replace(self, contents=self.other_contents[rank - 1], other_contents=[])
