"""Pages: who holds them, what prefixes they carry, what a cache that owns its tables allows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import quire as flashinfer
from helpers.seeds import SEED
from quire.bench.batches import relative_error
from quire.cache import OutOfPages, PageAllocator, PagedKVCache, PrefixTree, copy_blocks, swap_blocks
from quire.definition import attention_spec, oracle
from quire.definition.pages import RaggedLayout


def test_page_allocator_counts_holders_of_pages():
    pages = PageAllocator(4)
    first = pages.allocate(3)
    assert first == [0, 1, 2]
    pages.retain(first[:1])
    pages.release(first)
    assert (pages.num_free, pages.holders(0), pages.holders(1)) == (3, 1, 0)
    with pytest.raises(OutOfPages, match="4 pages are needed, 3 of 4 are free"):
        pages.allocate(4)
    with pytest.raises(ValueError, match="page 1 is released or shared more often than it is held"):
        pages.release([1])
    with pytest.raises(ValueError, match=r"page 0 .* more often"):
        pages.release([0, 0])
    with pytest.raises(ValueError, match="page 7 is out of range: 0 to 3"):
        pages.retain([7])
    assert (pages.num_free, pages.holders(0)) == (3, 1), "a refused call changes nothing"


def tree_of(num_pages: int, page_size: int) -> tuple[PageAllocator, PrefixTree]:
    pages = PageAllocator(num_pages)
    return pages, PrefixTree(pages, page_size)


def test_prefix_tree_match_returns_the_longest_known_prefix():
    pages, tree = tree_of(16, 4)
    mine = pages.allocate(3)
    tree.insert(range(11), mine)  # two full pages, and three tokens
    assert len(tree) == 2
    assert tree.match([*range(8), 99]) == mine[:2]
    assert tree.match([0, 1, 2, 3, 9, 9, 9, 9]) == mine[:1]
    assert tree.match([0, 1, 2]) == []
    assert tree.match([5, *range(11)]) == []
    assert [pages.holders(p) for p in mine] == [4, 3, 1]


def test_prefix_tree_insert_of_a_known_prefix_keeps_its_pages():
    pages, tree = tree_of(8, 2)
    first, second = pages.allocate(2), pages.allocate(2)
    tree.insert([1, 2, 3, 4], first)
    tree.insert([1, 2, 3, 4], second)
    assert tree.match([1, 2, 3, 4]) == first
    assert [pages.holders(p) for p in second] == [1, 1]


def test_prefix_tree_evict_releases_the_oldest_unused_leaves():
    pages, tree = tree_of(8, 1)
    old, new = pages.allocate(3), pages.allocate(2)
    tree.insert([1, 2, 3], old)
    tree.insert([7, 8], new)
    pages.release(old)
    pages.release(new[1:])  # new[0] is still in use
    assert tree.evict(1) == 1
    assert pages.holders(old[2]) == 0
    tree.insert([1, 2], old[:2])  # used again: now younger than new[1]
    assert tree.evict(1) == 1
    assert pages.holders(new[1]) == 0
    assert tree.evict(5) == 2
    assert (len(tree), pages.num_free) == (1, 7)
    tree.clear()
    assert pages.holders(new[0]) == 1


def test_prefix_tree_of_two_namespaces_shares_no_page():
    pages, tree = tree_of(8, 2)
    mine, theirs = pages.allocate(2), pages.allocate(1)
    node = tree.insert([1, 2, 3, 4], mine)
    tree.insert([1, 2], theirs, namespace="other")
    assert (tree.match([1, 2, 3, 4]), tree.match([1, 2, 3, 4], "other")) == (mine, theirs)
    assert tree.match([1, 2], "unknown") == []
    assert tree.insert([1, 2, 3, 4], mine, node) is node
    assert tree.namespaces == [None, "other"]
    assert len(tree) == 3


def test_prefix_tree_root_without_pages_is_not_kept():
    pages, tree = tree_of(8, 1)
    old, new = pages.allocate(1), pages.allocate(2)
    known = tree.insert([5], old, namespace="old")
    tree.insert([5, 6], new, namespace="new")
    tree.insert([], [], namespace="none")
    assert tree.find([1], "none")[0] == []
    assert tree.namespaces == ["old", "new"]
    pages.release(old)
    pages.release(new)
    assert tree.evict(1) == 1
    assert (tree.namespaces, pages.num_free) == (["new"], 6)
    again = pages.allocate(1)
    assert tree.insert([5], again, known, namespace="old").page == again[0]
    _, root = tree.find([7], "new")
    assert tree.evict(2) == 2
    assert tree.namespaces == ["old"]
    last = pages.allocate(1)
    tree.insert([7], last, root, namespace="new")
    assert tree.match([7], "new") == last
    tree.clear()
    assert (tree.namespaces, len(tree)) == ([], 0)


@seed(SEED)
class Tree(RuleBasedStateMachine):
    """Requests of two namespaces that come, share, and go: no page is lost, and a match is always what was inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.pages, self.tree = tree_of(30, 2)
        self.requests: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[object, ...]] = {}  # page: its namespace, and all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=13), namespace=st.sampled_from([None, "other"]))
    def arrive(self, tokens: list[int], namespace: str | None) -> None:
        found = self.tree.match(tokens, namespace)
        for i, page in enumerate(found):
            assert self.content[page] == (namespace, *tokens[: 2 * i + 2])
        missing = -(-len(tokens) // 2) - len(found)
        short = missing - self.pages.num_free
        if short > 0 and self.tree.evict(short) < short:
            self.pages.release(found)
            return
        mine = found + self.pages.allocate(missing)
        for i in range(len(found), len(tokens) // 2):
            self.content[mine[i]] = (namespace, *tokens[: 2 * i + 2])
        self.tree.insert(tokens, mine, namespace=namespace)
        self.requests.append((tokens, mine))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, mine = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pages.release(mine)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        before = self.pages.num_free
        evicted = self.tree.evict(count)
        assert self.pages.num_free == before + evicted

    @invariant()
    def references_add_up(self) -> None:
        held = Counter(page for _, mine in self.requests for page in mine) + Counter(self.tree.pages)
        assert [self.pages.holders(p) for p in range(30)] == [held[p] for p in range(30)]
        assert self.pages.num_free == 30 - len(held)
        assert set(self.tree.namespaces) == {self.content[page][0] for page in self.tree.pages}


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_copy_and_swap_blocks_move_whole_pages():
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        caches = [torch.randn(6, 2, 4, 1, 8).to(dtype) for _ in range(2)]
        before = [c.clone() for c in caches]
        copy_blocks(caches, torch.tensor([[0, 3], [3, 5]]))
        for cache, old in zip(caches, before, strict=True):
            expected = old.float()[[0, 1, 2, 0, 4, 3]]
            assert torch.equal(cache.float(), expected), "sources are read before anything is written"
        target = torch.zeros(3, 2, 4, 1, 8).to(dtype)
        swap_blocks(caches[0], target, torch.tensor([[5, 0], [1, 2]]))
        assert torch.equal(target.float()[[0, 2]], caches[0].float()[[5, 1]])
        assert not target.float()[1].any()
    with pytest.raises(ValueError, match=r"src_to_dst\[1\] goes to page 3: pages are 0 to 2"):
        swap_blocks(caches[0], target, torch.tensor([[0, 0], [1, 3]]))
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        swap_blocks(caches[0], target.bfloat16(), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match=r"must be integers \[n, 2\]"):
        copy_blocks(caches, torch.tensor([0, 1]))


def cache_of(pages=8, page_size=4, layers=2, layout="NHD") -> PagedKVCache:
    return PagedKVCache(layers, 2, 16, page_size, pages, "cpu", torch.float32, layout)


def grow(cache: PagedKVCache, tokens: int, sequence: int | None = None) -> tuple[int, list[torch.Tensor]]:
    """Append random tokens to all layers of a sequence; returns it and the keys of each layer."""
    name = cache.begin_forward(tokens, sequence)
    keys = [torch.randn(tokens, 2, 16) for _ in range(cache.num_layers)]
    for layer, key in enumerate(keys):
        cache.append(layer, key, -key, [name])
    cache.end_forward(name, tokens)
    return name, keys


def rows(cache: PagedKVCache, layer: int, sequence: int) -> torch.Tensor:
    table = cache.page_table([sequence])
    return cache.tensors(layer)[0][table.indices.long()].flatten(0, 1)[: int(table.lengths()[0])]


def test_documented_quickstart_runs(capsys):
    fi, device, dtype = flashinfer, "cpu", torch.float16
    num_layers, num_heads = 1, 32
    kv_heads, head_dim = 32, 128
    page_size, max_total_seq_len = 16, 2048
    kv_cache = fi.core.PagedKVCache(
        num_layers=num_layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_num_pages=max_total_seq_len // page_size,
        device=device,
        data_type=dtype,
    )
    decode_wrapper = fi.BatchDecodeWithPagedKVCache(
        kv_cache=kv_cache,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        sm_scale=1.0 / (head_dim**0.5),
        dtype=dtype,
    )
    batch_size_decode, prefill_len = 1, 50
    seq_idx_in_batch = kv_cache.begin_forward(prefill_len)
    kv_cache.end_forward(seq_idx_in_batch, prefill_len)
    query_decode = torch.randn(batch_size_decode, 1, num_heads, head_dim, dtype=dtype, device=device)
    output = decode_wrapper.decode(query_decode)
    print(f"FlashInfer BatchDecode output shape: {output.shape}")
    print("FlashInfer decode successful.")
    assert "torch.Size([1, 1, 32, 128])" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_cache_forked_sequences_match_the_oracle(layout):
    cache = cache_of(layout=layout)
    first, keys = grow(cache, 6)
    twin = cache.fork(first)
    assert cache.num_free_pages == 6, "a fork shares its pages"
    _, more = grow(cache, 3, twin)
    assert cache.num_free_pages == 4, "the page that was written to was copied, and one was added"
    second, _ = grow(cache, 1)
    for layer in range(2):
        assert torch.equal(rows(cache, layer, first), keys[layer])
        assert torch.equal(rows(cache, layer, twin), torch.cat([keys[layer], more[layer]]))
    decode = flashinfer.BatchDecodeWithPagedKVCache(cache, num_heads=4, kv_heads=2, head_dim=16)
    query = torch.randn(3, 4, 16)
    out, lse = decode.decode(query, layer=1, return_lse=True)
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, q_dtype=torch.float32)
    tables = RaggedLayout(torch.arange(4, dtype=torch.int32)), cache.page_table([first, twin, second])
    exact, exact_lse = oracle.attend_batch(query, *cache.tensors(1), *tables, spec)
    assert relative_error(out, exact) < 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    one = decode.decode(query[1:2], layer=1, sequences=[twin])
    torch.testing.assert_close(one, out[1:2])
    for sequence in (first, twin, second):
        cache.free(sequence)
    assert cache.num_free_pages == 8


def test_end_forward_with_fewer_tokens_returns_unused_pages():
    cache = cache_of()
    name = cache.begin_forward(13)
    cache.end_forward(name, 2)
    assert (cache.length(name), cache.num_free_pages) == (2, 7)
    cache.begin_forward(0, name)
    cache.end_forward(name, 0)
    assert cache.length(name) == 2


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda c: c.begin_forward(25), OutOfPages, "sequence 2: 7 pages are needed, 6 of 8 are free"),
        (lambda c: c.begin_forward(33, 0), OutOfPages, "sequence 0: 9 pages are needed"),
        (lambda c: c.begin_forward(-1), ValueError, "sequence 2: num_tokens = -1 is negative"),
        (lambda c: c.begin_forward(1.5), ValueError, r"sequence 2: num_tokens = 1\.5 is not an integer"),
        (lambda c: c.end_forward(1, 1.5), ValueError, r"sequence 1: num_tokens = 1\.5 is not an integer"),
        (lambda c: c.begin_forward(1, 1), ValueError, "sequence 1 has been begun with 3 tokens and not ended"),
        (lambda c: c.end_forward(1, 4), ValueError, "sequence 1: 4 tokens end, but 3 were begun"),
        (lambda c: c.end_forward(0, 1), ValueError, "sequence 0: 1 tokens end, but 0 were begun"),
        (lambda c: c.end_forward(9, 1), ValueError, r"sequence 9 is unknown or has been freed; living are \[0, 1\]"),
        (lambda c: c.free(7), ValueError, "sequence 7 is unknown"),
        (lambda c: c.fork(1), ValueError, "sequence 1 has been begun and not ended"),
        (lambda c: c.length(5), ValueError, "sequence 5 is unknown"),
        (lambda c: c.append(0, torch.zeros(2, 2, 16), torch.zeros(2, 2, 16)), ValueError, "2 tokens: .* begun 3"),
        (lambda c: c.append(5, torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)), ValueError, "layer = 5 is out of range"),
        (lambda c: c.append(0, torch.zeros(3, 2, 8), torch.zeros(3, 2, 8)), ValueError, "key has shape"),
    ],
)
def test_paged_cache_wrong_call_names_the_sequence_and_changes_nothing(wrong, error, message):
    cache = cache_of()
    grow(cache, 4)
    cache.begin_forward(3)
    before = (cache.num_free_pages, cache.sequences, cache.page_table().indices.tolist(), cache.data.clone())
    with pytest.raises(error, match=message):
        wrong(cache)
    after = (cache.num_free_pages, cache.sequences, cache.page_table().indices.tolist(), cache.data)
    assert before[:3] == after[:3]
    assert torch.equal(before[3], after[3])


