"""The attention backend of SGLang 0.5.23: the methods of its `AttentionBackend`, based on pymllm's backend.

SGLang itself is not needed: objects with the attributes of its model runner, batches and layers are accepted. A plugin
registers a factory, which SGLang calls with its runner:

    @register_attention_backend("quire")
    def make(runner):
        return FlashInferAttnBackend(runner)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from quire.backends import pymllm
from quire.backends.pymllm import should_use_tensor_core
from quire.backends.token_pool import radix
from quire.backends.token_pool.batch import ForwardMode, KVPool, RadixAttention
from quire.backends.token_pool.slots import WrapperDispatch
from quire.backends.token_pool.updaters import DecodeMetadata, IndicesUpdaterPrefill, PrefillMetadata

__all__ = [
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "ForwardMode",
    "KVPool",
    "ModelRunner",
    "PrefillMetadata",
    "RadixAttention",
    "WrapperDispatch",
    "should_use_tensor_core",
]


class ModelRunner(Protocol):
    """The attributes of SGLang's model runner that the backend reads.

    Attributes:
        device: the device of all tensors.
        dtype, kv_cache_dtype: the dtype of queries and outputs, and that of the pool.
        sliding_window_size: None: no layer has a window.
        req_to_token_pool: has `req_to_token`, int32 [max_reqs, max_context], and `size`, the most requests at once.
        token_to_kv_pool: has get_kv_buffer(layer_id) and set_kv_buffer(layer, loc, k, v). In an fp8 pool, k and v are
            fp8 already: SGLang's pools would divide the tensors of the caller in place, and not saturate.
        model_config: has num_attention_heads, get_num_kv_heads(tensor parallel size), head_dim, context_len, and
            optionally v_head_dim and is_encoder_decoder.
    """

    device: Any
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    sliding_window_size: int | None
    req_to_token_pool: Any
    token_to_kv_pool: Any
    model_config: Any


class _IndicesUpdaterPrefill(IndicesUpdaterPrefill):
    """Accepts masks in buffers that are longer than the masks, and masks that lack the requests of padding."""

    def sized(self, mask: Tensor, area: int | None) -> Tensor:
        if area is None or mask.numel() == area:
            return mask
        return torch.nn.functional.pad(mask.flatten()[:area], (0, max(area - mask.numel(), 0)))


class FlashInferAttnBackend(pymllm.FlashInferAttnBackend):
    """Attention for SGLang, eager and in graphs of decode and target-verify.

    Args:
        model_runner: see `ModelRunner`.
        skip_prefill, kv_indptr_buf, kv_last_page_len_buf, init_new_workspace: see `pymllm.FlashInferAttnBackend`.
        attn_tp_size: the number of devices that share the attention heads; by default the runner's attn_tp_size or
            tp_size, or 1.

    Attributes:
        data_type, kv_cache_dtype: the dtype of the pool.
        needs_cpu_seq_lens: True: seq_lens_cpu or seq_lens_sum are read, which avoids waiting for the device.
        attn_backend_list: None: this backend does not combine others.
        prefill_attention_backend_str, decode_attention_backend_str: the runner's names of this backend in each phase.
        extend_dummy_seqs_capped_by_req_pool: False: extend steps allocate tables for their own batch size.

    Raises:
        ValueError: the pool has separate slots for windows (start SGLang with --disable-hybrid-swa-memory), or pymllm's
            backend refuses an argument.
    """

    prefill_attention_backend_str: str | None = None
    decode_attention_backend_str: str | None = None
    needs_cpu_seq_lens = True
    attn_backend_list: list[Any] | None = None
    updater_class = _IndicesUpdaterPrefill
    extend_dummy_seqs_capped_by_req_pool = False

    def __init__(
        self,
        model_runner: ModelRunner,
        skip_prefill: bool = False,
        kv_indptr_buf: Tensor | None = None,
        kv_last_page_len_buf: Tensor | None = None,
        init_new_workspace: bool = False,
        *,
        attn_tp_size: int | None = None,
    ) -> None:
        runner, model = model_runner, model_runner.model_config
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        if hasattr(runner.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise ValueError("token_to_kv_pool gives windows slots of their own: use --disable-hybrid-swa-memory")
        devices = attn_tp_size or getattr(runner, "attn_tp_size", None) or getattr(runner, "tp_size", 1)
        super().__init__(
            num_heads=model.num_attention_heads // devices,
            num_kv_heads=model.get_num_kv_heads(devices),
            head_dim=model.head_dim,
            kv_cache_dtype=runner.kv_cache_dtype,
            q_dtype=runner.dtype,
            max_context_len=model.context_len,
            req_to_token=runner.req_to_token_pool.req_to_token,
            device=runner.device,
            max_req_pool_size=runner.req_to_token_pool.size,
            sliding_window_size=runner.sliding_window_size,
            skip_prefill=skip_prefill,
            kv_indptr_buf=kv_indptr_buf,
            kv_last_page_len_buf=kv_last_page_len_buf,
            init_new_workspace=init_new_workspace,
            v_head_dim=getattr(model, "v_head_dim", None),
            cross_attention=bool(getattr(model, "is_encoder_decoder", False)),
        )
        self.data_type = runner.kv_cache_dtype

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch that is computed without a graph."""
        _refuse_mode(forward_batch.forward_mode)
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan for the capture or the replay of a graph.

        Raises:
            ValueError: the mode is not decode, idle or target-verify, or no graph has this batch size.
        """
        batch, spec = forward_batch, getattr(forward_batch, "spec_info", None)
        _refuse_mode(batch.forward_mode)
        extras = {
            "custom_mask": getattr(spec, "custom_mask", None) if radix.verifies(batch.forward_mode) else None,
            "encoder_lens": getattr(batch, "encoder_lens", None),
        }
        bs, mode = batch.batch_size, batch.forward_mode
        rows, lengths = batch.req_pool_indices, batch.seq_lens
        if in_capture:
            tokens = batch.input_ids.numel()
            self.init_forward_metadata_capture_cuda_graph(bs, tokens, rows, lengths, mode, **extras)
        else:
            known, on_host = batch.seq_lens_sum, batch.seq_lens_cpu
            self.init_forward_metadata_replay_cuda_graph(bs, rows, lengths, known, mode, on_host, **extras)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: everything is planned before a graph runs."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None) -> None:
        """Allocate the tables that captured graphs read; max_bs may be larger than the pool of requests."""
        if max_bs > len(self.kv_last_page_len):
            self._allocate(max_bs)
        super().init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf)

    def support_triton(self) -> bool:
        """Whether SGLang may prepare batches with its Triton kernels."""
        return True

    def on_after_cuda_graph_warmup(self) -> None:
        """Do nothing: a warm-up does not change what is planned."""

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> None:
        """None: there is no sparse indexer."""

    def _pool(self, forward_batch: Any) -> Any:
        return self.token_to_kv_pool

    def _named(self, layer: RadixAttention) -> Any:
        return layer

    def _get_wrapper_idx(self, layer: RadixAttention) -> int:
        position, cap = getattr(layer, "pos_encoding_mode", "NONE"), getattr(layer, "logit_capping_method", "tanh")
        if position not in ("NONE", None) or (layer.logit_cap and cap != "tanh"):
            raise ValueError(
                f"layer {layer.layer_id} has pos_encoding_mode {position!r} and logit_capping_method {cap!r}: "
                "'NONE' and 'tanh' are supported"
            )
        return super()._get_wrapper_idx(layer)


def _refuse_mode(mode: Any) -> None:
    """Refuse modes that are neither decode, extend, mixed, idle nor target-verify."""
    for name in ("draft_extend", "draft_extend_v2", "dllm_extend"):
        if getattr(mode, f"is_{name}", bool)():
            raise ValueError(f"forward_mode = {mode!r}: {name} is not supported")
