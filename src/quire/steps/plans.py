"""Planning a wrapper for a step, and the attention parameters of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quire.definition.pages import PageTable


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of heads and their sizes, which layers must have in common to share a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int


@dataclass(frozen=True, slots=True)
class Layer:
    """The attention of a layer: its heads, and the parameters that are passed to each run."""

    heads: Heads
    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0


def plan(
    wrapper: Any,
    pages: PageTable,
    heads: Heads,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    qo_indptr: Tensor | None = None,
    **options: Any,
) -> None:
    """Plan a paged wrapper for a step: a decode wrapper or, with qo_indptr, a prefill wrapper.

    `options` are further arguments of the wrapper's plan: causal, custom_mask, q_len_per_req, ...
    """
    tables = (pages.indptr, pages.indices, pages.last_page_len)
    counts = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk, pages.page_size)
    dtypes = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
    if qo_indptr is None:
        wrapper.plan(*tables, *counts, head_dim_vo=heads.head_dim_vo, **dtypes, **options)
    else:
        wrapper.plan(qo_indptr, *tables, *counts, heads.head_dim_vo, **dtypes, **options)


@lru_cache(maxsize=32)
def workspace(device: torch.device, size: int) -> Tensor:
    """A uint8 workspace of `size` bytes, one per device and size, for wrappers that run one after another."""
    return torch.empty(size, dtype=torch.uint8, device=device)
