"""Multi-head latent attention (MLA, of DeepSeek's models), its projections absorbed: all heads share one latent cache.

Names, parameters and meanings are those of `flashinfer.mla`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.definition.checks import check
from quire.definition.mla_dimensions import (
    MLAHeadDimensions,
    MLALayerDimensions,
    deepseek_mla_dimensions,
    nope_mla_dimensions,
    smaller_mla_dimensions,
    supported_mla_head_dimensions,
    supported_mla_layer_dimensions,
)
from quire.kernels.latent import dequantize
from quire.wrappers.arguments import DType, RunArgs, layer_args, refuse
from quire.wrappers.mla import LatentWrapper, MLAPlanMetadata, split_parts
from quire.wrappers.plan import longest_request

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "deepseek_mla_dimensions",
    "nope_mla_dimensions",
    "smaller_mla_dimensions",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
]

# Arguments of `plan` that have no default.
_NEEDED = (
    *("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"),
    *("causal", "sm_scale", "q_data_type", "kv_data_type"),
)


class BatchMLAPagedAttentionWrapper(LatentWrapper):
    """MLA of a batch over a paged latent cache: `plan` once per batch, `run` once per layer.

    The cache has for each token a latent vector, ckv, and a rotated key, kpe, which all heads share. A query head has
    a part for each. Logits are ``sm_scale * (q_nope . ckv + q_pe . kpe)``, and ckv is also the value. Requests may have
    any number of query tokens.

    Args:
        float_workspace_buffer: any tensor on the device to compute on, or None (the first GPU, or the CPU).
        use_cuda_graph: keep the plan in the buffers below, so that captured graphs see later plans. The batch size is
            then fixed: the length of `kv_len_arr`.
        qo_indptr, kv_indptr: int32 [batch_size + 1].
        kv_indices: int32 [as many pages as a plan may have].
        kv_len_arr: int32 [batch_size].
        backend: "auto", a kernel family of Quire's, or any name of FlashInfer's (which all mean "auto").
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
        *,
        check: bool | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend, check, batch_invariant)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._lse_mode: str | None = None
        self._use_sinks = False
        # The arguments of the last plan besides its layer.
        self._options: tuple[Any, ...] = ()

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: DType | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Record which query rows and pages belong to which request, and the layer that runs share.

        Args:
            qo_indptr: int32 [batch_size + 1], the requests' offsets in q.
            kv_indptr: int32 [batch_size + 1], their offsets in kv_indices; entries beyond are ignored.
            kv_indices: int32, page ids. kv_len_arr: int32 [batch_size], the requests' lengths in tokens.
            cum_seq_lens_q: int32 [batch_size + 1], block_tables: int32 [batch_size, max_pages], seq_lens: int32
                [batch_size]: the second form of the tables. With use_cuda_graph, kv_indices must then have room for the
                whole of block_tables.
            metadata: an `MLAPlanMetadata`, in place of the tables.
            num_heads: query heads. head_dim_ckv, head_dim_kpe: sizes of the parts, 512 and 64; also 128 or 256 with
                64, and no second part (0).
            causal: query i of a request sees keys up to i + kv_len - q_len.
            q_data_type, kv_data_type, output_dtype: dtypes, or their names. kv_data_type is q_data_type, or fp8 with
                bfloat16 queries.
            lse_mode, use_sinks: the lse that `run` will return ("none", "base2" or "basee"), and whether it gets sinks.
                If the tables are qo_indptr to kv_len_arr, "none" lets `run` return any of the three.
            use_profiler, output_scale, scale_mode, skip_softmax: only their defaults; for an fp8 cache also
                scale_mode="kv-per-tensor", which changes nothing.
            max_q_len, query_layout, kv_cache_layout, enable_pdl: accepted, without effect.

        The tables may lie on the host or on the device; `plan` does not wait for the device. On a GPU every run reads
        what the tables, kv_len_arr among them, hold at that time; with use_cuda_graph, what the buffers hold that
        `plan` copied them to.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
            TypeError: an argument that is missing.
        """
        if self._capture.captured:
            self._capture.begin_plan(type(self).__name__)
        needed = (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type)
        if None in needed:
            missing = ", ".join(name for name, value in zip(_NEEDED, needed, strict=True) if value is None)
            raise TypeError(f"plan() needs {missing}")
        check(head_dim_ckv in (128, 256, 512), "head_dim_ckv", head_dim_ckv, "128, 256 or 512")
        check(head_dim_kpe in (0, 64), "head_dim_kpe", head_dim_kpe, "64, or 0 for none")
        layer = layer_args(
            num_qo_heads=num_heads, num_kv_heads=1, head_dim_qk=head_dim_ckv + head_dim_kpe,  # type: ignore[operator]
            head_dim_vo=head_dim_ckv, page_size=page_size, q_data_type=q_data_type, kv_data_type=kv_data_type,
            o_data_type=output_dtype, causal=causal, sm_scale=sm_scale, latent=head_dim_kpe != 0,
            batch_invariant=self.invariant,
        )  # fmt: skip
        flat = metadata is cum_seq_lens_q is block_tables is seq_lens is None
        options = flat, lse_mode, use_sinks, output_scale, scale_mode, use_profiler, skip_softmax
        like_the_last = flat and options == self._options
        if like_the_last and self._refresh_tables(layer, None, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            return
        self._check_options(layer, lse_mode, output_scale, scale_mode)
        refuse(use_profiler=use_profiler, skip_softmax=skip_softmax)
        given = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )
        if metadata is None:
            metadata = given
        elif any(x is not None for x in vars(given).values()):
            raise ValueError("metadata and tables are given: one of the two is allowed")
        qo, pages = self._tables(metadata, page_size)  # type: ignore[arg-type]
        self._commit(layer, qo, pages, max_q_len=longest_request(qo, None, self._use_cuda_graph, self.device))
        self._options, self._use_sinks = options, use_sinks
        self._lse_mode = None if flat and lse_mode == "none" else lse_mode

    begin_forward = plan

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q_nope: [tokens, num_heads, head_dim_ckv], and q_pe: [tokens, num_heads, head_dim_kpe]; rows beyond
                qo_indptr[-1] are padding, their output is 0.
            ckv_cache: [pages, page_size, head_dim_ckv], and kpe_cache: [pages, page_size, head_dim_kpe]. Any strides
                with the last one 1, so that both may be slices of one tensor.
            query, kv_cache: in their place, one tensor with both parts at the last dimension, or a pair.
            out: where to write, [tokens, num_heads, head_dim_ckv]. lse: float32 [tokens, num_heads].
            return_lse_base_on_e: whether lse is in base e, and not 2.
            ckv_scale, kpe_scale: what the numbers of an fp8 cache are to be multiplied by.
            ckv_scale_arr: float32 [pages, page_size, head_dim_ckv / 128], in place of ckv_scale, a factor for each
                token and 128 elements. The whole cache is then copied, as q_data_type, which is slow.
            sinks: float32 [num_heads], one more logit per head in the denominator.
            profiler_buffer, kv_len, page_table, o_scale, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale:
                must be None: they are for kernels that Quire does not have.

        Returns:
            out, or (out, lse) with return_lse. A given `lse` is also filled without return_lse.

        Raises:
            RuntimeError: nothing was planned.
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        plan = self._current
        if plan is None:
            raise RuntimeError(f"{type(self).__name__}: run() called before plan()")
        spec = plan.spec
        if query is not None or q_nope is None or q_pe is None:
            q_nope, q_pe = split_parts(query, (q_nope, q_pe), ("query", "q_nope", "q_pe"), spec.head_dim_vo)
        if kv_cache is not None or ckv_cache is None or kpe_cache is None:
            names = ("kv_cache", "ckv_cache", "kpe_cache")
            ckv_cache, kpe_cache = split_parts(kv_cache, (ckv_cache, kpe_cache), names, spec.head_dim_vo)
        if not (profiler_buffer is kv_len is page_table is o_scale is None):
            refuse(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale)
        if not (skip_softmax_threshold_scale_factor is bmm1_scale is bmm2_scale is None):
            refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
            refuse(bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
        key = options = None
        if ckv_scale_arr is None:
            if return_lse_base_on_e is not False or not (ckv_scale is kpe_scale is None):
                options = return_lse_base_on_e, ckv_scale, kpe_scale
            cache, pe = (ckv_cache, ckv_cache), (q_pe, kpe_cache) if spec.latent else (None, None)
            key, done = plan.repeat(q_nope, cache, (out, lse, sinks), return_lse, options, pe)
            if done is not None:
                return done
        self._check_promises(return_lse or lse is not None, return_lse_base_on_e, sinks)
        self._check_inputs(spec, q_nope, q_pe, ckv_cache, kpe_cache)
        self._check_scales(spec, ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        if ckv_scale_arr is not None and kpe_scale is not None:
            ckv_cache, kpe_cache = (
                dequantize(ckv_cache, ckv_scale_arr, spec.q_dtype),
                dequantize(kpe_cache, kpe_scale, spec.q_dtype),
            )
            spec = spec.replace(kv_dtype=spec.q_dtype)
        gain = 1.0 if ckv_scale is None or kpe_scale is None else kpe_scale / ckv_scale
        latent = (q_pe, kpe_cache.unsqueeze(2), gain) if spec.latent else None
        pages = ckv_cache.unsqueeze(2)
        given = RunArgs(
            k_scale=ckv_scale,
            v_scale=ckv_scale,
            sinks=sinks,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base="ln" if return_lse_base_on_e else "log2",
            latent=latent,
            spec=spec,
        )
        return plan.run(q_nope, pages, pages, given, key)
