"""FlashInfer's functions that attend over block tables without a plan, which engines call once per layer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire.attention import BlockTableAttention
from quire.definition.checks import as_dtype, check
from quire.definition.tensors import check_cache, check_layout, check_optional, check_tensors
from quire.kernels.registry import canonical

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]

_Scale = float | Tensor
_INT_WORKSPACES: dict[torch.device, Tensor] = {}


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: _Scale = 1.0,
    bmm2_scale: _Scale = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | list[Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Tensor | None = None,
    request_order_plan: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few query tokens per request, causal among themselves, over the rows of a block table.

    Args:
        query: [tokens, num_qo_heads, head_dim]: q_len_per_req tokens of each request or, where that is None,
            cum_seq_lens_q[-1] tokens, at most max_q_len of each request.
        kv_cache: a pair of 4-D tensors, or one 5-D tensor with k and v at dim 1, or one entry there that is both.
        block_tables: int32 [batch_size, max_pages]; seq_lens: int32 or uint32 [batch_size]. Both may have further rows.
        bmm1_scale: the logits' factor, with the scales of q and k; bmm2_scale: that of the output; numbers, or tensors
            with one element, which are not read by the host.
        out, out_dtype: where to write, or the dtype of a new output, by default query's.
        sinks: [num_qo_heads], a logit per head that joins the softmax's denominator.
        backend: any name of FlashInfer's or of Quire's.
        workspace_buffer, max_seq_len, enable_pdl, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode,
            request_order, request_order_plan: accepted: the results are the same without.

    Returns:
        out, or (out, lse) with lse float32 [tokens, num_qo_heads], base 2.

    Raises:
        ValueError: an argument that does not fit, and options that Quire does not have: NVFP4, masks of draft trees,
            an o_scale, skipped softmax, block-sparse attention, context parallelism, k and v of different tables.
    """
    _refuse_others(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, mask=mask, kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, bmm1_scale_log2=bmm1_scale_log2,
        enable_block_sparse_attention=enable_block_sparse_attention or None,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )  # fmt: skip
    check(o_scale in (None, 1.0), "o_scale", o_scale, "1")
    check((cp_world, cp_rank) == (1, 0), "cp_world, cp_rank", (cp_world, cp_rank), "(1, 0)")
    check(uses_shared_paged_kv_idx, "uses_shared_paged_kv_idx", uses_shared_paged_kv_idx, "True")
    if q_len_per_req is None:
        check_tensors(cum_seq_lens_q=cum_seq_lens_q)
        assert cum_seq_lens_q is not None
        rows: dict[str, Any] = {"qo_indptr": cum_seq_lens_q, "max_q_len": max_q_len}
        batch_size = max(len(cum_seq_lens_q) - 1, 0)
    else:
        check_tensors(query=query)
        check(q_len_per_req > 0, "q_len_per_req", q_len_per_req, "at least 1")
        rows = {"q_len_per_req": q_len_per_req}
        batch_size = len(query) // q_len_per_req
    tables = _rows_of_batch(block_tables, seq_lens, batch_size)
    return _attend(
        query, _pages(kv_cache, kv_layout), tables, (bmm1_scale, bmm2_scale),
        _output(query, out, out_dtype), (window_left, True, backend), rows, sinks=sinks, lse=lse, return_lse=return_lse,
    )  # fmt: skip


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: _Scale = 1.0,
    bmm2_scale: _Scale = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """`trtllm_batch_decode_with_kv_cache`, whose cum_seq_lens_q and max_q_len are called q_cu_seq_lens and
    q_len_per_req here.
    """
    ragged = q_cu_seq_lens is not None
    result = trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale,
        window_left=window_left, out=out, sinks=sinks, kv_layout=kv_layout,
        q_len_per_req=None if ragged else q_len_per_req, o_scale=o_scale, mask=mask,
        max_q_len=q_len_per_req if ragged else None, cum_seq_lens_q=q_cu_seq_lens, kv_cache_sf=kv_cache_sf,
    )  # fmt: skip
    assert isinstance(result, Tensor)
    return result


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: _Scale,
    bmm2_scale: _Scale,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Tensor | list[Tensor] | None = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens, which are the last ones of their requests, over the rows of a block table.

    Args:
        query: [tokens, num_qo_heads, head_dim], of which request b has rows cum_seq_lens_q[b] to cum_seq_lens_q[b + 1].
        max_q_len: the most query tokens of a request; those of longer requests may not be computed.
        batch_size: the requests, which are the first ones of the tables.
        max_kv_len, cum_seq_lens_kv: accepted: the tables say the same.

    The other arguments, results and errors are those of `trtllm_batch_decode_with_kv_cache`.
    """
    _refuse_others(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax or None, uses_spcompress=uses_spcompress or None,
    )  # fmt: skip
    check(uses_shared_paged_kv_idx, "uses_shared_paged_kv_idx", uses_shared_paged_kv_idx, "True")
    check_tensors(cum_seq_lens_q=cum_seq_lens_q)
    rows = {"qo_indptr": cum_seq_lens_q[: batch_size + 1], "max_q_len": max_q_len}
    tables = _rows_of_batch(block_tables, seq_lens, batch_size)
    return _attend(
        query, _pages(kv_cache, kv_layout), tables, (bmm1_scale, bmm2_scale),
        _output(query, out, out_dtype), (window_left, causal, backend), rows, sinks=sinks, lse=lse,
        return_lse=return_lse,
    )  # fmt: skip


def _rows_of_batch(block_tables: Tensor, seq_lens: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """The rows of the first `batch_size` requests."""
    check_tensors(block_tables=block_tables, seq_lens=seq_lens)
    return block_tables[:batch_size], seq_lens[:batch_size]


def _refuse_others(**options: Any) -> None:
    """Refuse options that Quire does not have, where they are given."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is not supported")


