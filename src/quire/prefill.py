"""Prefill attention: many query tokens per request, over pages or over rows stored one after another.

Names, parameters and meanings are those of `flashinfer.prefill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.pages import table
from quire.definition.tensors import as_nhd, as_scale, as_slopes, check_layout, check_tensors
from quire.kernels.attention import attend_one
from quire.kernels.ops import env_flag
from quire.kernels.registry import canonical
from quire.wrappers.arguments import DType, RunArgs, Scale, by_position, layer_args, refuse
from quire.wrappers.buffers import check_buffers
from quire.wrappers.plan import longest_request
from quire.wrappers.prefill import PrefillWrapper
from quire.wrappers.ragged import BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Prefill (or append) attention of a batch over a paged cache: `plan` once per batch, `run` once per layer.

    Requests may have any number of query tokens, also 1: prefills, chunks and decodes go in one batch.

    Args:
        float_workspace_buffer: any tensor on the device to compute on, or None (the first GPU, or the CPU).
        kv_layout: NHD or HND, see `run`.
        use_cuda_graph: keep the plan in the buffers below; the batch size is then fixed by qo_indptr_buf.
        qo_indptr_buf, paged_kv_indptr_buf: int32 [batch_size + 1].
        paged_kv_indices_buf: int32 [as many pages as a plan may have].
        paged_kv_last_page_len_buf: int32 [batch_size].
        custom_mask_buf: uint8 [as many bytes as a plan's packed masks may have]; mask_indptr_buf: int32
            [batch_size + 1].
        backend: "auto", a kernel family of Quire's, or any name of FlashInfer's (which all mean "auto").
        jit_args, jit_kwargs: as in `BatchDecodeWithPagedKVCacheWrapper`.

    Raises:
        ValueError: a buffer that does not fit, or is missing with use_cuda_graph; a variant other than AttentionSink.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
        *,
        check: bool | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, check, batch_invariant, jit_args)
        refuse(variant_owns_mask=variant_owns_mask, jit_kwargs=jit_kwargs if jit_args is None else None)
        if use_cuda_graph:
            check_buffers(
                "CUDA graph",
                "qo_indptr_buf",
                qo_indptr_buf=qo_indptr_buf,
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int | None = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        window_right: int | None = -1,
    ) -> None:
        """Record which query rows and pages belong to which request, and the layer that runs share.

        Args:
            qo_indptr: int32 or int64 [batch_size + 1], the requests' offsets in q.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, page_size: as in
                `BatchDecodeWithPagedKVCacheWrapper.plan`; the new tokens' keys are among the pages.
            head_dim_qk, head_dim_vo: size of a query and key head, and of a value head (by default the same).
            custom_mask: bool or integers [sum of q_len * kv_len], the requests' masks one after another, row by row;
                `causal` is then without effect. packed_custom_mask: uint8, the same packed, each request on a new byte.
            causal: query i of a request sees keys up to i + kv_len - q_len.
            window_right: keys to the right of the query's position that it sees; -1 or None: all.
            use_fp16_qk_reduction: accepted; sums are float32.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len: prompts of several items, see
                `quire.definition.items`; the layer is then causal. max_item_len_ptr: accepted, and not needed.
            seq_lens, seq_lens_q, block_tables, max_sequence_kv: accepted: the tables say the same.
            max_token_per_sequence: the most query tokens that a request has, in this plan and, for CUDA graphs, in
                later ones. It chooses the kernels; query tokens of longer requests may not be computed. None: it is
                read from qo_indptr if that lies on the host, and is otherwise unknown.
            fixed_split_size, disable_split_kv, alibi_slopes: as in `BatchDecodeWithPagedKVCacheWrapper.plan`.

        The other arguments are those of `BatchDecodeWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        if self._capture.captured:
            self._capture.begin_plan(type(self).__name__)
        layer = layer_args(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            page_size=page_size, q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            causal=bool(causal), window_left=window_left, window_right=window_right, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, pos_encoding=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
            slopes=as_slopes(alibi_slopes), batch_invariant=self._keeps_bits(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        unmasked = custom_mask is packed_custom_mask is prefix_len_ptr is token_pos_in_items_ptr is None
        if unmasked and self._refresh_tables(layer, max_token_per_sequence, *given, non_blocking=non_blocking):
            return
        last_page_len = table(paged_kv_last_page_len, "paged_kv_last_page_len")
        qo = self._query_rows(table(qo_indptr, "qo_indptr", last_page_len.shape[0] + 1))
        indptr, indices = table(paged_kv_indptr, "paged_kv_indptr"), table(paged_kv_indices, "paged_kv_indices")
        pages = self._pages((indptr, indices, last_page_len), page_size)
        mask = self._pack_mask(custom_mask, packed_custom_mask, qo, pages)
        items = self._items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, mask)
        longest = longest_request(qo, max_token_per_sequence, self._use_cuda_graph, self.device)
        self._commit(layer, qo, pages, mask, items, longest, non_blocking)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        sinks: Tensor | None = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk]; rows beyond are padding, their output is 0.
            lse_base: "log2" or "ln"; lse_layout: "NH" for [tokens, heads] or "HN" for [heads, tokens].

        The other arguments, results and errors are those of `BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        if not (kv_cache_sf is skip_softmax_threshold_scale_factor is use_fp16_softmax is uses_spcompress is None):
            refuse(kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
            refuse(use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
        if args or self._sink_by_position:
            q_scale, k_scale, v_scale, sm_scale, sinks, return_lse = by_position(
                args, self._sink_by_position, q_scale, k_scale, v_scale, sm_scale, sinks, return_lse
            )
        options = None
        no_overrides = q_scale is k_scale is v_scale is window_left is logits_soft_cap is sm_scale is None
        if not (no_overrides and lse_base == "log2" and lse_layout == "NH"):
            options = q_scale, k_scale, v_scale, window_left, logits_soft_cap, sm_scale, lse_base, lse_layout
        plan = self.require_plan()
        key, done = plan.repeat(q, paged_kv_cache, (out, lse, sinks), return_lse, options)
        if done is not None:
            return done
        k, v = self._split_cache(paged_kv_cache)
        given = RunArgs(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, sinks=sinks, out=out, lse=lse, return_lse=return_lse, lse_base=lse_base,
            lse_layout=lse_layout,
        )  # fmt: skip
        return plan.run(q, k, v, given, key)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int | None = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Deprecated: `run`, with what the layer fixes given again; these values replace the plan's."""
        self._replan(
            causal=causal and self.require_plan().mask is None,
            pos_encoding=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Scale | None = None,
    scale_k: Scale | None = None,
    scale_v: Scale | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int | None = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    *,
    window_right: int | None = -1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one request's query tokens over its keys and values.

    Args:
        q: [q_len, num_qo_heads, head_dim_qk].
        k, v: NHD [kv_len, num_kv_heads, head_dim] or HND [num_kv_heads, kv_len, head_dim].
        scale_q, scale_k, scale_v: factors of what is stored, as numbers or one per head; k_scale and v_scale multiply
            the last two.
        o_dtype: dtype of the output, q's by default.
        custom_mask: bool or integers [q_len, kv_len]; packed_custom_mask: uint8 [ceil(q_len * kv_len / 8)].

    The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.

    Returns:
        out [q_len, num_qo_heads, head_dim_vo], or (out, lse) with lse float32 [q_len, num_qo_heads], base 2.

    Raises:
        ValueError: an argument that does not fit, named with its value and what is allowed.
    """
    refuse(kv_cache_sf=kv_cache_sf)
    check_layout(kv_layout)
    check_tensors(q=q)
    k, v = as_nhd(k, kv_layout, "k"), as_nhd(v, kv_layout, "v")
    check(q.ndim == 3, "q.shape", list(q.shape), "[q_len, num_qo_heads, head_dim]")
    scales = (
        as_scale(scale_q, "scale_q", q.shape[1]),
        as_scale(scale_k, "scale_k", k.shape[1]) * as_scale(k_scale, "k_scale", k.shape[1]),
        as_scale(scale_v, "scale_v", k.shape[1]) * as_scale(v_scale, "v_scale", k.shape[1]),
    )
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype if o_dtype is None else o_dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    attend_one(
        out,
        lse,
        q,
        k,
        v,
        custom_mask,
        packed_custom_mask,
        scales,
        causal=causal,
        pos_encoding=pos_encoding_mode,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        batch_invariant=env_flag("QUIRE_BATCH_INVARIANT"),
        backend=canonical(backend),
    )
    return out if lse is None else (out, lse)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
