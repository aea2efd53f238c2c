"""What `quire.serving.vllm` needs of vLLM's objects: whatever has these attributes will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


class AttentionLayer(Protocol):
    """A layer's scales of keys and values, which an fp8 cache is multiplied by: on the device, and as numbers."""

    _k_scale: Tensor
    _v_scale: Tensor
    _k_scale_float: float
    _v_scale_float: float


@runtime_checkable
class LayerImpl(Protocol):
    """What a layer asks of attention; sliding_window is (keys to the left, 0), or (-1, -1)."""

    scale: float
    sliding_window: tuple[int, int] | None
    logits_soft_cap: float | None


class CompilationConfig(Protocol):
    """static_forward_context: layers by name; those of attention have an `impl`."""

    static_forward_context: Mapping[str, Any]


class VllmConfig(Protocol):
    """The part of the configuration that knows the layers."""

    compilation_config: CompilationConfig


class ModelConfig(Protocol):
    """The model's dtype and heads; those of this process, where heads are spread over several."""

    dtype: torch.dtype

    def get_num_attention_heads(self, parallel_config: Any) -> int: ...

    def get_num_kv_heads(self, parallel_config: Any) -> int: ...

    def get_head_size(self) -> int: ...


class CacheConfig(Protocol):
    """num_gpu_blocks: of the cache; None before it has been measured."""

    num_gpu_blocks: int | None


class ModelRunner(Protocol):
    """Who runs the model.

    Attributes:
        kv_cache_dtype: "auto" (the model's), a dtype's name, or fp8, fp8_e4m3, fp8_e5m2.
        block_size: tokens in a page.
        attn_backend: the class `FlashInferBackend`.
        graph_block_tables: int32 [largest captured batch, pages of the longest captured sequence].
        graph_runners: for each virtual engine, what was captured: by (batch size, whether inputs are embeddings),
            objects with the `attn_state` that `FlashInferState.graph_clone` gave.
    """

    device: torch.device
    kv_cache_dtype: str
    block_size: int
    model_config: ModelConfig
    parallel_config: Any
    cache_config: CacheConfig
    vllm_config: VllmConfig
    attn_backend: Any
    graph_block_tables: np.ndarray
    graph_runners: Sequence[Mapping[tuple[int, bool], Any]]


class PlaceholderMap(Protocol):
    """Where a modality's embeddings go among the tokens; made without arguments it is empty."""

    def extend(self, other: Any) -> None: ...

    def index_map(self) -> Any: ...


class SequenceGroup(Protocol):
    """Sequences of one request in a step, the i-th of which has the i-th entry of each list.

    Attributes:
        input_tokens: its new tokens.
        orig_seq_lens, context_lens, query_lens: its tokens, those before this step, and the new ones.
        block_tables: by sequence id, the pages of all its tokens, or more; None (or None for each): a profile run.
        computed_block_nums: pages found in the prefix cache, if `prefix_cache_hit`.
    """

    seq_ids: Sequence[int]
    is_prompt: bool
    input_tokens: Sequence[Sequence[int]]
    orig_seq_lens: Sequence[int]
    context_lens: Sequence[int]
    query_lens: Sequence[int]
    block_tables: Mapping[int, Sequence[int] | None] | None
    computed_block_nums: Sequence[int] | None
    prefix_cache_hit: bool
    multi_modal_placeholder_maps: Mapping[str, PlaceholderMap] | None


class InputBuilder(Protocol):
    """Who collects a step's sequences, prompts first."""

    runner: ModelRunner
    sliding_window: int | None
    block_size: int
    chunked_prefill_enabled: bool
    inter_data_list: Sequence[SequenceGroup]


class ModelInput(Protocol):
    """A step's input: tokens and positions [at least num_seqs], embeddings instead of tokens, or None."""

    attn_metadata: Any
    input_tokens: Tensor
    input_positions: Tensor
    inputs_embeds: Tensor | None
    virtual_engine: int
