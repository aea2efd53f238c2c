"""Copies of whole pages (blocks), within caches and between caches on different devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.definition.tensors import check_no_overlap, check_tensors


def _pairs(mapping: Tensor, name: str, sources: int, targets: int) -> tuple[Tensor, Tensor]:
    """Check an integer [n, 2] mapping of pages and return its two columns on the host."""
    check_tensors(**{name: mapping})
    if mapping.ndim != 2 or mapping.shape[1] != 2 or mapping.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {mapping.dtype} of shape {list(mapping.shape)}: it must be integers [n, 2]")
    source, target = mapping.long().cpu().unbind(1)
    for column, pages, count in (("from", source, sources), ("to", target, targets)):
        bad = (pages < 0) | (pages >= count)
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            raise ValueError(f"{name}[{i}] goes {column} page {int(pages[i])}: pages are 0 to {count - 1}")
    ids, counts = target.unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(f"{name} goes to page {int(ids[counts > 1][0])} more than once: its contents would be chance")
    return source, target


def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
    """Copy pages of one cache to another, which may be on another device.

    Args:
        src_kv_cache, dst_kv_cache: [pages, ...] with equal page shapes and dtypes.
        src_to_dst: integers [n, 2], (page in src, page in dst).
    """
    check_tensors(src_kv_cache=src_kv_cache, dst_kv_cache=dst_kv_cache)
    check_no_overlap(dst_kv_cache, "dst_kv_cache")
    if src_kv_cache.shape[1:] != dst_kv_cache.shape[1:] or src_kv_cache.dtype != dst_kv_cache.dtype:
        raise ValueError(
            f"the caches differ: {list(src_kv_cache.shape)} {src_kv_cache.dtype} and {list(dst_kv_cache.shape)} "
            f"{dst_kv_cache.dtype}; pages must have equal shapes and dtypes"
        )
    source, target = _pairs(src_to_dst, "src_to_dst", len(src_kv_cache), len(dst_kv_cache))
    rows = src_kv_cache[source.to(src_kv_cache.device)].to(dst_kv_cache.device)
    _assign(dst_kv_cache, target, rows)


def copy_blocks(kv_caches: Sequence[Tensor], src_to_dists: Tensor) -> None:
    """Copy pages within each of several caches, such as those of a model's layers.

    Args:
        kv_caches: tensors [pages, ...].
        src_to_dists: integers [n, 2], (source page, target page); all sources are read before a page is written.
    """
    for i, cache in enumerate(kv_caches):
        check_tensors(**{f"kv_caches[{i}]": cache})
        check_no_overlap(cache, f"kv_caches[{i}]")
    for cache in kv_caches:
        source, target = _pairs(src_to_dists, "src_to_dists", len(cache), len(cache))
        _assign(cache, target, cache[source.to(cache.device)])


# Caches may be inference tensors, and are never part of an autograd graph.
@torch.inference_mode()
def _assign(cache: Tensor, pages: Tensor, rows: Tensor) -> None:
    # Indexed assignment does not support fp8.
    if cache.element_size() == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[pages.to(cache.device)] = rows
