"""torch.compile over operations whose page sizes, batch sizes and heads change between the calls of one function.

Numbers that changed once are symbols in what is traced afterwards: nothing may format them, or ask for their values.
"""

from __future__ import annotations

import pytest
import torch

import quire as flashinfer
from quire.bench.batches import random_batch
from quire.definition import attention_spec

F32 = torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [  # requests' lengths, page size, query heads and KV heads of each call
    ([30, 7, 40], 16, 8, 2),
    ([30, 7], 4, 8, 2),
    ([9, 30, 7, 40, 2], 8, 12, 4),
    ([30, 7, 40, 5], 2, 6, 3),
]


@pytest.fixture(autouse=True)
def forgotten():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def drawn(lengths, page_size, heads, q_lens, device):
    layer = dict(zip(("num_qo_heads", "num_kv_heads"), heads, strict=True))
    spec = attention_spec(**layer, head_dim_qk=64, q_dtype=F32)
    batch = random_batch(spec, q_lens, lengths, page_size, device=device)
    return batch, (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)


def few(lengths):
    """Query tokens: some of each request's."""
    return [min(3, n) for n in lengths]


# Each makes a planned wrapper, the tensors of a run, and its options.


def decode(lengths, page_size, heads, device):
    batch, tables = drawn(lengths, page_size, heads, [1] * len(lengths), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(*tables, *heads, 64, page_size, q_data_type=F32)
    return wrapper, (batch.q, (batch.k, batch.v)), {"k_scale": torch.rand(heads[1], device=device), "q_len_per_req": 1}


def paged(lengths, page_size, heads, device):
    batch, tables = drawn(lengths, page_size, heads, few(lengths), device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(batch.qo.indptr, *tables, *heads, 64, page_size, causal=True, q_data_type=F32)
    return wrapper, (batch.q, (batch.k, batch.v)), {"v_scale": torch.rand(heads[1], device=device)}


def ragged(lengths, page_size, heads, device):
    indptr = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    q = torch.randn(sum(lengths), heads[0], 64, device=device)
    k, v = torch.randn(2, sum(lengths), heads[1], 64, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(indptr, indptr, *heads, 64, causal=True, q_data_type=F32)
    return wrapper, (q, k, v), {"return_lse": True, "lse_base": "ln", "lse_layout": "HN"}


def mixed(lengths, page_size, heads, device):
    batch, (indptr, indices, _) = drawn(lengths, page_size, heads, few(lengths), device)
    wrapper, lens = flashinfer.BatchAttention(device=device), batch.kv.lengths()
    wrapper.plan(batch.qo.indptr, indptr, indices, lens, *heads, 64, 64, page_size, True, None, 9.0, F32, F32)
    return wrapper, (batch.q, (batch.k, batch.v)), {"logits_soft_cap": 2.0}


def latent(lengths, page_size, heads, device):
    batch, (indptr, indices, _) = drawn(lengths, page_size, heads, few(lengths), device)
    wrapper, lens = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0, device=device)), batch.kv.lengths()
    wrapper.plan(batch.qo.indptr, indptr, indices, lens, heads[0], 128, 64, page_size, True, 0.1, F32, F32)
    q = torch.randn(len(batch.q), heads[0], 192, device=device)
    cache = torch.randn(len(batch.k), page_size, 192, device=device)
    return wrapper, (*q.split([128, 64], -1), *cache.split([128, 64], -1)), {"return_lse": True}


def cascade(lengths, page_size, heads, device):
    count = len(lengths)
    shared, prefix = drawn([sum(lengths)], page_size, heads, [count], device)
    batch, tables = drawn(lengths, page_size, heads, [1] * count, device)
    k, v = (torch.cat(pair) for pair in ((batch.k, shared.k), (batch.v, shared.v)))
    levels = ((shared.qo.indptr, prefix[0], prefix[1] + len(batch.k), prefix[2]), (batch.qo.indptr, *tables))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0, device=device))
    wrapper.plan(*zip(*levels, strict=True), *heads, 64, page_size, causal=True, q_data_type=F32)
    return wrapper, (batch.q, (k, v)), {}


def blocks(lengths, page_size, heads, device):
    rows, columns = len(lengths), len(lengths) + 2
    seen = torch.rand(rows, columns) < 0.6
    indptr = torch.tensor([0, *seen.sum(1)]).cumsum(0).int().to(device)
    indices = seen.nonzero()[:, 1].int().to(device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(0, device=device))
    sizes = (2 * rows, page_size * columns, 2, page_size)
    wrapper.plan(indptr, indices, *sizes, *heads, 64, q_data_type=F32, o_data_type=F32)
    q = torch.randn(2 * rows, heads[0], 64, device=device)
    k, v = torch.randn(2, page_size * columns, heads[1], 64, device=device)
    return wrapper, (q, k, v), {}


def blocks_of_heads(lengths, page_size, heads, device):
    seen = torch.rand(heads[1], len(lengths), 3) < 0.6
    sizes = [torch.tensor([row] * heads[1]) for row in (lengths, [page_size, 1, 5])]
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0, device=device))
    wrapper.plan(*(x.to(device) for x in (seen, *sizes)), *heads, 64, q_data_type=F32)
    q = torch.randn(heads[0], sum(lengths), 64, device=device)
    k, v = torch.randn(2, heads[1], page_size + 6, 64, device=device)
    return wrapper, (q, k, v), {"return_lse": True}


class Single:
    """Single requests, which no wrapper plans."""

    def run(self, q, k, v, **scales):
        prefilled = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, **scales)
        return prefilled, flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=True)


def single(lengths, page_size, heads, device):
    q = torch.randn(page_size, heads[0], 64, device=device)
    k, v = torch.randn(2, sum(lengths), heads[1], 64, device=device)
    return Single(), (q, k, v), {"scale_q": torch.rand(heads[0], device=device), "k_scale": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [decode, paged, ragged, mixed, latent, cascade, blocks, blocks_of_heads, single])
def test_compiled_run_with_changed_shapes_equals_eager(make, device):
    def run(wrapper, args, options):
        return wrapper.run(*args, **options)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for lengths, page_size, *heads in SHAPES:
        given = make(lengths, page_size, heads, device)
        torch.testing.assert_close(compiled(*given), run(*given), rtol=0, atol=0)
