"""Paged caches: the page allocator, the prefix tree, copies of pages, and a cache that owns its page tables."""

from quire.cache.allocator import OutOfPages, PageAllocator
from quire.cache.block_copies import copy_blocks, swap_blocks
from quire.cache.pool import PagedKVCache
from quire.cache.prefix_tree import Node, PrefixTree

__all__ = ["Node", "OutOfPages", "PageAllocator", "PagedKVCache", "PrefixTree", "copy_blocks", "swap_blocks"]
