"""A cell's plan and run through the public wrappers, and the error of outputs on a sample of its query rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import quire
from quire.bench.batches import Batch, relative_error
from quire.bench.cells import Cell
from quire.definition import oracle

Plan = Callable[[], None]
Run = Callable[[Tensor, Tensor], Tensor]
# A piece of a sample has at most so many query tokens.
_MAX_ROWS = 128
# If it has more than one token, its query tokens times its keys are at most so many.
_MAX_PAIRS = 1 << 19
# A sample has at least so many query heads, and at least one of each KV head.
_MIN_HEADS = 8


def prepared(
    cell: Cell, batch: Batch, module: ModuleType = quire, workspace: int = 0, **options: Any
) -> tuple[Plan, Run]:
    """The functions of `wrapped`."""
    return wrapped(cell, batch, module, workspace, **options)[1:]


def wrapped(
    cell: Cell, batch: Batch, module: ModuleType = quire, workspace: int = 0, **options: Any
) -> tuple[Any, Plan, Run]:
    """A wrapper, and functions that plan a cell's batch with it, and that run it over k and v (paged, or ragged for a
    ragged cell).

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
    if cell.operation == "decode" and not cell.ragged:
        decode = module.BatchDecodeWithPagedKVCacheWrapper(buffer, **options)
        return (
            decode,
            lambda: decode.plan(*table, *shape, cell.page_size, **dtypes),
            lambda k, v: decode.run(batch.q, (k, v)),
        )
    on_device = cell.device_tables or cell.operation == "decode"
    qo_indptr = batch.qo.indptr if on_device else batch.qo.indptr.cpu()
    if cell.ragged:
        ragged, kv_indptr = module.BatchPrefillWithRaggedKVCacheWrapper(buffer, **options), batch.rows()[2]
        return (
            ragged,
            lambda: ragged.plan(qo_indptr, kv_indptr, *shape, causal=True, **dtypes),
            lambda k, v: ragged.run(batch.q, k, v),
        )
    prefill = module.BatchPrefillWithPagedKVCacheWrapper(buffer, **options)
    return (
        prefill,
        lambda: prefill.plan(qo_indptr, *table, *shape, cell.page_size, causal=True, **dtypes),
        lambda k, v: prefill.run(batch.q, (k, v)),
    )


def _latent(cell: Cell, batch: Batch, wrapper: Any) -> tuple[Any, Plan, Run]:
    """`wrapped` for an MLA cell: 512 latent elements, which are keys and values, and 64 rotary elements of keys."""
    spec, kv = batch.spec, batch.kv
    q = batch.q.split((512, 64), -1)
    tables = (batch.qo.indptr, kv.indptr, kv.indices, kv.lengths())
    layer = (spec.num_qo_heads, 512, 64, cell.page_size, True, spec.sm_scale, spec.q_dtype, spec.kv_dtype)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if spec.kv_dtype.itemsize == 1 else {}

    # An engine has the two tensors at hand, so the measured host time must not include the split.
    @cache
    def split(k: Tensor) -> tuple[Tensor, ...]:
        return k.squeeze(2).split((512, 64), -1)

    def run(k: Tensor, _v: Tensor) -> Tensor:
        out: Tensor = wrapper.run(*q, *split(k), **scales)
        return out

    return wrapper, lambda: wrapper.plan(*tables, *layer), run


def planned(cell: Cell, batch: Batch, backend: str) -> Run:
    """A function that runs a cell's batch, which is planned here."""
    plan, run = prepared(cell, batch, backend=backend)
    plan()
    return run


@dataclass(frozen=True, eq=False)
class Sample:
    """Query rows and heads of a batch, and the oracle's output for them; the oracle is too slow for all of a batch.

    Rows are the first and the last of the first and of the last request. It is computed once, however many outputs are
    compared with it, and on the host, since the oracle's float64 products lower a GPU's clocks for a second or more.
    """

    rows: Tensor
    heads: Tensor
    exact: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Sample:
        qo, kv = batch.qo.indptr.tolist(), batch.kv.to("cpu")
        lengths, heads = kv.lengths().tolist(), _sampled_heads(batch.spec.num_qo_heads, batch.spec.num_kv_heads)
        spec = batch.spec.replace(num_qo_heads=len(heads))
        rows, exact = [], []
        for b in sorted({0, kv.batch_size - 1}):
            first, q_len = qo[b], qo[b + 1] - qo[b]
            kv_len = lengths[b]
            for start, end in _sampled_rows(q_len, kv_len):
                # The last of these rows sees so many keys.
                keys = kv_len - q_len + end
                pages = kv.indices[kv.indptr[b] :][: -(-keys // kv.page_size)].long().to(batch.k.device)
                k, v = (x[pages].flatten(0, 1)[:keys].cpu() for x in (batch.k, batch.v))
                q = batch.q[first + start : first + end].cpu()[:, heads]
                exact.append(oracle.attend(q, k, v, spec)[0])
                rows.append(torch.arange(first + start, first + end))
        return cls(torch.cat(rows), heads, torch.cat(exact))

    def error(self, out: Tensor) -> float:
        """Relative error of an output of the batch, [..., num_qo_heads, head_dim_vo] with a row for each query token.

        It is NaN if there is a NaN in the sample.
        """
        sampled = out.reshape(-1, *out.shape[-2:])[self.rows.to(out.device)].cpu()
        return relative_error(sampled[:, self.heads], self.exact)


def _sampled_rows(q_len: int, kv_len: int) -> list[tuple[int, int]]:
    """The ranges of a request's query tokens that are sampled."""
    count = max(1, min(_MAX_ROWS, _MAX_PAIRS // kv_len))
    return [(0, count), (q_len - count, q_len)] if q_len > 2 * count else [(0, q_len)]


def _sampled_heads(num_qo_heads: int, num_kv_heads: int) -> Tensor:
    """Equally many query heads of each KV head, by KV head, not the same ones of each."""
    group = num_qo_heads // num_kv_heads
    count = min(group, -(-_MIN_HEADS // num_kv_heads))
    kv_head = torch.arange(num_kv_heads)[:, None]
    members = (kv_head + torch.arange(count) * group // count) % group
    return (kv_head * group + members).flatten()
