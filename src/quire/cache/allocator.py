"""Allocation of pages with reference counts."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPages(RuntimeError):
    """An allocation needs more pages than are free."""


class PageAllocator:
    """Pages 0 to num_pages - 1 with reference counts. A page is free when it has no holders.

    Every method either completes or raises without changing anything.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages}: there must be at least one page")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """The number of holders of a page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder; OutOfPages if fewer are free."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one holder to each of the pages, which must have holders already."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder from each of the pages; pages without holders are free again."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def _check_held(self, pages: Sequence[int]) -> None:
        counts: dict[int, int] = {}
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is out of range: 0 to {self.num_pages - 1}")
            counts[page] = counts.get(page, 0) + 1
            if counts[page] > self._holders[page]:
                raise ValueError(
                    f"page {page} is released or shared more often than it is held ({self._holders[page]})"
                )
