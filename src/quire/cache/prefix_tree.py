"""Which full pages hold the keys and values of which tokens: a tree in which requests find their prefixes.

A node is one full page; its path from the root spells all tokens up to its end. The tree holds its pages, so they
outlive the requests that wrote them; those that nobody else holds are given up, oldest first, when pages are needed.
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
    """The full pages that can be shared.

    Args:
        allocator: whose pages these are; the tree is one more holder of each page in it.
        page_size: tokens in a page.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator, self.page_size = allocator, page_size
        self._root = _Node(None, (), -1)
        # Least recently used first. A path is touched from its leaf up, so a child always stands before its parent.
        self._order: OrderedDict[int, _Node] = OrderedDict()

    def __len__(self) -> int:
        """Pages in the tree."""
        return len(self._order)

    @property
    def pages(self) -> list[int]:
        return list(self._order)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known prefix of `tokens` that ends with a page. The caller becomes a holder."""
        path = []
        node = self._root
        for key in self._keys(tokens):
            found = node.children.get(key)
            if found is None:
                break
            path.append(found)
            node = found
        self._touch(path)
        pages = [node.page for node in path]
        self.allocator.retain(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make known that `pages` hold the keys and values of `tokens`, as far as they are full.

        Where a prefix is known already, the known page stays; the caller's copy remains the caller's.
        """
        path = []
        node = self._root
        for key, page in zip(self._keys(tokens), pages, strict=False):
            found = node.children.get(key)
            if found is None:
                self.allocator.retain([page])
                found = node.children[key] = _Node(node, key, page)
            path.append(found)
            node = found
        self._touch(path)

    def evict(self, count: int) -> int:
        """Give up at most `count` pages that nobody else holds, least recently used first; returns how many."""
        given_up: list[int] = []
        for page, node in self._order.items():
            if len(given_up) == count:
                break
            if self.allocator.holders(page) == 1 and not node.children:
                assert node.parent is not None
                del node.parent.children[node.key]
                given_up.append(page)
        for page in given_up:
            del self._order[page]
        self.allocator.release(given_up)
        return len(given_up)

    def clear(self) -> None:
        """Give up every page."""
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
