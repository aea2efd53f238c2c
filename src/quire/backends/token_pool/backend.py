"""The part of a token-pool backend that plans: eager batches, and batches of captured graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.backends.token_pool import radix
from quire.backends.token_pool.batch import AttentionBackend
from quire.backends.token_pool.slots import Requests, Slots, WrapperDispatch
from quire.backends.token_pool.updaters import (
    DecodeMetadata,
    IndicesUpdaterDecode,
    IndicesUpdaterPrefill,
    PrefillMetadata,
)
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import table
from quire.definition.spec import FLOATS8
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.steps import GraphBuffers, Heads, workspace

# This size counts bytes.
WORKSPACE = 128 << 20


def should_use_tensor_core(kv_cache_dtype: torch.dtype, num_attention_heads: int, num_kv_heads: int) -> bool:
    """Whether FlashInfer would decode on tensor cores: with an fp8 cache, or with 16-bit elements and at least four
    query heads per KV head. Quire's kernels do not depend on it.
    """
    if kv_cache_dtype in FLOATS8:
        return True
    return kv_cache_dtype in (torch.float16, torch.bfloat16) and num_attention_heads // num_kv_heads >= 4


class PlanningBackend(AttentionBackend):
    """Plans the wrappers of batches. `quire.backends.pymllm.FlashInferAttnBackend` documents the arguments, and adds
    the calls of layers.
    """

    updater_class = IndicesUpdaterPrefill

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_cache_dtype: torch.dtype,
        q_dtype: torch.dtype,
        max_context_len: int,
        req_to_token: Tensor,
        device: torch.device,
        max_req_pool_size: int,
        sliding_window_size: int | None = None,
        skip_prefill: bool = False,
        kv_indptr_buf: Tensor | None = None,
        kv_last_page_len_buf: Tensor | None = None,
        init_new_workspace: bool = False,
        *,
        v_head_dim: int | None = None,
        cross_attention: bool = False,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        self.kv_cache_dtype, self.q_dtype = kv_cache_dtype, q_dtype
        self.max_context_len, self.req_to_token = max_context_len, req_to_token
        self.device = torch.empty(0, device=device).device
        self.sliding_window_size, self.skip_prefill = sliding_window_size, skip_prefill
        self.heads = Heads(num_heads, num_kv_heads, head_dim, v_head_dim or head_dim)
        self.dispatch_reason = WrapperDispatch.CROSS_ATTENTION if cross_attention else None
        if sliding_window_size is not None:
            self.dispatch_reason = WrapperDispatch.SLIDING_WINDOW
        self.num_wrappers = 1 if self.dispatch_reason is None else 2
        self._check(cross_attention)
        self._allocate(max_req_pool_size, kv_indptr_buf, kv_last_page_len_buf)

        shared = workspace(self.device, WORKSPACE)
        self.workspace_buffer = torch.empty_like(shared) if init_new_workspace else shared
        self.decode_use_tensor_cores = should_use_tensor_core(kv_cache_dtype, num_heads, num_kv_heads)
        count = range(self.num_wrappers)
        self.decode_wrappers = [
            BatchDecodeWithPagedKVCacheWrapper(self.workspace_buffer, use_tensor_cores=self.decode_use_tensor_cores)
            for _ in count
        ]
        self.prefill_wrapper_ragged: BatchPrefillWithRaggedKVCacheWrapper | None = None
        self.prefill_wrappers_paged: list[BatchPrefillWithPagedKVCacheWrapper] = []
        slots = Slots(req_to_token, self.num_wrappers, self.dispatch_reason)
        self.indices_updater_decode = IndicesUpdaterDecode(slots, self.heads, q_dtype, kv_cache_dtype)
        if not skip_prefill:
            self.prefill_wrapper_ragged = BatchPrefillWithRaggedKVCacheWrapper(self.workspace_buffer)
            self.prefill_wrappers_paged = [BatchPrefillWithPagedKVCacheWrapper(self.workspace_buffer) for _ in count]
            self.indices_updater_prefill = self.updater_class(
                slots, self.heads, q_dtype, kv_cache_dtype, self.workspace_buffer
            )
        self.forward_metadata: DecodeMetadata | PrefillMetadata | None = None
        self.decode_cuda_graph_metadata: dict[int, DecodeMetadata] = {}
        self.prefill_cuda_graph_metadata: dict[int, PrefillMetadata] = {}
        self.cuda_graph_kv_indices: list[Tensor] = []
        self._graph_buffers: list[GraphBuffers] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch (see `ForwardBatch`), whose layers then call `forward`.

        Raises:
            ValueError: tables contradict each other, or a request is longer than its row of req_to_token.
            RuntimeError: the batch has prefills, and the backend was made with skip_prefill.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        requests = Requests.of(forward_batch)
        if mode.is_decode_or_idle():
            if not mode.is_idle():
                self.indices_updater_decode.update(requests, self.decode_wrappers)
            self.forward_metadata = DecodeMetadata(self.decode_wrappers, len(batch.seq_lens))
            return
        updater = self._prefill_updater()
        if radix.verifies(mode):
            if batch.spec_info is None:
                raise ValueError("spec_info is None: target-verify needs to know how many tokens are drafted")
            drafted, mask = batch.spec_info.draft_token_num, getattr(batch.spec_info, "custom_mask", None)
            metadata = PrefillMetadata(self.prefill_wrappers_paged, False, False, len(batch.seq_lens) * drafted)
            updater.verify(metadata, requests, drafted, mask)
        else:
            metadata = updater.extend(batch, self.prefill_wrappers_paged, self.prefill_wrapper_ragged)
        self.forward_metadata = metadata

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a batch to a captured batch size."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None) -> None:
        """Allocate the tables that captured graphs read.

        Args:
            max_bs, max_num_tokens: the largest number of requests and of tokens of a graph.
            kv_indices_buf: int32, room for the slots of all requests, for the first of the wrappers.
        """
        capacity = len(self.kv_last_page_len)
        if not 0 < max_bs <= capacity:
            raise ValueError(f"max_bs = {max_bs}: it must be 1 to max_req_pool_size = {capacity}")
        if max_num_tokens < max_bs:
            raise ValueError(f"max_num_tokens = {max_num_tokens}: {max_bs} requests have at least as many")
        width = self.req_to_token.shape[1]
        buffers = [] if kv_indices_buf is None else [kv_indices_buf]
        buffers += [self._int32(max_bs * width) for _ in range(len(buffers), self.num_wrappers)]
        self.cuda_graph_kv_indices = buffers
        tables: dict[str, Tensor] = {}
        if not self.skip_prefill:
            bits = max_num_tokens * width
            tables = {"qo_indptr": self._int32(max_bs + 1), "mask_indptr": self._int32(max_bs + 1)}
            tables["mask"] = torch.zeros(bits // 8 + max_bs, dtype=torch.uint8, device=self.device)
        last, self._max_num_tokens = self.kv_last_page_len[:max_bs], max_num_tokens
        self._graph_buffers = [
            GraphBuffers(indptr, indices, last, **tables)
            for indptr, indices in zip(self.kv_indptr, self.cuda_graph_kv_indices, strict=True)
        ]

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        forward_mode: Any,
        *,
        custom_mask: Tensor | None = None,
        encoder_lens: Tensor | None = None,
    ) -> None:
        """Plan for the capture of a graph of decode or target-verify.

        Args:
            bs, num_tokens: requests and tokens of the graph; num_tokens is a multiple of bs.
            req_pool_indices, seq_lens: [bs], of any valid batch.
            custom_mask: of target-verify, see `VerifyInput`; replays need a mask if and only if the capture had one.
            encoder_lens: [bs], for cross-attention.

        Raises:
            ValueError: the mode is another one, or the sizes are larger than those of `init_cuda_graph_state`.
            RuntimeError: `init_cuda_graph_state` has not been called.
        """
        if not self._graph_buffers:
            raise RuntimeError("init_cuda_graph_state() must be called before graphs are captured")
        if bs < 1 or num_tokens % bs or num_tokens > self._max_num_tokens:
            limit = self._max_num_tokens
            raise ValueError(f"num_tokens = {num_tokens}: it must be a multiple of bs = {bs}, and at most {limit}")
        if forward_mode.is_decode_or_idle():
            if num_tokens != bs:
                raise ValueError(f"num_tokens = {num_tokens}: decode has one token for each of bs = {bs} requests")
            options: Any = {"use_tensor_cores": self.decode_use_tensor_cores}
            wrappers = [buffers.decode(bs, self.workspace_buffer, **options) for buffers in self._graph_buffers]
            metadata: Any = DecodeMetadata(wrappers, bs)
        elif radix.verifies(forward_mode):
            self._prefill_updater()
            wrappers = [buffers.prefill(bs, self.workspace_buffer) for buffers in self._graph_buffers]
            metadata = PrefillMetadata(wrappers, False, False, num_tokens, custom_mask is not None)
        else:
            raise ValueError(f"forward_mode = {forward_mode!r}: graphs are captured for decode and target-verify only")
        self._plan_graph(bs, metadata, Requests(req_pool_indices, seq_lens, None, None, encoder_lens), custom_mask)
        self._graphs(forward_mode)[bs] = metadata

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int | None,
        forward_mode: Any,
        seq_lens_cpu: Tensor | None,
        *,
        custom_mask: Tensor | None = None,
        encoder_lens: Tensor | None = None,
    ) -> None:
        """Plan for the replay of a graph.

        Args:
            bs: the batch size of the graph.
            req_pool_indices, seq_lens, seq_lens_cpu: [at least bs]; padding has any row, and length 1.
            seq_lens_sum: the sum of the first bs lengths, including padding.
            custom_mask, encoder_lens: see `init_forward_metadata_capture_cuda_graph`.

        Raises:
            ValueError: no graph of this size and mode has been captured, or tables contradict it.
        """
        graphs: Mapping[int, Any] = self._graphs(forward_mode)
        if bs not in graphs:
            raise ValueError(f"bs = {bs}: graphs of this mode have been captured for {sorted(graphs) or 'none'}")
        requests = Requests(req_pool_indices, seq_lens, seq_lens_cpu, seq_lens_sum, encoder_lens)
        self._plan_graph(bs, graphs[bs], requests, custom_mask)

    def _plan_graph(self, bs: int, metadata: Any, requests: Requests, mask: Tensor | None) -> None:
        """Plan the wrappers of a graph, which write the tables that the graph reads."""
        requests = requests.first(bs)
        if isinstance(metadata, DecodeMetadata):
            self.indices_updater_decode.update(requests, metadata.decode_wrappers)
        else:
            if metadata.masked != (mask is not None):
                with_or_without = "with" if metadata.masked else "without"
                raise ValueError(f"custom_mask: the graph for bs = {bs} was captured {with_or_without} one")
            self._prefill_updater().verify(metadata, requests, metadata.num_tokens // bs, mask)
        self.forward_metadata = metadata

    def _graphs(self, mode: Any) -> dict[int, Any]:
        if mode.is_decode_or_idle():
            return self.decode_cuda_graph_metadata
        if radix.verifies(mode):
            return self.prefill_cuda_graph_metadata
        raise ValueError(f"forward_mode = {mode!r}: graphs are replayed for decode and target-verify only")

    def _prefill_updater(self) -> IndicesUpdaterPrefill:
        if self.skip_prefill:
            raise RuntimeError("this backend was made with skip_prefill=True: it only decodes")
        return self.indices_updater_prefill

    def _check(self, cross_attention: bool) -> None:
        """Refuse options, heads and a matrix of slots that contradict each other."""
        if cross_attention and self.sliding_window_size is not None:
            raise ValueError("sliding_window_size and cross_attention do not go together")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}")
        slots = self.req_to_token
        if slots.ndim != 2 or slots.dtype != torch.int32 or slots.device != self.device:
            actual = f"{slots.dtype} {list(slots.shape)} on {slots.device}"
            raise ValueError(f"req_to_token is {actual}: it must be an int32 matrix on {self.device}")
        if slots.shape[1] < self.max_context_len:
            raise ValueError(f"req_to_token has {slots.shape[1]} columns: max_context_len is {self.max_context_len}")

    def _allocate(self, size: int, indptr: Tensor | None = None, last_page_len: Tensor | None = None) -> None:
        """Allocate the tables of graphs of up to `size` requests, except for the indices."""
        if self.num_wrappers > 1 and (indptr is not None or last_page_len is not None):
            raise ValueError("kv_indptr_buf and kv_last_page_len_buf can't be shared by two wrappers")
        if size < 1:
            raise ValueError(f"max_req_pool_size = {size}: it must be positive")
        if indptr is not None and len(table(indptr, "kv_indptr_buf")) <= size:
            raise ValueError(f"kv_indptr_buf has {len(indptr)} entries: {size + 1} are needed")
        if last_page_len is not None and len(table(last_page_len, "kv_last_page_len_buf")) < size:
            raise ValueError(f"kv_last_page_len_buf has {len(last_page_len)} entries: {size} are needed")
        own = [self._int32(size + 1) for _ in range(self.num_wrappers)]
        self.kv_indptr = own if indptr is None else [indptr]
        self.kv_last_page_len = self._int32(size) + 1 if last_page_len is None else last_page_len

    def _int32(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)
