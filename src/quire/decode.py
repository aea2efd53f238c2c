"""Decode attention: one query token per request (or a few), over keys and values in pages.

Names, parameters and meanings are those of `flashinfer.decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire.definition.checks import as_dtype, check
from quire.definition.pages import table
from quire.definition.spec import FLOATS8
from quire.definition.tensors import as_nhd, as_slopes, check_layout, check_tensors
from quire.wrappers.arguments import DType, RunArgs, Scale, by_position, layer_args, refuse
from quire.wrappers.base import AttentionWrapper
from quire.wrappers.buffers import check_buffers, fitting, fixed_batch
from quire.wrappers.mla_decode import BatchDecodeMlaWithPagedKVCacheWrapper
from quire.wrappers.shared_prefix import SharedPrefix, check_shared_prefix, find_shared_prefix

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]


class BatchDecodeWithPagedKVCacheWrapper(AttentionWrapper):
    """Decode attention of a batch over a paged cache: `plan` once per batch, `run` once per layer.

    Args:
        float_workspace_buffer: any tensor on the device to compute on, or None (the first GPU, or the CPU).
        kv_layout: NHD or HND, see `run`.
        use_cuda_graph: keep the plan in the buffers below, so that captured graphs see later plans. The batch size is
            then fixed: the length of `paged_kv_last_page_len_buffer`.
        use_tensor_cores: accepted; kernels choose.
        paged_kv_indptr_buffer: int32 [batch_size + 1].
        paged_kv_indices_buffer: int32 [as many pages as a plan may have].
        paged_kv_last_page_len_buffer: int32 [batch_size].
        backend: "auto", a kernel family of Quire's, or any name of FlashInfer's (which all mean "auto").
        jit_args: None, or FlashInfer's for its variant AttentionSink; `run` then takes (q, cache, sink, sm_scale).
        jit_kwargs: accepted beside jit_args.

    Raises:
        ValueError: a buffer that does not fit, or is missing with use_cuda_graph; a variant other than AttentionSink.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        check: bool | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, check, batch_invariant, jit_args)
        refuse(jit_kwargs=jit_kwargs if jit_args is None else None)
        if use_cuda_graph:
            check_buffers(
                "cudagraph",
                "paged_kv_last_page_len_buffer",
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
        self.use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._qo_indptr_buf: Tensor | None = None
        self._shared: SharedPrefix | None = None

    @property
    def resolved_backend(self) -> str:
        """The constructor's `backend`, "fa2" for "auto". The property `backend` has Quire's name for the kernels."""
        return "fa2" if self._backend == "auto" else self._backend

    @property
    def shared_prefix(self) -> SharedPrefix | None:
        """What runs read once for several requests: its `groups`, `levels` and `tokens_saved`. None if requests are
        computed one by one: `plan` had no shared_prefix=True, it found no prefixes that save enough, or another plan
        has been assigned to `planned` since.
        """
        return self._shared if self._shared is not None and self._shared.whole is self._current else None

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
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        head_dim_vo: int | None = None,
        window_right: int = 0,
        is_causal: bool | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        shared_prefix: bool = False,
    ) -> None:
        """Record which pages belong to which request, and the layer that runs share.

        Args:
            indptr: int32 or int64 [batch_size + 1], the requests' offsets in `indices`; it may be a slice of a longer
                one. Tables of int64 are copied as int32, without waiting for a device.
            indices: int32 or int64 [at least indptr[-1]], page ids.
            last_page_len: int32 or int64 [batch_size], tokens in each request's last page, 1 to page_size.
            num_qo_heads, num_kv_heads, head_dim: shapes of q and of the cache; num_qo_heads is a multiple of
                num_kv_heads. head_dim_vo, if it differs, is the size of a value head.
            page_size: tokens in a page.
            pos_encoding_mode: NONE, ROPE_LLAMA or ALIBI (see `quire.definition.AttentionSpec`).
            window_left: keys to the left of the query that it still sees; -1 or None: all.
            logits_soft_cap: c > 0 turns logits x into c * tanh(x / c); None or 0: none.
            q_data_type, kv_data_type: dtypes or names; kv_data_type is q_data_type by default. `data_type`, an older
                argument, replaces those of the two that are not given; an fp8 data_type replaces kv_data_type alone.
            sm_scale: the logits' factor, 1/sqrt(head_dim) by default.
            rope_scale, rope_theta: of ROPE_LLAMA, 1 and 10,000 by default.
            non_blocking: copies to the device do not wait for the host.
            o_data_type: dtype of the output, q's by default.
            q_len_per_req: query tokens of every request; they are causal among themselves.
            block_tables, seq_lens: accepted: the pages say the same.
            fixed_split_size, disable_split_kv: either of them makes the results batch-invariant, as in FlashInfer; the
                kernels choose how keys are split.
            alibi_slopes: the slopes of ALIBI, one per query head, in place of the default ones. Reading a tensor waits
                for its device.
            shared_prefix: find neighbouring requests whose first pages are the same, and let runs read these pages
                once for all of them. Pages that only a part of these requests share beyond that form a further level,
                of at most four. The property `shared_prefix` says what was found. Only full pages before the query
                tokens are shared, at least 128 tokens of them, and only if a group saves reading 32 MiB more than its
                level writes. Tables are read here, which waits for their device, and must not change until the next
                plan. If `backend` has no kernels for the query tokens of a level, the first family that has them
                computes it. Runs that override the window read each request's own pages.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed. With shared_prefix also
                a window, a position encoding, use_cuda_graph, and every setting that asks for batch-invariant results.
        """
        if self._capture.captured:
            self._capture.begin_plan(type(self).__name__)
        if data_type is not None:
            kv_data_type = data_type if kv_data_type is None else kv_data_type
            if q_data_type is None or (q_data_type == "float16" and as_dtype(data_type, "data_type") not in FLOATS8):
                q_data_type = data_type
        layer = layer_args(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim, head_dim_vo=head_dim_vo,
            page_size=page_size, q_len=q_len_per_req, q_data_type=q_data_type or "float16", kv_data_type=kv_data_type,
            o_data_type=o_data_type, causal=is_causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, pos_encoding=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
            slopes=as_slopes(alibi_slopes), batch_invariant=self._keeps_bits(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        refuse(window_right=window_right or None)
        # Plans of equal layers reuse the query rows of the last plan.
        rows = None if self._current is None else self._current.qo.indptr
        given = (indptr, indices, last_page_len)
        if not shared_prefix and self._refresh_tables(layer, q_len_per_req, rows, *given, non_blocking=non_blocking):
            self._shared = None
            return
        self._check_q_len(q_len_per_req)
        if self._use_cuda_graph:
            batch_size = len(table(last_page_len, "last_page_len"))
            fixed_batch(self._paged_kv_last_page_len_buf, "paged_kv_last_page_len_buffer", batch_size)
        tables = table(indptr, "indptr"), table(indices, "indices"), table(last_page_len, "last_page_len")
        pages = self._pages(tables, page_size)
        if shared_prefix:
            check_shared_prefix(layer.spec(), self._use_cuda_graph, self.device)
        qo = self._equal_rows(pages.batch_size, q_len_per_req)
        self._shared = None
        self._commit(layer, qo, pages, max_q_len=q_len_per_req, non_blocking=non_blocking)
        if shared_prefix:
            self._shared = find_shared_prefix(self.require_plan(), tables, self._workspace)

    begin_forward = plan

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
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        enable_pdl: bool | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: a pair (k, v) of 4-D tensors, NHD [pages, page_size, num_kv_heads, head_dim] or HND [pages,
                num_kv_heads, page_size, head_dim]; or one 5-D tensor with k and v at dim 1. Any strides with the last
                one 1; k and v may differ in strides. With pages of one token, their dimension may be left out.
            args: q_scale, k_scale, v_scale and return_lse (or sink and sm_scale, with `jit_args` of AttentionSink).
            q_scale, k_scale, v_scale: factors of what is stored (for fp8): numbers, or tensors with one per head. Those
                given by position and by name are multiplied.
            return_lse: also return the logarithms (base 2) of the softmax denominators.
            out, lse: where to write, [tokens, num_qo_heads, head_dim_vo] and float32 [tokens, num_qo_heads].
            window_left, logits_soft_cap, sm_scale: this layer's, instead of the plan's.
            sinks: [num_qo_heads], a logit per head that joins the softmax's denominator.
            enable_pdl: accepted; kernels choose.

        Returns:
            out, or (out, lse).

        Raises:
            RuntimeError: nothing has been planned.
            ValueError: a tensor that does not fit the plan, or, in grad mode, one of q, k, v, out and lse that requires
                grad; sinks and scales are detached.
        """
        if not (kv_cache_sf is skip_softmax_threshold_scale_factor is None):
            refuse(kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if args or self._sink_by_position:
            q_scale, k_scale, v_scale, sm_scale, sinks, return_lse = by_position(
                args, self._sink_by_position, q_scale, k_scale, v_scale, sm_scale, sinks, return_lse
            )
        options = None
        if not (q_scale is k_scale is v_scale is window_left is logits_soft_cap is sm_scale is q_len_per_req is None):
            options = q_scale, k_scale, v_scale, window_left, logits_soft_cap, sm_scale, q_len_per_req
        plan = self.require_plan()
        key, done = plan.repeat(q, paged_kv_cache, (out, lse, sinks), return_lse, options)
        if done is not None:
            return done
        check_tensors(q=q)
        q_len, rows = plan.max_q_len, plan.qo.batch_size * plan.max_q_len
        check(q_len_per_req in (None, q_len), "q_len_per_req", q_len_per_req, lambda: f"{q_len}, planned")
        fits = q.ndim == 3 and q.shape[0] == rows
        check(fits, "q.shape", list(q.shape), lambda: f"{rows} tokens, batch size * q_len_per_req")
        k, v = self._split_cache(paged_kv_cache)
        given = RunArgs(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, sinks=sinks, out=out, lse=lse, return_lse=return_lse,
        )  # fmt: skip
        shared = self._shared
        if shared is not None and shared.whole is plan and (window_left is None or window_left < 0):
            return shared.run(plan, q, paged_kv_cache, k, v, given)
        return plan.run(q, k, v, given, key)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int | None = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Deprecated: `run`, with what the layer fixes given again; these values replace the plan's, and its shared
        prefixes are not used.
        """
        self._shared = None
        self._replan(
            pos_encoding=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True` and its buffers first.

    Args:
        workspace_buffer: its `float_workspace_buffer`.
        indptr_buffer: int32 [batch_size + 1].
        indices_buffer: int32 [as many pages as a plan may have].
        last_page_len_buffer: int32 [batch_size].
    """

    def __init__(
        self,
        workspace_buffer: Tensor | None,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
            backend=backend,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int | None = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan` that copies nothing in a CUDA-graph wrapper: the caller has written its
    buffers already, and only the sizes of the tables given here are read.

    Args:
        self: a wrapper; ``wrapper.plan = functools.partial(fast_decode_plan, wrapper)`` is how engines use this.
        global_override_indptr_cpu: accepted: no plan reads lengths on the host.

    The other arguments and errors are those of `plan`. The output's dtype is that of the previous plan.
    """
    o_data_type = None if self.planned is None else self.planned.spec.o_dtype
    if self.is_cuda_graph_enabled:
        held = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf)
        fixed_batch(held[2], "paged_kv_last_page_len_buffer", len(table(last_page_len, "last_page_len")))
        fitting(held[1], table(indices, "indices"), "paged_kv_indices_buffer")
        indptr, indices, last_page_len = (x for x in held if x is not None)
    type(self).plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type, data_type=data_type,
        sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta, non_blocking=non_blocking,
        fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req,
    )  # fmt: skip


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    window_left: int | None = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one query token over one request's keys and values.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim] or HND [num_kv_heads, kv_len, head_dim].

    The other arguments are those of `BatchDecodeWithPagedKVCacheWrapper`.

    Returns:
        out [num_qo_heads, head_dim_vo], or (out, lse) with lse float32 [num_qo_heads], base 2.
    """
    from quire.prefill import single_prefill_with_kv_cache

    check_tensors(q=q)
    check(q.ndim == 2, "q.shape", list(q.shape), "[num_qo_heads, head_dim]")
    check_layout(kv_layout)
    result = single_prefill_with_kv_cache(
        q[None],
        as_nhd(k, kv_layout, "k"),
        as_nhd(v, kv_layout, "v"),
        causal=True,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        return_lse=return_lse,
        backend=backend,
        scale_q=q_scale,
        scale_k=k_scale,
        scale_v=v_scale,
    )
    if isinstance(result, tuple):
        return result[0][0], result[1][0]
    return result[0]
