"""Which requests begin with the same pages: a batch's keys in levels, so that what several requests share is read once.

A group is a run of neighbours whose next pages are the same. The first level has the groups of the whole batch; what
follows their common pages is looked at again for the next one, and so on. Pages in no level are the requests' own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.definition.pages import PageTable, RaggedLayout

# The most levels. Without a bound, requests that each continue the last one would have a level for each request.
LEVELS = 4
_NO_LINK = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Level:
    """Disjoint runs of neighbours that together are the batch, and the pages that each run shares on this level.

    Attributes:
        qo: the query rows of each run.
        kv: the pages of each run, all of them full; none for requests that share nothing here.
        longest: the most query rows that a run has.
        groups: how many runs share pages; pages_saved: what is not read again because they do.
    """

    qo: RaggedLayout
    kv: PageTable
    longest: int
    groups: int
    pages_saved: int


def shared_prefixes(
    table: PageTable, q_len: int, min_pages: int, min_saved_pages: int
) -> tuple[list[Level], PageTable]:
    """Cut a batch's keys into levels of what neighbours share and what is each request's own.

    Args:
        table: on the host.
        q_len: query tokens of each request. Their keys are never shared, so that all queries see all of a prefix, and
            each request that has pages keeps one.
        min_pages: the least number of pages that a group shares, 1 or more.
        min_saved_pages: the least number of page reads that a group saves.

    Returns:
        levels, at most LEVELS and often none, and the table of what they leave, with a request for each in `table`.
    """
    size, batch = table.page_size, table.batch_size
    if batch < 2:
        return [], table
    indptr, indices = table.indptr.numpy().astype(np.int64), table.indices.numpy()
    before = np.maximum(table.lengths().numpy().astype(np.int64) - q_len, 0) // size
    common = _common(indptr, indices, before, min_pages)
    taken = np.zeros(batch, np.int64)
    levels: list[Level] = []
    linked = np.ones(len(common), bool)
    while len(levels) < LEVELS:
        linked &= common >= np.maximum(taken[:-1], taken[1:]) + min_pages
        starts, pages = _runs(common, linked, taken, min_saved_pages)
        if not pages.any():
            break
        widths = np.diff(starts, append=batch)
        rows = torch.from_numpy((np.append(starts, batch) * q_len).astype(np.int32))
        last = torch.full((len(starts),), size, dtype=torch.int32)
        kv = _part(indices, indptr[starts] + taken[starts], pages, last, size)
        saved, longest = int(((widths - 1) * pages).sum()), int(widths.max()) * q_len
        levels.append(Level(RaggedLayout(rows), kv, longest, int(np.count_nonzero(pages)), saved))
        taken += np.repeat(pages, widths)
    if not levels:
        return [], table
    return levels, _part(indices, indptr[:-1] + taken, np.diff(indptr) - taken, table.last_page_len, size)


def _common(indptr: np.ndarray, indices: np.ndarray, before: np.ndarray, min_pages: int) -> np.ndarray:
    """The number of leading pages that each request shares with the next one, int64 [batch_size - 1]; 0 if it is less
    than `min_pages`. Only the first `before` pages of a request, which are full and before its queries, count.
    """
    common = np.minimum(before[:-1], before[1:])
    pairs = np.flatnonzero(common >= min_pages)
    last = min_pages - 1
    # Most pairs differ in the last of the first `min_pages` pages, so that this page is compared first.
    pairs = pairs[indices[indptr[pairs] + last] == indices[indptr[pairs + 1] + last]]
    counts, starts = common.tolist(), indptr.tolist()
    common[:] = 0
    for b in pairs.tolist():
        i, j = starts[b], starts[b + 1]
        n = counts[b]
        differ = indices[i : i + n] != indices[j : j + n]
        first = int(differ.argmax())
        common[b] = first if differ[first] else n
    return common


def _runs(
    common: np.ndarray, linked: np.ndarray, taken: np.ndarray, min_saved_pages: int
) -> tuple[np.ndarray, np.ndarray]:
    """The runs of linked neighbours: where they begin, and how many pages beyond `taken` each shares, 0 if it is a
    single request. Runs that do not save enough are cut in `linked` where they share least, for parts may share more.
    """
    while True:
        starts = np.flatnonzero(np.append(True, ~linked))
        widths = np.diff(starts, append=len(taken))
        links = np.append(np.where(linked, common, _NO_LINK), _NO_LINK)
        shared = np.minimum.reduceat(links, starts)
        pages = np.where(widths > 1, shared - taken[starts], 0)
        too_small = (widths > 1) & ((widths - 1) * pages < min_saved_pages)
        if not too_small.any():
            return starts, pages
        linked &= links[:-1] > np.repeat(np.where(too_small, shared, -1), widths)[:-1]


def _part(indices: np.ndarray, first: np.ndarray, counts: np.ndarray, last: torch.Tensor, size: int) -> PageTable:
    """The table of requests that have `counts` pages each, those of `indices` from entry `first` on."""
    indptr = np.append(0, np.cumsum(counts)).astype(np.int32)
    pages = np.concatenate([indices[i : i + n] for i, n in zip(first.tolist(), counts.tolist(), strict=True)])
    return PageTable(torch.from_numpy(indptr), torch.from_numpy(pages), last, size)
