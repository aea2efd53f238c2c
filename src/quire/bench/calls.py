"""A cell's plan and run through the public wrappers, and the error of its output."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import quire
from quire.bench.batches import Batch, relative_error
from quire.bench.cells import Cell
from quire.definition.pages import PageTable, RaggedLayout

Plan = Callable[[], None]
Run = Callable[[Tensor, Tensor], Tensor]


def prepared(
    cell: Cell, batch: Batch, module: ModuleType = quire, workspace: int = 0, **options: Any
) -> tuple[Plan, Run]:
    """Functions that plan a cell's batch, and that run it over k and v (paged, or ragged for a ragged cell).

    Args:
        module: the module whose wrapper is used, Quire or FlashInfer.
        workspace: bytes of its float workspace.
        options: further arguments of the wrapper's constructor.
    """
    spec, buffer = batch.spec, torch.zeros(workspace, dtype=torch.uint8, device=batch.q.device)
    shape = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk)
    dtypes = {"q_data_type": spec.q_dtype, "kv_data_type": spec.kv_dtype}
    table = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
    if cell.latent:
        return _latent(cell, batch, module.BatchMLAPagedAttentionWrapper(buffer, **options))
    if cell.ragged:
        ragged = module.BatchPrefillWithRaggedKVCacheWrapper(buffer, **options)
        rows = (batch.qo.indptr, batch.rows()[2])
        return lambda: ragged.plan(*rows, *shape, causal=True, **dtypes), lambda k, v: ragged.run(batch.q, k, v)
    if cell.operation == "decode":
        decode = module.BatchDecodeWithPagedKVCacheWrapper(buffer, **options)
        return lambda: decode.plan(*table, *shape, cell.page_size, **dtypes), lambda k, v: decode.run(batch.q, (k, v))
    prefill = module.BatchPrefillWithPagedKVCacheWrapper(buffer, **options)
    tables = (batch.qo.indptr, *table)
    return (
        lambda: prefill.plan(*tables, *shape, cell.page_size, causal=True, **dtypes),
        lambda k, v: prefill.run(batch.q, (k, v)),
    )


def _latent(cell: Cell, batch: Batch, wrapper: Any) -> tuple[Plan, Run]:
    """`prepared` for an MLA cell: 512 latent elements, which are keys and values, and 64 rotary elements of keys."""
    spec, kv, q = batch.spec, batch.kv, batch.q.split((512, 64), -1)
    tables = (batch.qo.indptr, kv.indptr, kv.indices, kv.lengths())
    layer = (spec.num_qo_heads, 512, 64, cell.page_size, True, spec.sm_scale, spec.q_dtype, spec.kv_dtype)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if spec.kv_dtype.itemsize == 1 else {}

    @cache  # an engine has the two tensors at hand: the measured host time must not include the split
    def split(k: Tensor) -> tuple[Tensor, ...]:
        return k.squeeze(2).split((512, 64), -1)

    def run(k: Tensor, _v: Tensor) -> Tensor:
        out: Tensor = wrapper.run(*q, *split(k), **scales)
        return out

    return lambda: wrapper.plan(*tables, *layer), run


def planned(cell: Cell, batch: Batch, backend: str) -> Run:
    """A function that runs a cell's batch, which is planned here."""
    plan, run = prepared(cell, batch, backend=backend)
    plan()
    return run


def sampled_error(batch: Batch, out: Tensor, requests: int = 2) -> float:
    """Relative error of the last 512 query tokens (or fewer) of the first requests.

    The oracle is too slow for a whole batch. It computes on the host, since its float64 products lower a GPU's clocks
    for a second or more.
    """
    count = min(requests, batch.kv.batch_size)
    indptr, lengths = batch.kv.indptr[: count + 1].cpu(), batch.qo.lengths()[:count].clamp(max=512).cpu()
    ends = batch.qo.indptr[1 : count + 1].tolist()
    rows = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, lengths.tolist(), strict=True)]).to(out.device)
    pages = batch.kv.indices[: int(indptr[-1])].long()
    indices = torch.arange(len(pages), dtype=torch.int32)
    table = PageTable(indptr, indices, batch.kv.last_page_len[:count].cpu(), batch.kv.page_size)
    q, k, v = (x.cpu() for x in (batch.q[rows], batch.k[pages], batch.v[pages]))
    sample = Batch(batch.spec, q, k, v, RaggedLayout.from_lengths(lengths), table)
    return relative_error(out[rows].cpu(), sample.exact()[0])
