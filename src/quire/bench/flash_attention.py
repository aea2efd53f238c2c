"""Calls of FlashAttention-3, through `flash_attn_interface`, the module of its official Python package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch
from torch import Tensor

from quire.bench.batches import Batch
from quire.bench.calls import Plan, Run
from quire.bench.cells import Cell
from quire.definition.pages import PageTable

_MODULE = "flash_attn_interface"


def module() -> ModuleType | None:
    """The installed FlashAttention-3; None if there is none."""
    try:
        return import_module(_MODULE)
    except ModuleNotFoundError as error:
        # The package is installed, and lacks a module itself.
        if error.name != _MODULE:
            raise
        return None


def version_of(found: ModuleType) -> str:
    """The version of the module, or else of the package that it comes in."""
    if hasattr(found, "__version__"):
        return str(found.__version__)
    try:
        return version("flash-attn-3")
    except PackageNotFoundError:
        return "of unknown version"


def kernels(found: ModuleType, cell: Cell, batch: Batch) -> dict[str, Callable[[], tuple[Plan, Run]]]:
    """Its functions that compute a cell, by name; none for decode, which is not timed."""
    if cell.operation == "decode":
        return {}
    if cell.ragged:
        return {"varlen": lambda: _varlen(found, cell, batch)}
    return {"kvcache": lambda: _with_kvcache(found, cell, batch)}


def _varlen(found: ModuleType, cell: Cell, batch: Batch) -> tuple[Plan, Run]:
    """Functions that plan (nothing) and run a cell over ragged keys and values."""
    indptrs, longest = (batch.qo.indptr, batch.rows()[2]), (max(cell.q_lens), max(cell.kv_lens))

    def run(k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = found.flash_attn_varlen_func(batch.q, k, v, *indptrs, *longest, causal=True)
        return out

    return lambda: None, run


def _with_kvcache(found: ModuleType, cell: Cell, batch: Batch) -> tuple[Plan, Run]:
    """Functions that plan and run a cell over pages.

    A plan is the scheduler's metadata, which vLLM, too, computes once per step, of prefills as of decodes, and which
    saves each layer a launch. Latent queries and keys have two parts: `qv` are the queries of the part that is values,
    too.
    """
    spec, pages = batch.spec, block_table(batch.kv)
    lengths = batch.kv.lengths()
    longest, head_dim = max(cell.q_lens), spec.head_dim_qk
    q, options = batch.q, {}
    if cell.latent:
        head_dim, q = spec.head_dim_qk - spec.head_dim_vo, batch.q[..., spec.head_dim_vo :]
        options = {"qv": batch.q[..., : spec.head_dim_vo], "softmax_scale": spec.sm_scale}
    metadata: list[Tensor] = []

    def plan() -> None:
        metadata[:] = [
            found.get_scheduler_metadata(
                len(lengths),
                longest,
                pages.shape[1] * cell.page_size,
                spec.num_qo_heads,
                spec.num_kv_heads,
                head_dim,
                lengths,
                qkv_dtype=spec.kv_dtype,
                headdim_v=spec.head_dim_vo,
                cu_seqlens_q=batch.qo.indptr,
                page_size=cell.page_size,
                causal=True,
            )
        ]

    def run(k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = found.flash_attn_with_kvcache(
            q,
            k[..., -head_dim:],
            v,
            cache_seqlens=lengths,
            page_table=pages,
            cu_seqlens_q=batch.qo.indptr,
            max_seqlen_q=longest,
            causal=True,
            scheduler_metadata=metadata[0],
            **options,
        )
        return out

    return plan, run


def block_table(table: PageTable) -> Tensor:
    """The pages of each request as a matrix [batch_size, most pages of a request], padded with zeros."""
    counts = table.indptr.diff()
    used = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]
    pages = torch.zeros(used.shape, dtype=torch.int32, device=counts.device)
    pages[used] = table.indices[int(table.indptr[0]) : int(table.indptr[-1])]
    return pages
