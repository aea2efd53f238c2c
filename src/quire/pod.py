"""Attention of prefills and decodes in one call.

Names, parameters and meanings are those of `flashinfer.pod`. Here a call launches the decodes, then the prefills, on
the current stream. On Hopper GPUs the kernels of both take all registers of every multiprocessor, so that on two
streams, too, one would wait for the other. Requests with one cache are computed in one launch, as one batch of
`quire.attention.BatchAttention` or `quire.prefill.BatchPrefillWithPagedKVCacheWrapper`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import table
from quire.definition.tensors import check_cache, check_tensors
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from quire.wrappers.arguments import DType, Scale, refuse
from quire.wrappers.composite import CompositeWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper(CompositeWrapper):
    """Attention of one prefill over contiguous keys and values, and of a batch of decodes over a paged cache.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph: for the decodes, as in `BatchDecodeWithPagedKVCacheWrapper`.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: likewise.
        jit_args: refused unless None.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: Any = None,
    ) -> None:
        refuse(jit_args=jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        self._wrappers, self._kv_layout = (self._decode,), kv_layout

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied to fixed buffers, with a fixed batch size."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must be on the wrapper's device."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int | None = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Record the page tables and the layer of the decodes, with the arguments and errors of
        `BatchDecodeWithPagedKVCacheWrapper.plan`.
        """
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, data_type=data_type,
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, q_data_type=q_data_type, sm_scale=sm_scale,
            kv_data_type=kv_data_type, rope_scale=rope_scale, rope_theta=rope_theta, non_blocking=non_blocking,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: Tensor | tuple[Tensor, Tensor],
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int | None = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str | None = None,
        pos_encoding_mode_d: str | None = None,
        sm_scale_d: float | None = None,
        window_left_d: int | None = None,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q_p: [q_len, num_qo_heads, head_dim]; k_p, v_p: NHD [kv_len, num_kv_heads, head_dim] or HND [num_kv_heads,
                kv_len, head_dim]; the other arguments that end in _p as in `single_prefill_with_kv_cache`.
            q_d, paged_kv_cache_d, q_scale, k_scale, v_scale: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
            kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: None, or the
                planned value.
            custom_mask_d, packed_custom_mask_d: refused unless None.
            causal_d, use_fp16_qk_reduction, enable_pdl: accepted, without effect: the query of a decode is the last of
                its tokens, and accumulation is float32.
            return_lse_p, return_lse_d: accepted, without effect: as in FlashInfer, only the outputs are returned.

        Returns:
            (out_p, out_d), [q_len, num_qo_heads, head_dim] and [batch_size, num_qo_heads, head_dim].

        Raises:
            RuntimeError: nothing has been planned.
            ValueError: a tensor that does not fit, a mask for the decodes, or a setting that differs from the plan.
        """
        refuse(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        spec = self._decode.require_plan().spec
        for name, value, planned in (
            ("kv_layout_d", kv_layout_d, self._kv_layout),
            ("pos_encoding_mode_d", pos_encoding_mode_d, spec.pos_encoding),
            ("sm_scale_d", sm_scale_d, spec.sm_scale),
            ("window_left_d", window_left_d, spec.mask.window_left),
            ("rope_scale_d", rope_scale_d, spec.rope_scale),
            ("rope_theta_d", rope_theta_d, spec.rope_theta),
        ):
            # Programs compute scales in other ways, whose results differ in the last bit.
            is_equal = value == planned or (
                isinstance(value, float) and math.isclose(value, float(planned), rel_tol=1e-6)
            )
            if value is not None and not is_equal:
                raise ValueError(f"{name} = {value!r} differs from the value planned, {planned!r}")
        check_tensors(q_p=q_p, k_p=k_p, v_p=v_p, q_d=q_d)
        check_cache(paged_kv_cache_d, "paged_kv_cache_d")
        out_d = self._decode.run(q_d, paged_kv_cache_d, q_scale, k_scale, v_scale)
        out_p = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
            kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p,
            window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p,
        )  # fmt: skip
        assert isinstance(out_p, Tensor)
        assert isinstance(out_d, Tensor)
        return out_p, out_d


class BatchPODWithPagedKVCacheWrapper(CompositeWrapper):
    """Attention of a batch of prefills and of a batch of decodes, both over paged caches.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._wrappers = (self._prefill, self._decode)
        self._masks: tuple[Tensor | None, Tensor | None] = (None, None)
        self._planned_as: tuple[Any, ...] = (False, None, None)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: this wrapper takes no buffers for its plans."""
        return False

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int | None = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Record the query layouts and page tables of the prefills (_p) and of the decodes (_d), and the layer of both.

        Arguments and errors are those of `BatchPrefillWithPagedKVCacheWrapper.plan`; `data_type` is an older name of
        both dtypes. Decodes are not causal: all query tokens of a decode see all of its keys.
        """
        qo_indptr_p, kv_indptr_p = table(qo_indptr_p, "qo_indptr_p"), table(kv_indptr_p, "kv_indptr_p")
        kv_indices_p, last_page_len_p = table(kv_indices_p, "kv_indices_p"), table(last_page_len_p, "last_page_len_p")
        qo_indptr_d, kv_indptr_d = table(qo_indptr_d, "qo_indptr_d"), table(kv_indptr_d, "kv_indptr_d")
        kv_indices_d, last_page_len_d = table(kv_indices_d, "kv_indices_d"), table(last_page_len_d, "last_page_len_d")
        if data_type is not None:
            q_data_type = data_type if q_data_type in (None, "float16") else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        layer: dict[str, Any] = {
            "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim_qk": head_dim, "page_size": page_size,
            "pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "q_data_type": q_data_type or "float16",
            "kv_data_type": kv_data_type, "sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta,
            "non_blocking": non_blocking,
        }  # fmt: skip
        prefills = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p)
        self._plan_prefill = partial(self._prefill.plan, *prefills, **layer)
        # The next run probably has the same `causal_p` as the last one, and then needs no further plan.
        causal = self._planned_as[0]
        self._plan_prefill(causal=causal)
        self._masks, self._planned_as = (None, None), (causal, None, None)
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, **layer)

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: Tensor | tuple[Tensor, Tensor],
        q_d: Tensor,
        paged_kv_cache_d: Tensor | tuple[Tensor, Tensor],
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Tensor, Tensor] | tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Attention of one layer.

        Args:
            q_p: [qo_indptr_p[-1], num_qo_heads, head_dim].
            q_d: [qo_indptr_d[-1], num_qo_heads, head_dim].
            paged_kv_cache_p, paged_kv_cache_d: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            custom_mask_p, packed_custom_mask_p, causal_p: for the prefills, as in
                `BatchPrefillWithPagedKVCacheWrapper.plan`. `run` plans the prefills again if one of these is another
                object than in the last run, or if torch's version counter of a mask has changed. Torch does not count
                changes in inference mode, nor by kernels of other libraries: after such changes, call `plan` again.
            q_scale, k_scale, v_scale: for the decodes, as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            return_lse: whether to return the LSE, too.
            use_fp16_qk_reduction, enable_pdl: accepted, without effect: accumulation is float32.

        Returns:
            (out_p, out_d), of the shapes of q_p and q_d, or ((out_p, out_d), (lse_p, lse_d)) with the LSE in base 2.

        Raises:
            RuntimeError: nothing has been planned.
            ValueError: a tensor that does not fit the plan.
        """
        check_tensors(q_p=q_p, q_d=q_d)
        check_cache(paged_kv_cache_p, "paged_kv_cache_p")
        check_cache(paged_kv_cache_d, "paged_kv_cache_d")
        decodes = self._decode.run(q_d, paged_kv_cache_d, q_scale, k_scale, v_scale, return_lse=return_lse)
        masks = custom_mask_p, packed_custom_mask_p
        planned_as = (causal_p, *(_version(x) for x in masks))
        if planned_as != self._planned_as or any(x is not y for x, y in zip(masks, self._masks, strict=True)):
            self._plan_prefill(causal=causal_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p)
            self._masks, self._planned_as = masks, planned_as
        prefills = self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        if isinstance(prefills, tuple) and isinstance(decodes, tuple):
            return (prefills[0], decodes[0]), (prefills[1], decodes[1])
        return prefills, decodes  # type: ignore[return-value]


def _version(mask: Tensor | None) -> int | None:
    """The number of changes of a mask in place; None in inference mode, where torch does not count them."""
    return None if mask is None or mask.is_inference() else mask._version
