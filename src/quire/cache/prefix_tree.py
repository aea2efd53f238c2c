"""A prefix tree of full pages, in which requests find pages with the keys and values of their first tokens.

A node is one full page, and its path from the root has all tokens up to the end of that page. The tree is a holder of
its pages, so they outlive the requests that wrote them. When pages are needed, pages without other holders are evicted,
least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.cache.allocator import PageAllocator


class _Node:
    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: _Node | None, key: tuple[int, ...], page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixTree:
    """The full pages that requests can share.

    Args:
        allocator: the allocator of the pages; the tree is one holder of each page in it.
        page_size: tokens in a page.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator, self.page_size = allocator, page_size
        self._root = _Node(None, (), -1)
        # Least recently used first. A path is updated from its leaf up, so children come before their parents.
        self._order: OrderedDict[int, _Node] = OrderedDict()

    def __len__(self) -> int:
        """The number of pages in the tree."""
        return len(self._order)

    @property
    def pages(self) -> list[int]:
        return list(self._order)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest prefix of `tokens` in the tree. The caller becomes a holder of them."""
        path = []
        node = self._root
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        self._touch(path)
        pages = [node.page for node in path]
        self.allocator.retain(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Add the full ones of `pages`, which hold the keys and values of `tokens`. A page that is in the tree already
        is not replaced by the caller's page with equal tokens.
        """
        path = []
        node = self._root
        for key, page in zip(self._keys(tokens), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                self.allocator.retain([page])
                child = node.children[key] = _Node(node, key, page)
            path.append(child)
            node = child
        self._touch(path)

    def evict(self, count: int) -> int:
        """Evict up to `count` pages that have no other holder, least recently used first; return their number."""
        evicted: list[int] = []
        for page, node in self._order.items():
            if len(evicted) == count:
                break
            if self.allocator.holders(page) == 1 and not node.children:
                assert node.parent is not None
                del node.parent.children[node.key]
                evicted.append(page)
        for page in evicted:
            del self._order[page]
        self.allocator.release(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Release every page."""
        self.allocator.release(self.pages)
        self._order.clear()
        self._root.children.clear()

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            yield tuple(tokens[end - self.page_size : end])

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._order[node.page] = node
            self._order.move_to_end(node.page)
