"""The attention backend of pymllm: `FlashInferAttnBackend` over a pool with one slot per token.

Names, parameters and meanings are those of `pymllm.layers.attention.flashinfer_backend`. Beyond it: layers' windows are
right in every mode, cross-attention, target-verify with trees of drafted tokens, sinks, and caches in fp8.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.cascade import merge_state
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import table
from quire.definition.spec import FLOATS8
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.serving import _radix as radix
from quire.serving._forward_batch import (
    AttentionBackend,
    ForwardBatch,
    ForwardMode,
    KVPool,
    RadixAttention,
    ReqToTokenPool,
    VerifyInput,
)
from quire.serving._indices import (
    DecodeMetadata,
    ExtendStep,
    IndicesUpdaterDecode,
    IndicesUpdaterPrefill,
    PrefillMetadata,
    Slots,
    WrapperDispatch,
)
from quire.serving.base import GraphBuffers, Heads, quantize, workspace
from quire.wrappers.arguments import refuse

__all__ = [
    "AttentionBackend",
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "ForwardBatch",
    "ForwardMode",
    "KVPool",
    "PrefillMetadata",
    "RadixAttention",
    "ReqToTokenPool",
    "VerifyInput",
    "WrapperDispatch",
    "logger",
    "should_use_tensor_core",
]

logger = logging.getLogger(__name__)
WORKSPACE = 128 << 20  # bytes


def should_use_tensor_core(kv_cache_dtype: torch.dtype, num_attention_heads: int, num_kv_heads: int) -> bool:
    """Whether FlashInfer would decode on tensor cores: with an fp8 cache, and with one of 16 bits where at least four
    query heads share a key head. Quire's kernels choose for themselves.
    """
    if kv_cache_dtype in FLOATS8:
        return True
    return kv_cache_dtype in (torch.float16, torch.bfloat16) and num_attention_heads // num_kv_heads >= 4


class FlashInferAttnBackend(AttentionBackend):
    """Attention over a pool of keys and values with one slot per token.

    Once per batch `init_forward_metadata`, then once per layer `forward`, which writes new keys and values to the pool
    (unless save_kv_cache is False) and attends. One plan serves all layers; each has its own scale, window and cap.
    Nothing waits for the device where a batch carries the host's lengths.

    Args:
        num_heads, num_kv_heads: query and key heads on this device.
        head_dim: size of a query and key head.
        kv_cache_dtype, q_dtype: of the pool, and of queries and outputs.
        max_context_len: tokens that a request may have.
        req_to_token: int32 [max_reqs, at least max_context_len], the slots of each request's tokens.
        device: where everything lies.
        max_req_pool_size: requests that captured graphs may have, at most.
        sliding_window_size: not None: some layers have a window, and have wrappers of their own.
        skip_prefill: only decode: there are no wrappers for anything else.
        kv_indptr_buf, kv_last_page_len_buf: int32 [max_req_pool_size + 1] and [max_req_pool_size], shared with others
            who plan in turn; only where there is one wrapper of a kind.
        init_new_workspace: have a workspace of one's own.
        v_head_dim: size of a value head, by default head_dim.
        cross_attention: some layers attend to an encoder's tokens, whose slots stand first in a request's row.

    Attributes:
        dispatch_reason: why there are two wrappers of a kind, or None.
        forward_metadata: of the batch.
        decode_cuda_graph_metadata, prefill_cuda_graph_metadata: by batch size, of the graphs captured for decode and
            for target-verify.
        kv_indptr, kv_last_page_len, cuda_graph_kv_indices: tables that graphs read.

    Raises:
        ValueError: arguments that do not fit together.
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
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
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
        """Prepare a batch (see `ForwardBatch`), for which the layers then call `forward`.

        Raises:
            ValueError: tables that do not fit each other, or lengths that do not fit req_to_token.
            RuntimeError: a prefill, with skip_prefill.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        encoder = (getattr(batch, "encoder_lens", None), getattr(batch, "encoder_lens_cpu", None))
        lengths = (batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum)
        if mode.is_decode_or_idle():
            if not mode.is_idle():
                self.indices_updater_decode.update(*lengths, self.decode_wrappers, *encoder)
            self.forward_metadata = DecodeMetadata(self.decode_wrappers, len(batch.seq_lens))
            return
        updater = self._prefill_updater()
        if radix.verifies(mode):
            if batch.spec_info is None:
                raise ValueError("spec_info is None: target-verify needs to know how many tokens are drafted")
            drafted, mask = batch.spec_info.draft_token_num, getattr(batch.spec_info, "custom_mask", None)
            metadata = PrefillMetadata(self.prefill_wrappers_paged, False, False, len(batch.seq_lens) * drafted)
            updater.verify(metadata, *lengths, drafted, mask, *encoder)
        else:
            metadata = updater.extend(batch, self.prefill_wrappers_paged, self.prefill_wrapper_ragged)
        self.forward_metadata = metadata

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer, one new token per request, over all tokens in the pool.

        Args:
            q: [tokens, heads * head_dim], or [tokens, heads, head_dim].
            k, v: of the new tokens, alike; None: the pool has them.
            layer: whose attention it is.
            forward_batch: the batch that has been prepared.
            save_kv_cache: write k and v to the pool; False: it has them.
            sinks: [heads], a logit per head that joins the softmax's denominator.

        Returns:
            [tokens, heads * v_head_dim].

        Raises:
            ValueError: tensors, slots, a layer or a pool that do not fit.
            RuntimeError: the batch has not been prepared.
        """
        refuse(**kwargs)
        metadata = self._metadata(DecodeMetadata)
        q, k, v = radix.by_heads(q, k, v, layer, self.heads)
        if len(q) != metadata.num_tokens:
            raise ValueError(f"q has {len(q)} tokens: the batch has {metadata.num_tokens}")
        cache = self._cache(layer, forward_batch)
        wrapper = metadata.decode_wrappers[self._get_wrapper_idx(layer)]
        if k is not None and v is not None and save_kv_cache:
            self._save(k, v, cache, layer, forward_batch)
        return wrapper.run(q, radix.pages(cache), sinks=sinks, **radix.options(layer), **radix.scales(layer)).flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer, any number of new tokens per request.

        Without a prefix it goes over k and v alone; with one, in one pass over all tokens in the pool, if k and v are
        written to it. If they are not (save_kv_cache=False) it goes over k and v and over the prefix in the pool, and
        merges; windows then need extend_prefix_lens_cpu and extend_seq_lens_cpu, or it waits for the device.

        The arguments, results and errors are those of `forward_decode`; rows of q beyond the requests' are padding,
        whose output is 0. In target-verify, a window counts rows of the draft, whatever its mask.
        """
        refuse(**kwargs)
        metadata = self._metadata(PrefillMetadata)
        q, k, v = radix.by_heads(q, k, v, layer, self.heads)
        rows = k is not None and metadata.use_ragged and not layer.is_cross_attention
        if len(q) < metadata.num_tokens:
            raise ValueError(f"q has {len(q)} tokens: the batch has {metadata.num_tokens} new ones")
        if rows and k is not None and len(k) != len(q):
            raise ValueError(f"k has {len(k)} tokens: q has {len(q)}")
        only_rows = rows and metadata.extend_no_prefix
        if radix.encoder_only(layer):
            save_kv_cache = False
            if not only_rows:
                raise ValueError(f"layer {layer.layer_id} is encoder-only: it needs k and v, and no request a prefix")
        causal, options = radix.causal(layer, forward_batch), {"sinks": sinks, **radix.options(layer)}
        index = self._get_wrapper_idx(layer)
        if only_rows and not save_kv_cache:
            return metadata.step.ragged(causal).run(q, k, v, **options).flatten(1)
        cache = self._cache(layer, forward_batch)
        if rows and not only_rows and not save_kv_cache:
            return self._merged(metadata.step, q, k, v, cache, layer, options).flatten(1)
        if only_rows:
            wrapper = metadata.step.ragged(causal)
        else:  # planned before anything is written: tables that do not fit are found here
            wrapper = metadata.step.paged(index) if metadata.step else metadata.prefill_wrappers[index]
        if k is not None and save_kv_cache:
            self._save(k, v, cache, layer, forward_batch)
        if only_rows:
            return wrapper.run(q, k, v, **options).flatten(1)
        return wrapper.run(q, radix.pages(cache), **options, **radix.scales(layer)).flatten(1)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that fill a captured batch up."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None) -> None:
        """Allocate what captured graphs read.

        Args:
            max_bs: requests of a graph, at most; max_num_tokens: its tokens, at most.
            kv_indices_buf: int32 [slots of all requests together, at most], for the first of the wrappers.
        """
        room = len(self.kv_last_page_len)
        if not 0 < max_bs <= room:
            raise ValueError(f"max_bs = {max_bs}: it must be 1 to max_req_pool_size = {room}")
        if max_num_tokens < max_bs:
            raise ValueError(f"max_num_tokens = {max_num_tokens}: {max_bs} requests have at least as many")
        width = self.req_to_token.shape[1]
        given = [] if kv_indices_buf is None else [kv_indices_buf]
        more = (self._int32(max_bs * width) for _ in range(len(given), self.num_wrappers))
        self.cuda_graph_kv_indices = [*given, *more]
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
        """Prepare the capture of a graph, of decode or of target-verify.

        Args:
            bs, num_tokens: requests and tokens of the graph; as many tokens for each request.
            req_pool_indices, seq_lens: [bs], of any batch that may be computed.
            custom_mask: of target-verify, see `VerifyInput`; a graph captured with one is replayed with one.
            encoder_lens: [bs], for cross-attention.

        Raises:
            ValueError: another mode, or sizes beyond those of `init_cuda_graph_state`.
            RuntimeError: `init_cuda_graph_state` has not been called.
        """
        if not self._graph_buffers:
            raise RuntimeError("init_cuda_graph_state() must be called before graphs are captured")
        if bs < 1 or num_tokens % bs or num_tokens > self._max_num_tokens:
            most = self._max_num_tokens
            raise ValueError(f"num_tokens = {num_tokens}: it must be a multiple of bs = {bs}, and at most {most}")
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
        self._plan_graph(bs, metadata, (req_pool_indices, seq_lens, None, None), custom_mask, encoder_lens)
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
        """Prepare the replay of a graph.

        Args:
            bs: of the graph; req_pool_indices, seq_lens and seq_lens_cpu: [at least bs], requests that fill the batch
                up being any row, with a length of 1. seq_lens_sum counts these too.
            custom_mask, encoder_lens: as in the capture.

        Raises:
            ValueError: no such graph has been captured, or tables that do not fit it.
        """
        graphs: Mapping[int, Any] = self._graphs(forward_mode)
        if bs not in graphs:
            raise ValueError(f"bs = {bs}: graphs of this mode have been captured for {sorted(graphs) or 'none'}")
        lengths = (req_pool_indices, seq_lens, seq_lens_cpu, seq_lens_sum)
        self._plan_graph(bs, graphs[bs], lengths, custom_mask, encoder_lens)

    def _plan_graph(
        self, bs: int, metadata: Any, lengths: tuple[Any, ...], mask: Tensor | None, encoder_lens: Tensor | None
    ) -> None:
        """Plan a graph's wrappers, whose tables lie where the graph reads them."""
        rows, seq_lens, on_host, known = lengths
        given = {"req_pool_indices": rows, "seq_lens": seq_lens, "seq_lens_cpu": on_host, "encoder_lens": encoder_lens}
        cut: list[Any] = []
        for name, values in given.items():
            if values is not None and len(values) < bs:
                raise ValueError(f"{name} has {len(values)} requests: the graph has bs = {bs}")
            cut.append(None if values is None else values[:bs])
        rows, seq_lens, on_host, encoder_lens = cut
        if isinstance(metadata, DecodeMetadata):
            wrappers = metadata.decode_wrappers
            self.indices_updater_decode.update(rows, seq_lens, on_host, known, wrappers, encoder_lens)
        else:
            if metadata.masked != (mask is not None):
                with_or_without = "with" if metadata.masked else "without"
                raise ValueError(f"custom_mask: the graph for bs = {bs} was captured {with_or_without} one")
            drafted = metadata.num_tokens // bs
            self._prefill_updater().verify(
                metadata, rows, seq_lens, on_host, known, drafted, mask, encoder_lens=encoder_lens
            )
        self.forward_metadata = metadata

    def _graphs(self, mode: Any) -> dict[int, Any]:
        if mode.is_decode_or_idle():
            return self.decode_cuda_graph_metadata
        if radix.verifies(mode):
            return self.prefill_cuda_graph_metadata
        raise ValueError(f"forward_mode = {mode!r}: graphs are replayed for decode and target-verify only")

    def _get_wrapper_idx(self, layer: RadixAttention) -> int:
        """Which of the wrappers of a kind is a layer's."""
        if self.dispatch_reason is WrapperDispatch.SLIDING_WINDOW:
            return int(radix.window(layer) < 0)
        if layer.is_cross_attention and self.dispatch_reason is None:
            raise ValueError(f"layer {layer.layer_id} is cross-attention: the backend was made without")
        return int(layer.is_cross_attention)

    def _merged(
        self, step: ExtendStep, q: Tensor, k: Any, v: Any, cache: Any, layer: RadixAttention, options: dict[str, Any]
    ) -> Tensor:
        """Over rows and over the prefix in the pool; a sink joins the denominator of one of them."""
        own = step.ragged(True).run_return_lse(q, k, v, **options)
        options = {**options, "sinks": None, "window_left": -1}  # the prefix's mask knows where windows begin
        prefix = step.prefix(radix.window(layer))
        return merge_state(*own, *prefix.run_return_lse(q, radix.pages(cache), **options, **radix.scales(layer)))[0]

    def _metadata(self, kind: type) -> Any:
        if not isinstance(self.forward_metadata, kind):
            raise RuntimeError("init_forward_metadata() must be called with this batch before its layers run")
        return self.forward_metadata

    def _prefill_updater(self) -> IndicesUpdaterPrefill:
        if self.skip_prefill:
            raise RuntimeError("this backend was made with skip_prefill=True: it only decodes")
        return self.indices_updater_prefill

    def _pool(self, forward_batch: Any) -> Any:
        return forward_batch.token_to_kv_pool

    def _cache(self, layer: RadixAttention, forward_batch: Any) -> tuple[Tensor, Tensor]:
        return radix.buffers(self._pool(forward_batch), layer, self.heads, self.kv_cache_dtype)

    def _save(self, k: Any, v: Any, cache: tuple[Tensor, Tensor], layer: RadixAttention, batch: Any) -> None:
        self._write(layer, batch, radix.slots(batch, layer, len(k), len(cache[0])), k, v)

    def _write(self, layer: RadixAttention, batch: Any, slots: Tensor, k: Tensor, v: Tensor) -> None:
        scales = {name: 1.0 if x is None else x for name, x in radix.scales(layer).items()}
        k, v = (quantize(x, self.kv_cache_dtype, s) for x, s in zip((k, v), scales.values(), strict=True))
        self._pool(batch).set_kv_buffer(layer.layer_id, slots, k, v)

    def _check(self, cross_attention: bool) -> None:
        """Refuse a matrix of slots, heads and options that do not fit together."""
        if cross_attention and self.sliding_window_size is not None:
            raise ValueError("sliding_window_size and cross_attention do not go together")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}")
        slots = self.req_to_token
        if slots.ndim != 2 or slots.dtype != torch.int32 or slots.device != self.device:
            given = f"{slots.dtype} {list(slots.shape)} on {slots.device}"
            raise ValueError(f"req_to_token is {given}: it must be an int32 matrix on {self.device}")
        if slots.shape[1] < self.max_context_len:
            raise ValueError(f"req_to_token has {slots.shape[1]} columns: max_context_len is {self.max_context_len}")

    def _allocate(self, size: int, indptr: Tensor | None = None, last_page_len: Tensor | None = None) -> None:
        """The tables of graphs of up to `size` requests, but for their slots."""
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
