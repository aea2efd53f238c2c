"""Attention of batches that mix prefills, chunks and decodes, planned at once; and with a sink.

Names, parameters and meanings are those of `flashinfer.attention`. The types that define a layer and a batch,
`AttentionSpec`, `PageTable`, `RaggedLayout` and `PackedMask`, can be imported from here too; they live in
`quire.definition`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import check, is_int
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec
from quire.definition.tensors import as_slopes, check_cache, check_optional
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.wrappers.arguments import DType, Scale, layer_args, refuse
from quire.wrappers.capture import CaptureGuard
from quire.wrappers.composite import CompositeWrapper

__all__ = [
    "AttentionSpec",
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BlockTableAttention",
    "PackedMask",
    "PageTable",
    "RaggedLayout",
]


class BatchAttention(CompositeWrapper):
    """Attention over a paged cache of a batch whose requests have any number of query tokens.

    Args:
        kv_layout: NHD or HND, as in `BatchPrefillWithPagedKVCacheWrapper`.
        device: where to compute; by default the first GPU, or the CPU where there is none.
    """

    def __init__(self, kv_layout: str = "NHD", device: str | torch.device | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device), kv_layout)
        self._wrappers = (self._wrapper,)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Record which query rows and pages belong to which request, and the layer that runs share.

        Args:
            qo_indptr: int32 or int64 [batch_size + 1], the requests' offsets in q.
            kv_indptr: int32 or int64 [batch_size + 1], the requests' offsets in kv_indices.
            kv_indices: int32 or int64 [at least kv_indptr[-1]], page ids.
            kv_len_arr: int32 or int64 [batch_size], the requests' lengths in tokens; pages beyond a length are not
                read.

        The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`. Never waits for a device.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed; use_profiler.
        """
        if use_profiler is not False:
            refuse(use_profiler=use_profiler)
        layer = layer_args(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            page_size=page_size, q_data_type=q_data_type, kv_data_type=kv_data_type, causal=bool(causal),
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, batch_invariant=self._wrapper.invariant,
        )  # fmt: skip
        self._wrapper._plan_lengths(layer, qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._logits_soft_cap = logits_soft_cap or 0.0

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted: k and v may differ in strides without any preparation."""
        check(variant == "independent", "variant", variant, "independent")

    def run(
        self,
        q: Tensor,
        kv_cache: Tensor | tuple[Tensor, Tensor],
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            kv_cache, out, lse, k_scale, v_scale: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            logits_soft_cap: replaces the planned soft cap, unless it is 0; only where the plan has a soft cap.

        Returns:
            (out, lse): [tokens, num_qo_heads, head_dim_vo] and float32 [tokens, num_qo_heads], base 2.

        Raises:
            RuntimeError: nothing has been planned.
            ValueError: a tensor that does not fit the plan, or a soft cap where none was planned.
        """
        if not (profiler_buffer is kv_cache_sf is None):
            refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        check_cache(kv_cache, "kv_cache")
        capped = logits_soft_cap > 0
        if capped:
            fits = getattr(self, "_logits_soft_cap", logits_soft_cap) > 0
            check(fits, "logits_soft_cap", logits_soft_cap, "0, as none was planned")
        result = self._wrapper.run(
            q,
            kv_cache,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=True,
            out=out,
            lse=lse,
            logits_soft_cap=logits_soft_cap if capped else None,
        )
        assert isinstance(result, tuple)
        return result


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose runs are given a sink.

    Args:
        pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left:
            accepted, without effect: `plan` gets the same arguments.

    The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper`.
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            backend=backend,
        )

    def run(  # type: ignore[override]
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        sink: Tensor,
        sm_scale: float | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            sink: [num_qo_heads], a logit per head that joins the softmax's denominator.
            sm_scale: the logits' factor, instead of the plan's.

        The other arguments, results and errors are those of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        check_optional(sink=sink)
        return super().run(q, paged_kv_cache, sinks=sink, sm_scale=sm_scale, **options)

    forward = run  # type: ignore[assignment]


class BlockTableAttention(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` over the block table of an engine, whose rows are the requests' pages.

    On a GPU, runs read the tensors of `plan` where they are. `plan` copies nothing, launches nothing and never waits,
    and a CUDA graph that captured a run sees what the tensors hold when it is replayed. The caller keeps them, and this
    wrapper, as long as the graph; later plans are free, and do not change it.

    Args:
        float_workspace_buffer, kv_layout, backend: as in `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        backend: str = "auto",
        *,
        check: bool | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, backend=backend, check=check, batch_invariant=batch_invariant
        )
        # No table belongs to a plan, so that no later plan can free one.
        self._capture = CaptureGuard(self.device, True)

    def plan(  # type: ignore[override]
        self,
        block_tables: Tensor,
        seq_lens: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        qo_indptr: Tensor | None = None,
        q_len_per_req: int = 1,
        max_q_len: int | None = None,
        head_dim_vo: int | None = None,
        causal: bool = True,
        window_left: int | None = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        window_right: int | None = -1,
    ) -> None:
        """Record which query rows and pages belong to which request, and the layer that runs share.

        Args:
            block_tables: int32 [batch_size, max_pages], page ids, with any row stride; entries beyond a request's
                length may be anything.
            seq_lens: int32 or uint32 [batch_size], the requests' lengths in tokens, with the new ones; 0: no request.
            qo_indptr: int32 [batch_size + 1], the requests' offsets in q; None: q_len_per_req tokens each.
            max_q_len: the most query tokens that a request has, in this plan and, for captured graphs, in any replay.
                It chooses the kernels; query tokens of longer requests may not be computed. None: it is read from
                qo_indptr if that lies on the host, and is otherwise unknown.

        The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        check(is_int(q_len_per_req) and q_len_per_req > 0, "q_len_per_req", q_len_per_req, "an integer of at least 1")
        layer = layer_args(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            page_size=page_size, q_len=q_len_per_req, q_data_type=q_data_type, kv_data_type=kv_data_type,
            o_data_type=o_data_type, causal=bool(causal), window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, slopes=as_slopes(alibi_slopes), pos_encoding="NONE" if alibi_slopes is None else "ALIBI",
            window_right=window_right, batch_invariant=self.invariant,
        )  # fmt: skip
        self._plan_block_tables(layer, block_tables, seq_lens, qo_indptr, max_q_len)
