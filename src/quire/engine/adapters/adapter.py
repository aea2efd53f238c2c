"""An adapter in host memory, in the layout from which `AdapterPool` copies it to the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor


class Values(NamedTuple):
    """Adjacent elements of one of an adapter's rank pages.

    Attributes:
        page: the index of the page among the adapter's own rank pages.
        start: the index of the first element in the page.
        elements: [count], in pinned memory if the pool is on a GPU.
    """

    page: int
    start: int
    elements: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """The factors of an adapter's products.

    Attributes:
        digest: identifies what the adapter computes; adapters with equal digests compute the same.
        rank: the largest rank of its products.
        num_pages: the rank pages that it takes on the device.
        product_pages: int32 [products of the pool], how many of these pages have factors of each product; 0 for a
            product that the adapter does not change.
        contents: the elements of the rank pages, without those of products that the adapter does not change.
        other_contents: the `contents` of ranks 1, 2, ... if several ranks compute the model.
    """

    digest: str
    rank: int
    num_pages: int
    product_pages: Tensor
    contents: list[Values]
    other_contents: list[list[Values]] = field(default_factory=list)

    def of_rank(self, rank: int) -> Adapter:
        """The adapter with the contents of a rank other than 0."""
        return replace(self, contents=self.other_contents[rank - 1], other_contents=[])
