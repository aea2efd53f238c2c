"""Decode over a paged latent cache, as FlashInfer had it before its wrapper for any queries: see `quire.decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.checks import as_dtype, check
from quire.definition.pages import table
from quire.definition.spec import FLOATS8
from quire.definition.tensors import check_tensors
from quire.wrappers.arguments import DType, LayerArgs, RunArgs
from quire.wrappers.buffers import check_buffers, fixed_batch
from quire.wrappers.mla import FP8_QUERIES, LatentWrapper
from quire.wrappers.planner import Planner

__all__ = ["BatchDecodeMlaWithPagedKVCacheWrapper"]

# The number of elements of a rotated key.
_KPE = 64


class BatchDecodeMlaWithPagedKVCacheWrapper(LatentWrapper):
    """Latent attention (MLA) of a batch whose requests have one query token each: `plan` once per batch, `run` once per
    layer. `BatchMLAPagedAttentionWrapper` computes the same for any number of query tokens.

    Args:
        float_workspace_buffer: any tensor on the device to compute on, or None (the first GPU, or the CPU).
        use_cuda_graph: keep the plan in the buffers below, so that captured graphs see later plans. The batch size is
            then fixed: the length of `paged_kv_last_page_len_buffer`.
        use_tensor_cores: accepted; kernels choose.
        paged_kv_indptr_buffer: int32 [batch_size + 1].
        paged_kv_indices_buffer: int32 [as many pages as a plan may have].
        paged_kv_last_page_len_buffer: int32 [batch_size].
        backend: "auto", a kernel family of Quire's, or any name of FlashInfer's (which all mean "auto").

    Raises:
        ValueError: a buffer that does not fit, or is missing with use_cuda_graph.
    """

    _kv_buffers, _copy_keys_to_buffers = Planner._kv_buffers, Planner._copy_keys_to_buffers

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        *,
        backend: str = "auto",
        check: bool | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend, check, batch_invariant)
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

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: DType = "float16",
        q_data_type: DType | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Record which pages belong to which request, and the layer that runs share.

        Args:
            indptr, indices, last_page_len, page_size, window_left, logits_soft_cap: as in
                `BatchDecodeWithPagedKVCacheWrapper.plan`.
            num_qo_heads: query heads; all share one latent cache.
            head_dim_compressed_kv: elements of a latent vector, 128, 256 or 512.
            sm_scale: the logits' factor.
            data_type: of the cache, and of queries where q_data_type is not given.
            rope_scale, rope_theta: accepted, and not used: q_pe and the cache's keys come rotated.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        if self._capture.captured:
            self._capture.begin_plan(type(self).__name__)
        dim = head_dim_compressed_kv
        check(dim in (128, 256, 512), "head_dim_compressed_kv", dim, "128, 256 or 512")
        last_page_len = table(last_page_len, "last_page_len")
        batch_size = len(last_page_len)
        if self._use_cuda_graph:
            fixed_batch(self._paged_kv_last_page_len_buf, "paged_kv_last_page_len_buffer", batch_size)
        kv_dtype = as_dtype(data_type, "data_type")
        q_dtype = kv_dtype if q_data_type is None else as_dtype(q_data_type, "q_data_type")
        check(kv_dtype not in FLOATS8 or q_dtype == torch.bfloat16, "q_data_type", q_dtype, FP8_QUERIES)
        tables = table(indptr, "indptr"), table(indices, "indices"), last_page_len
        layer = LayerArgs(
            num_qo_heads,
            num_kv_heads=1,
            head_dim_qk=dim + _KPE,
            head_dim_vo=dim,
            page_size=page_size,
            q_len=1,
            q_data_type=q_dtype,
            kv_data_type=kv_dtype,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            latent=True,
            batch_invariant=self.invariant,
        )
        self._commit(layer, self._equal_rows(batch_size, 1), self._pages(tables, page_size), max_q_len=1)

    begin_forward = plan

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        paged_ckv_cache: Tensor,
        paged_kpe_cache: Tensor,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q_nope: [batch_size, num_qo_heads, head_dim_compressed_kv], and q_pe: [batch_size, num_qo_heads, 64].
            paged_ckv_cache: [pages, page_size, head_dim_compressed_kv], and paged_kpe_cache: [pages, page_size, 64], of
                any strides with the last one 1, so that both may be slices of one tensor.
            q_scale, k_scale, v_scale: factors of the queries, of the keys in logits, and of the output.
            out: where to write, [batch_size, num_qo_heads, head_dim_compressed_kv].
            lse: float32 [batch_size, num_qo_heads].
            return_lse: also return the logarithms (base 2) of the softmax denominators.
            enable_pdl: accepted; kernels choose.

        Returns:
            out, or (out, lse).

        Raises:
            RuntimeError: nothing was planned.
            ValueError: a tensor that does not fit the plan.
        """
        plan, cache = self.require_plan(), (paged_ckv_cache, paged_ckv_cache)
        options = None if q_scale is k_scale is v_scale is None else (q_scale, k_scale, v_scale)
        key, done = plan.repeat(q_nope, cache, (out, lse, None), return_lse, options, (q_pe, paged_kpe_cache))
        if done is not None:
            return done
        check_tensors(paged_ckv_cache=paged_ckv_cache, paged_kpe_cache=paged_kpe_cache)
        self._check_inputs(plan.spec, q_nope, q_pe, paged_ckv_cache, paged_kpe_cache)
        rows = plan.kv.batch_size
        check(len(q_nope) == rows, "q_nope.shape", list(q_nope.shape), f"{rows} rows, one per request")
        pages = paged_ckv_cache.unsqueeze(2)
        latent = q_pe, paged_kpe_cache.unsqueeze(2), 1.0
        given = RunArgs(q_scale, k_scale, v_scale, out=out, lse=lse, return_lse=return_lse, latent=latent)
        return plan.run(q_nope, pages, pages, given, key)
