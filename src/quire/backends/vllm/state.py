"""The wrappers of a model runner and of its captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.backends.vllm.metadata import (
    PAD_SLOT_ID,
    FlashInferMetadata,
    PerLayerParameters,
    get_per_layer_parameters,
    model_fields,
    shared_or_neutral,
)
from quire.backends.vllm.protocols import ModelInput, VllmModelRunner
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.steps import GraphBuffers, workspace

FLASHINFER_WORKSPACE_BUFFER_SIZE = 256 * 1024 * 1024


class FlashInferState:
    """The wrappers of a model runner, or of one of its captured graphs.

    Decode graphs are captured once per batch size::

        with state.graph_capture(max_batch_size):
            metadata = state.graph_capture_get_metadata_for_batch(batch_size)
            ...  # capture a forward pass with this metadata, which is planned already
            graph_runner.attn_state = state.graph_clone(batch_size)

    `begin_forward` of a step with a captured batch size then writes the plan into the tables that the graph reads.
    """

    def __init__(self, runner: VllmModelRunner) -> None:
        self.runner = runner
        self._is_graph_capturing = False
        self._workspace_buffer: Tensor | None = None
        self._decode_wrapper: BatchDecodeWithPagedKVCacheWrapper | None = None
        self._prefill_wrapper: BatchPrefillWithPagedKVCacheWrapper | None = None
        self.global_hyperparameters: PerLayerParameters | None = None
        self.vllm_config = self.runner.vllm_config
        self._kv_cache_layout: str | None = None

    def get_kv_cache_layout(self) -> str:
        """NHD or HND, as the runner's backend had it at the first call."""
        if self._kv_cache_layout is None:
            in_order = self.runner.attn_backend.get_kv_cache_stride_order() == (0, 1, 2, 3, 4)
            self._kv_cache_layout = "NHD" if in_order else "HND"
        return self._kv_cache_layout

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """A context in which graphs of up to `max_batch_size` requests are captured; they share its buffers."""
        if self._is_graph_capturing:
            raise RuntimeError("graphs are being captured already")
        capacity = len(self.runner.graph_block_tables)
        if not 0 < max_batch_size <= capacity:
            raise ValueError(f"max_batch_size = {max_batch_size}: runner.graph_block_tables has {capacity} rows")
        num_pages = self.runner.cache_config.num_gpu_blocks
        if num_pages is None:
            raise ValueError("cache_config.num_gpu_blocks is missing: graphs need a cache")
        device = self.runner.device
        sizes = (max_batch_size + 1, max_batch_size * num_pages, max_batch_size)
        self._graph_buffers = GraphBuffers(*(torch.zeros(n, dtype=torch.int32, device=device) for n in sizes))
        self._graph_slot_mapping = torch.full((max_batch_size,), PAD_SLOT_ID, dtype=torch.int64, device=device)
        self._graph_block_tables = torch.from_numpy(self.runner.graph_block_tables).to(device)
        self._graph_decode_wrapper: Any = None
        self._is_graph_capturing = True
        try:
            yield
        finally:
            self._is_graph_capturing = False
            del self._graph_buffers, self._graph_slot_mapping, self._graph_block_tables, self._graph_decode_wrapper

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> FlashInferMetadata:
        """The planned metadata of `batch_size` decodes, for a capture; its tokens have slot -1.

        Raises:
            RuntimeError: the call is outside of `graph_capture`.
            ValueError: batch_size is larger than max_batch_size of `graph_capture`, or the model has an encoder.
        """
        self._check_capturing(True, "graph_capture_get_metadata_for_batch")
        _check_decoder(is_encoder_decoder_model)
        runner = self.runner
        self._graph_decode_wrapper = self._graph_buffers.decode(
            batch_size, self._get_workspace_buffer(), self.get_kv_cache_layout()
        )
        if self.global_hyperparameters is None:
            layers = get_per_layer_parameters(self.vllm_config)
            self.global_hyperparameters = shared_or_neutral(layers, runner.model_config.get_head_size())
        each = torch.arange(batch_size + 1, dtype=torch.int32)
        metadata: FlashInferMetadata = runner.attn_backend.make_metadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=batch_size,
            slot_mapping=self._graph_slot_mapping[:batch_size],
            multi_modal_placeholder_index_maps=None,
            max_prefill_seq_len=0,
            use_cuda_graph=True,
            decode_wrapper=self._graph_decode_wrapper,
            query_start_loc=each,
            block_tables=self._graph_block_tables,
            paged_kv_indptr=each,
            paged_kv_indices=torch.zeros(batch_size, dtype=torch.int32),
            paged_kv_last_page_len=torch.ones(batch_size, dtype=torch.int32),
            page_size=runner.block_size,
            **model_fields(runner, self.global_hyperparameters),
        )
        metadata.begin_forward()
        return metadata

    def graph_clone(self, batch_size: int) -> FlashInferState:
        """The state of the graph of `batch_size` requests that was captured last."""
        self._check_capturing(True, "graph_clone")
        wrapper = self._graph_decode_wrapper
        captured = None if wrapper is None else wrapper.require_plan().kv.batch_size
        if batch_size != captured:
            raise ValueError(f"batch_size = {batch_size}: the last metadata to capture was for {captured} requests")
        state = self.__class__(self.runner)
        state._workspace_buffer, state._kv_cache_layout = self._get_workspace_buffer(), self.get_kv_cache_layout()
        state._decode_wrapper, state._prefill_wrapper = self._graph_decode_wrapper, self._get_prefill_wrapper()
        return state

    def get_graph_input_buffers(
        self, attn_metadata: FlashInferMetadata, is_encoder_decoder_model: bool = False
    ) -> dict[str, Any]:
        """The tensors that a graph captured with this metadata reads, other than the tables of its wrapper.

        Raises:
            ValueError: the metadata has prefills.
        """
        _check_decoder(is_encoder_decoder_model)
        if attn_metadata.num_prefills:
            raise ValueError(f"num_prefills = {attn_metadata.num_prefills}: only decodes are captured in graphs")
        return {"slot_mapping": attn_metadata.slot_mapping}

    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Any], attn_metadata: FlashInferMetadata, is_encoder_decoder_model: bool = False
    ) -> None:
        """Fill the buffers for a replay of a step that `begin_forward` has planned.

        Raises:
            ValueError: the step has prefills, or is larger than the captured one.
        """
        slots = self.get_graph_input_buffers(attn_metadata, is_encoder_decoder_model)["slot_mapping"]
        buffer = input_buffers["slot_mapping"]
        if len(slots) > len(buffer):
            raise ValueError(f"the step has {len(slots)} tokens: the graph was captured for {len(buffer)}")
        buffer[len(slots) :] = PAD_SLOT_ID
        buffer[: len(slots)] = slots

    def begin_forward(self, model_input: ModelInput) -> None:
        """Set the wrappers of the step's metadata, those of a captured graph if the step uses one, and plan them.

        Raises:
            RuntimeError: the call is inside of `graph_capture`.
            ValueError: no graph was captured for this batch size, or tables contradict each other.
        """
        self._check_capturing(False, "begin_forward")
        metadata, state = model_input.attn_metadata, self
        if metadata.use_cuda_graph and metadata.num_prefills == 0:
            embedded = model_input.inputs_embeds is not None
            size = len(model_input.input_tokens if model_input.inputs_embeds is None else model_input.inputs_embeds)
            captured = self.runner.graph_runners[model_input.virtual_engine]
            if (size, embedded) not in captured:
                sizes = sorted(n for n, other in captured if other == embedded)
                raise ValueError(f"no graph was captured for {size} requests: {sizes} were")
            state = captured[size, embedded].attn_state
        metadata.prefill_wrapper, metadata.decode_wrapper = state._get_prefill_wrapper(), state._get_decode_wrapper()
        metadata.begin_forward()

    def _get_workspace_buffer(self) -> Tensor:
        if self._workspace_buffer is None:
            self._workspace_buffer = workspace(self.runner.device, FLASHINFER_WORKSPACE_BUFFER_SIZE)
        return self._workspace_buffer

    def _get_prefill_wrapper(self) -> BatchPrefillWithPagedKVCacheWrapper:
        if self._prefill_wrapper is None:
            layout = self.get_kv_cache_layout()
            self._prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(self._get_workspace_buffer(), layout)
        return self._prefill_wrapper

    def _get_decode_wrapper(self) -> BatchDecodeWithPagedKVCacheWrapper:
        if self._decode_wrapper is None:
            layout = self.get_kv_cache_layout()
            self._decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(self._get_workspace_buffer(), layout)
        return self._decode_wrapper

    def _check_capturing(self, expected: bool, name: str) -> None:
        if self._is_graph_capturing != expected:
            raise RuntimeError(f"{name} is for {'within' if expected else 'outside of'} graph_capture")


def _check_decoder(is_encoder_decoder_model: bool) -> None:
    if is_encoder_decoder_model:
        raise ValueError("is_encoder_decoder_model = True: only graphs of decoders are captured")