def _output(query: Tensor, out: Tensor | None, dtype: torch.dtype | str | None) -> Tensor:
    """The output of a call; ValueError if it is no tensor, or not of the requested dtype."""
    check_tensors(query=query)
    check_optional(out=out)
    if out is None:
        return torch.empty_like(query, dtype=query.dtype if dtype is None else as_dtype(dtype, "out_dtype"))
    if dtype is not None:
        check(out.dtype == as_dtype(dtype, "out_dtype"), "out.dtype", out.dtype, f"out_dtype = {dtype}")
    return out


@cache
def _wrapper(device: torch.device, backend: str, *layer: Any) -> BlockTableAttention:
    """A wrapper for the calls of equal layers. All wrappers of a device share one int workspace, as their runs follow
    each other on one stream. They exist until the process ends, since captured graphs may use that workspace.
    """
    wrapper = BlockTableAttention(torch.empty(0, device=device), backend=backend)
    wrapper._int_workspace_buffer = _INT_WORKSPACES.setdefault(device, wrapper._int_workspace_buffer)
    return wrapper


def _pages(kv_cache: Tensor | tuple[Tensor, Tensor], kv_layout: str) -> tuple[Tensor, Tensor]:
    """K and v as views [pages, page_size, num_kv_heads, head_dim]."""
    check_cache(kv_cache, "kv_cache")
    check_layout(kv_layout)
    if isinstance(kv_cache, Tensor):
        shape = list(kv_cache.shape)
        check(kv_cache.ndim == 5 and shape[1] in (1, 2), "kv_cache.shape", shape, "5-D, with 1 or 2 at dim 1")
        k, v = kv_cache[:, 0], kv_cache[:, -1]
    else:
        k, v = kv_cache
    return (k, v) if kv_layout == "NHD" else (k.transpose(-3, -2), v.transpose(-3, -2))


def _attend(
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    scales: tuple[_Scale, _Scale],
    out: Tensor,
    layer: tuple[int, bool, str],
    rows: dict[str, Any],
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plan a call's tables, and run it. The scale of logits is a factor of the keys.

    Args:
        pages: k and v, [pages, page_size, num_kv_heads, head_dim]; tables: block_tables and seq_lens.
        layer: window_left, causal, and the name of the kernels.
        rows: the arguments of the plan that say which query rows belong to which request.
        options: further arguments of the run.
    """
    check(query.ndim == 3, "query.shape", list(query.shape), "[tokens, num_qo_heads, head_dim]")
    (k, v), (window_left, causal, backend) = pages, layer
    heads = (query.shape[1], k.shape[2], query.shape[2], k.shape[1])
    settings: dict[str, Any] = {
        "head_dim_vo": v.shape[3], "causal": bool(causal), "window_left": window_left, "sm_scale": 1.0,
        "q_data_type": query.dtype, "kv_data_type": k.dtype, "o_data_type": out.dtype,
    }  # fmt: skip
    wrapper = _wrapper(query.device, canonical(backend), *heads, *settings.values(), "q_len_per_req" in rows)
    wrapper.plan(tables[0], tables[1], heads[0], heads[1], heads[2], heads[3], **settings, **rows)
    sinks = options.pop("sinks")
    if isinstance(sinks, (tuple, list)):
        check(len(sinks) == 1, "sinks", f"{len(sinks)} tensors", "one tensor")
        sinks = sinks[0]
    return wrapper.run(query, pages, k_scale=scales[0], v_scale=scales[1], sinks=sinks, out=out, **options)
