"""The prefixes that requests share, as found in their page tables."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers.page_tables import rows, table
from quire.definition import PageTable
from quire.wrappers import prefixes
from quire.wrappers.prefixes import shared_prefixes


def shared(
    kv: PageTable, q_len: int = 1, min_pages: int = 1, min_saved: int = 1
) -> list[list[tuple[int, int, list[int]]]]:
    """The groups of each level as (first request, end, pages). Checks that the parts are the table again, and counts
    what is read.
    """
    levels, own = shared_prefixes(kv, q_len, min_pages, min_saved)
    spelled: list[list[int]] = [[] for _ in rows(kv)]
    groups = []
    for level in levels:
        found = []
        for (a, b), pages in zip(pairwise(level.qo.indptr.tolist()), rows(level.kv), strict=True):
            assert a % q_len == b % q_len == 0
            assert b - a <= level.longest
            for request in range(a // q_len, b // q_len):
                spelled[request] += pages
            found += [(a // q_len, b // q_len, pages)] if pages else []
        assert level.groups == len(found)
        assert (level.kv.last_page_len == kv.page_size).all()
        groups.append(found)
    assert [a + b for a, b in zip(spelled, rows(own), strict=True)] == rows(kv)
    assert torch.equal(own.last_page_len, kv.last_page_len)
    read = sum(len(part.indices) for part in (own, *(level.kv for level in levels)))
    assert read == len(kv.indices) - sum(level.pages_saved for level in levels)
    return groups


def test_shared_prefixes_of_different_tables_are_none():
    assert shared(table([[0, 1, 2], [3, 1, 2], [4, 5]])) == []
    assert shared(table([[0, 1, 2]])) == []
    assert shared(table([])) == []
    assert shared(table([[], []])) == []
    assert shared(table([[0, 1], [], [0, 2]])) == [], "neighbours alone share"
    kv = table([[0, 1], [2, 3]])
    assert shared_prefixes(kv, 1, 1, 1)[1] is kv


@pytest.mark.parametrize("size", [1, 16])
def test_shared_prefixes_of_one_prefix_are_one_group(size):
    assert shared(table([[7, 8, 1], [7, 8, 2], [7, 8, 3, 4]], size)) == [[(0, 3, [7, 8])]]


def test_shared_prefixes_of_equal_tables_leave_each_request_a_page():
    """A request keeps one page even if all its pages are shared, or if its pages are the first ones of another."""
    assert shared(table([[5, 6, 7]] * 4)) == [[(0, 4, [5, 6])]]
    assert shared(table([[5, 6, 7]] * 4, last=3)) == [[(0, 4, [5, 6])]]
    assert shared(table([[5]] * 4)) == []
    assert shared(table([[5, 6], [5, 6, 7, 8], [5, 6, 7, 9]])) == [[(0, 3, [5])], [(1, 3, [6, 7])]]


def test_shared_prefixes_of_several_query_tokens_leave_their_pages():
    same = [[5, 6, 7, 8]] * 2
    for last, q_len, pages in ((16, 16, 3), (16, 17, 2), (3, 3, 3), (3, 4, 2), (3, 35, 1), (3, 36, 0), (3, 99, 0)):
        found = shared(table(same, 16, last), q_len)
        assert found == ([[(0, 2, [5, 6, 7][:pages])]] if pages else []), (last, q_len)
    assert shared(table(same, 1), 3) == [[(0, 2, [5])]]


def test_shared_prefixes_of_groups_among_others_find_each_group():
    """64 requests in three groups, with some of their own before, between and after."""
    ids = iter(range(10_000))
    new = lambda n: [next(ids) for _ in range(n)]  # noqa: E731
    requests, expected = [new(3)], []
    for width, pages in ((30, 5), (2, 9), (27, 2)):
        prefix = new(pages)
        expected.append((len(requests), len(requests) + width, prefix))
        requests += [prefix + new(2) for _ in range(width)]
        requests += [new(1)]
    assert len(requests) == 63
    assert shared(table([*requests, []])) == [expected]


def test_shared_prefixes_of_nested_prefixes_have_several_levels():
    kv = table([[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 1, 2, 12], [0, 1, 4, 13], [0, 1, 4, 14]])
    assert shared(kv) == [[(0, 5, [0, 1])], [(0, 3, [2]), (3, 5, [4])], [(0, 2, [3])]]
    assert shared(kv, min_pages=2) == [[(0, 5, [0, 1])], [(0, 2, [2, 3])]]
    assert shared(kv, min_saved=8) == [[(0, 5, [0, 1])]]
    assert shared(kv, min_pages=3) == [[(0, 3, [0, 1, 2]), (3, 5, [0, 1, 4])]]
    assert shared(kv, min_saved=9) == []


def test_shared_prefixes_of_small_groups_join_their_subgroups():
    kv = table([[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 12], [0, 5, 6, 7, 13], [0, 5, 6, 7, 14]])
    assert shared(kv, min_saved=5) == []
    assert shared(kv, min_pages=2) == shared(kv, min_pages=4) == [[(0, 2, [0, 1, 2, 3]), (3, 5, [0, 5, 6, 7])]]
    assert shared(kv, min_pages=5) == []
    one = table([[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 12]])
    assert shared(one, min_saved=4) == [[(0, 2, [0, 1, 2, 3])]]


def test_shared_prefixes_of_a_long_chain_have_at_most_all_levels():
    """A conversation, of which each request has one page more than the one before."""
    grown = table([list(range(n + 2)) for n in range(20)])
    found = shared(grown)
    assert len(found) == prefixes.LEVELS
    assert found[0] == [(0, 20, [0])]
    assert found[1] == [(1, 20, [1])]


def test_shared_prefixes_of_a_sliced_table_are_found():
    kv = table([[9, 9], [1, 2, 3], [1, 2, 4], [1, 5]])
    kv = PageTable(kv.indptr[1:], kv.indices, kv.last_page_len[1:], 16)
    levels, own = shared_prefixes(kv, 1, 1, 1)
    assert [rows(level.kv) for level in levels] == [[[1]], [[2], []]]
    assert rows(own) == [[3], [4], [5]]
