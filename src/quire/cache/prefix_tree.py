"""A prefix tree of full pages, in which requests find pages with the keys and values of their first tokens.

A node is one full page, and its path from the root has all tokens up to the end of that page. The tree is a holder of
its pages, so they outlive the requests that wrote them. When pages are needed, pages without other holders are evicted,
least recently used first.

Keys and values depend on more than tokens where requests are computed with different weights. Each namespace therefore
has a root of its own, as long as it has pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from quire.cache.allocator import PageAllocator


class Node:
    """A page of the tree. Callers keep it as the end of a path, and pass it to `PrefixTree.insert` and `touch`.

    Attributes:
        key: the tokens of the page; of a root, its namespace.
        depth: the number of pages on the path that ends here; -1 when the page has been evicted.
    """

    __slots__ = ("children", "depth", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: Hashable, page: int) -> None:
        self.parent, self.key = parent, key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Hashable, Node] = {}


class PrefixTree:
    """The full pages that requests can share.

    Args:
        allocator: the allocator of the pages; the tree is one holder of each page in it.
        page_size: tokens in a page.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator, self.page_size = allocator, page_size
        # The roots by namespace. A root is removed when it loses its last child.
        self._roots: dict[Hashable, Node] = {}
        # Least recently used first. A path is updated from its leaf up, so children come before their parents, except
        # for pages of requests that go on, which have holders.
        self._order: OrderedDict[int, Node] = OrderedDict()

    def __len__(self) -> int:
        """The number of pages in the tree."""
        return len(self._order)

    @property
    def pages(self) -> list[int]:
        return list(self._order)

    @property
    def namespaces(self) -> list[Hashable]:
        """The namespaces that have pages."""
        return list(self._roots)

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> list[int]:
        """The pages of the longest prefix of `tokens` that is in the tree in this namespace. The caller becomes a
        holder of them.
        """
        return self.find(tokens, namespace)[0]

    def find(self, tokens: Sequence[int], namespace: Hashable = None) -> tuple[list[int], Node]:
        """The pages of `match`, and the node of the last one, for `insert`."""
        pages, node = [], self._root(namespace)
        for depth in range(len(tokens) // self.page_size):
            child = node.children.get(self._key(tokens, depth))
            if child is None:
                break
            pages.append(child.page)
            node = child
        self.touch(node)
        self.allocator.retain(pages)
        return pages, node

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        after: Node | None = None,
        count: int | None = None,
        namespace: Hashable = None,
    ) -> Node:
        """Add the full ones of `pages`, which hold the keys and values of `tokens`. A page that is in the tree already
        is not replaced by the caller's page with equal tokens.

        Args:
            after: the node of a prefix of `tokens` in this namespace, whose pages are not looked up again unless they
                have been evicted.
            count: the number of pages to have in the tree afterwards; None: all full ones.
            namespace: of the tokens; pages are shared within it alone.

        Returns:
            the node of the last page.
        """
        full = min(len(tokens) // self.page_size, len(pages))
        end = full if count is None else min(count, full)
        # If `after` is a root or has been evicted, start from the root that is in the tree now.
        first = self._root(namespace) if after is None or after.depth <= 0 else after
        node = first
        for depth in range(first.depth, end):
            key, page = self._key(tokens, depth), pages[depth]
            child = node.children.get(key)
            if child is None:
                self.allocator.retain((page,))
                child = node.children[key] = Node(node, key, page)
                if node.parent is None:
                    self._roots[namespace] = node
            node = child
        self.touch(node, first.depth)
        return node

    def touch(self, node: Node, depth: int = 0) -> None:
        """Mark the pages of a path as used now, from its last node up to the one below `depth`."""
        while node.depth > depth:
            self._order[node.page] = node
            self._order.move_to_end(node.page)
            assert node.parent is not None
            node = node.parent

    def evict(self, count: int) -> int:
        """Evict up to `count` pages that have no other holder, least recently used first; return their number."""
        evicted = 0
        # One pass is enough, unless a parent comes before its child.
        while evicted < count:
            found = self._evict_once(count - evicted)
            if not found:
                break
            evicted += found
        return evicted

    def _evict_once(self, count: int) -> int:
        """Look at each page once, least recently used first. Pages that requests hold become the last ones, so that
        later calls do not look at them again soon; a request that ends marks its pages as used anyway.
        """
        gone: list[Node] = []
        held: list[int] = []
        for page, node in self._order.items():
            if len(gone) == count:
                break
            if self.allocator.holders(page) > 1:
                held.append(page)
            elif not node.children:
                parent = node.parent
                assert parent is not None
                del parent.children[node.key]
                if parent.parent is None and not parent.children:
                    del self._roots[parent.key]
                node.depth = -1
                gone.append(node)
        for page in held:
            self._order.move_to_end(page)
        for node in gone:
            del self._order[node.page]
        self.allocator.release([node.page for node in gone])
        return len(gone)

    def clear(self) -> None:
        """Release every page."""
        self.allocator.release(self.pages)
        for node in self._order.values():
            node.depth = -1
        self._order.clear()
        self._roots.clear()

    def _root(self, namespace: Hashable) -> Node:
        """The root of a namespace. A new root is not in the tree until `insert` gives it a page."""
        return self._roots.get(namespace) or Node(None, namespace, -1)

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens of a page."""
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