def test_free_of_a_freed_sequence_is_refused():
    cache = cache_of()
    name, _ = grow(cache, 4)
    cache.free(name)
    with pytest.raises(ValueError, match="sequence 0 is unknown or has been freed"):
        cache.free(name)
    assert cache.num_free_pages == 8


def test_paged_cache_and_wrappers_of_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="page_size = 0: it must be a positive integer"):
        cache_of(page_size=0)
    with pytest.raises(ValueError, match="num_pages = 0"):
        cache_of(pages=0)
    with pytest.raises(ValueError, match=r"kv_heads = 3 .* 2, as in the cache"):
        flashinfer.BatchDecodeWithPagedKVCache(cache_of(), 6, 3, 16)
    decode = flashinfer.BatchDecodeWithPagedKVCache(cache_of(), 4, 2, 16)
    with pytest.raises(ValueError, match="0 rows, one per sequence"):
        decode.decode(torch.zeros(2, 1, 4, 16))


def test_ragged_prefill_of_cache_module_matches_the_oracle(rng):
    prefill = flashinfer.BatchPrefillWithRaggedKVCache(num_heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    q, k, v = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    indptr = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = prefill.prefill(q, k, v, indptr)
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, q_dtype=torch.float32)
    for a, b in ((0, 4), (4, 9)):
        assert relative_error(out[a:b], oracle.attend(q[a:b], k[a:b], v[a:b], spec)[0]) < 1e-6
