"""Prefill whose queries see a few keys to the right of their own position."""

from __future__ import annotations

import math

import pytest
import torch

import quire
from quire.bench.batches import random_batch, relative_error
from quire.definition import attention_spec

Q_LENS, KV_LENS = [70, 1, 33, 5], [70, 40, 61, 3]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def by_hand(batch, left: int, right: int) -> torch.Tensor:
    """Row by row, from the sentence that defines both windows."""
    spec, rows = batch.spec, []
    k, v, kv_indptr = batch.rows()
    for b, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        keys = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        for i in range(q_len):
            here = i + kv_len - q_len
            first, last = (0 if left < 0 else max(here - left, 0)), (kv_len - 1 if right < 0 else here + right)
            seen = slice(keys.start + first, keys.start + max(min(last + 1, kv_len), first))
            q = batch.q[int(batch.qo.indptr[b]) + i].double().view(spec.num_kv_heads, spec.group_size, -1)
            logits = torch.einsum("kgd,jkd->kgj", q, k[seen].double()) / math.sqrt(spec.head_dim_qk)
            rows.append(torch.einsum("kgj,jkd->kgd", logits.softmax(-1), v[seen].double()).flatten(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("left", "right"), [(-1, 0), (-1, 4), (9, 4), (0, 0), (-1, 500)])
def test_prefill_with_left_and_right_windows_matches_a_formula(left, right, device, rng):
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float16)
    batch = random_batch(spec, Q_LENS, KV_LENS, rng.choice((1, 5, 16)))
    expected, (k, v, kv_indptr) = by_hand(batch, left, right), batch.rows()
    windows = {"window_left": left, "window_right": right}
    q, k, v, cache = (x.to(device) for x in (batch.q, k, v, torch.stack([batch.k, batch.v], 1)))
    paged = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device))
    tables = batch.qo.indptr, batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len
    paged.plan(*tables, 4, 2, 64, batch.kv.page_size, **windows)
    assert relative_error(paged.run(q, cache).cpu(), expected) < 6e-4
    ragged = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device=device))
    ragged.plan(batch.qo.indptr, kv_indptr, 4, 2, 64, **windows)
    assert relative_error(ragged.run(q, k, v).cpu(), expected) < 6e-4
    for b in range(len(Q_LENS)):
        rows, keys = (slice(int(x[b]), int(x[b + 1])) for x in (batch.qo.indptr, kv_indptr))
        out = quire.single_prefill_with_kv_cache(q[rows], k[keys], v[keys], **windows)
        assert relative_error(out.cpu(), expected[rows]) < 6e-4


def test_causal_prefill_with_any_right_window_sees_no_later_keys():
    q, k = torch.randn(9, 2, 64), torch.randn(20, 2, 64)
    outs = [quire.single_prefill_with_kv_cache(q, k, k, causal=True, window_right=n) for n in (-1, 0, 7)]
    outs.append(quire.single_prefill_with_kv_cache(q, k, k, window_right=0))
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not torch.equal(quire.single_prefill_with_kv_cache(q, k, k, window_right=7), outs[0])


@pytest.mark.parametrize("window", [-2, 1.0, True, "3"])
def test_prefill_with_an_invalid_right_window_is_refused(window):
    q = torch.randn(3, 2, 64)
    with pytest.raises(ValueError, match=r"window_right = .* is not supported"):
        quire.single_prefill_with_kv_cache(q, q, q, window_right=window)
