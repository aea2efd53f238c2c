"""Prefill attention over rows stored one after another; public in `quire.prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import as_dtype
from quire.definition.pages import table
from quire.definition.spec import FLOATS8
from quire.definition.tensors import as_nhd, as_scale, as_slopes
from quire.wrappers.arguments import DType, RunArgs, Scale, by_position, layer_args, refuse
from quire.wrappers.buffers import check_buffers, fixed_batch
from quire.wrappers.plan import longest_request
from quire.wrappers.prefill import PrefillWrapper


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Prefill attention of a batch whose keys and values are rows stored one after another.

    Args:
        float_workspace_buffer, use_cuda_graph, backend, jit_args, jit_kwargs: as in
            `BatchPrefillWithPagedKVCacheWrapper`, as are the errors.
        qo_indptr_buf, custom_mask_buf, mask_indptr_buf: likewise.
        kv_layout: NHD, [tokens, heads, head_dim], or HND, [heads, tokens, head_dim], of k and v.
        kv_indptr_buf: int32 [batch_size + 1].
    """

    _kv_buffers = ("_kv_indptr_buf",)

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
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
            check_buffers("CUDA graph", "qo_indptr_buf", qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int | None = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        *,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        window_right: int | None = -1,
    ) -> None:
        """Record which rows of q, and of k and v, belong to which request, and the layer that runs share.

        Args:
            qo_indptr, kv_indptr: int32 or int64 [batch_size + 1], the requests' offsets in q, and in k and v.
            o_data_type: dtype of the output: q's by default, or bfloat16 where that is fp8.

        The other arguments and errors are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        if self._capture.captured:
            self._capture.begin_plan(type(self).__name__)
        if v_indptr is not None or o_indptr is not None:
            refuse(v_indptr=v_indptr, o_indptr=o_indptr)
        if o_data_type is None and as_dtype(q_data_type, "q_data_type") in FLOATS8:
            o_data_type = torch.bfloat16
        layer = layer_args(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            causal=bool(causal), window_left=window_left, window_right=window_right, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, pos_encoding=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
            slopes=as_slopes(alibi_slopes), batch_invariant=self._keeps_bits(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        unmasked = custom_mask is packed_custom_mask is prefix_len_ptr is token_pos_in_items_ptr is None
        if unmasked and self._refresh_tables(
            layer, max_token_per_sequence, qo_indptr, kv_indptr, non_blocking=non_blocking
        ):
            return
        qo_indptr = table(qo_indptr, "qo_indptr")
        qo, kv = self._query_rows(qo_indptr), self._rows(table(kv_indptr, "kv_indptr", qo_indptr.shape[0]))
        if self._use_cuda_graph:
            fixed_batch(self._kv_indptr_buf, "kv_indptr_buf", kv.batch_size, extra=1)
        mask = self._pack_mask(custom_mask, packed_custom_mask, qo, kv)
        items = self._items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, mask)
        longest = longest_request(qo, max_token_per_sequence, self._use_cuda_graph, self.device)
        self._commit(layer, qo, kv, mask, items, longest, non_blocking)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        return_lse: bool = False,
        o_scale: float | None = None,
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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            k, v: [kv_indptr[-1], num_kv_heads, head_dim_qk or head_dim_vo], or with heads first for HND.
            o_scale: what stored outputs are to be multiplied by: the output is divided by it.

        The other arguments, results and errors are those of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if kv_cache_sf is not None:
            refuse(kv_cache_sf=kv_cache_sf)
        if args or self._sink_by_position:
            q_scale, k_scale, v_scale, sm_scale, sinks, return_lse = by_position(
                args, self._sink_by_position, q_scale, k_scale, v_scale, sm_scale, sinks, return_lse
            )
        options = None
        no_overrides = q_scale is k_scale is v_scale is window_left is logits_soft_cap is sm_scale is o_scale is None
        if not (no_overrides and lse_base == "log2" and lse_layout == "NH"):
            options = q_scale, k_scale, v_scale, window_left, logits_soft_cap, sm_scale, lse_base, lse_layout, o_scale
        plan = self.require_plan()
        key, done = plan.repeat(q, (k, v), (out, lse, sinks), return_lse, options)
        if done is not None:
            return done
        k, v = as_nhd(k, self._kv_layout, "k"), as_nhd(v, self._kv_layout, "v")
        if o_scale is not None:
            heads = plan.spec.num_kv_heads
            v_scale = as_scale(v_scale, "v_scale", heads) / as_scale(o_scale, "o_scale", heads)
        given = RunArgs(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, sinks=sinks, out=out, lse=lse, return_lse=return_lse, lse_base=lse_base,
            lse_layout=lse_layout,
        )  # fmt: skip
        return plan.run(q, k, v, given, key)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)
