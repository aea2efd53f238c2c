"""The attributes of vLLM's objects that `quire.backends.vllm` reads; any object that has them is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


class AttentionLayer(Protocol):
    """The scales of an fp8 cache's keys and values, as tensors on the device and as Python numbers."""

    _k_scale: Tensor
    _v_scale: Tensor
    _k_scale_float: float
    _v_scale_float: float


@runtime_checkable
class LayerImpl(Protocol):
    """The attention parameters of a layer; sliding_window is (keys to the left, 0), or (-1, -1) for no window."""

    scale: float
    sliding_window: tuple[int, int] | None
    logits_soft_cap: float | None


class CompilationConfig(Protocol):
    """static_forward_context: layers by name; attention layers have an `impl`."""

    static_forward_context: Mapping[str, Any]


class VllmConfig(Protocol):
    """The part of the configuration that lists the layers."""

    compilation_config: CompilationConfig


class ModelConfig(Protocol):
    """The dtype and the heads of the model; with tensor parallelism, the heads of this process."""

    dtype: torch.dtype

    def get_num_attention_heads(self, parallel_config: Any) -> int: ...

    def get_num_kv_heads(self, parallel_config: Any) -> int: ...

    def get_head_size(self) -> int: ...


class CacheConfig(Protocol):
    """num_gpu_blocks: pages in the cache; None before the cache has been sized."""

    num_gpu_blocks: int | None


class VllmModelRunner(Protocol):
    """The model runner.

    Attributes:
        kv_cache_dtype: "auto" (the model's), a dtype's name, or fp8, fp8_e4m3, fp8_e5m2.
        block_size: tokens in a page.
        attn_backend: the class `FlashInferBackend`.
        graph_block_tables: int32 [largest captured batch, pages of the longest captured sequence].
        graph_runners: for each virtual engine, the captured graphs by (batch size, whether inputs are embeddings);
            each has as `attn_state` the result of `FlashInferState.graph_clone`.
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
    """Positions of a modality's embeddings among the tokens; a new one without arguments is empty."""

    def extend(self, other: Any) -> None: ...

    def index_map(self) -> Any: ...


class SequenceGroup(Protocol):
    """The sequences of one request in a step; entry i of each list belongs to sequence i.

    Attributes:
        input_tokens: the new tokens.
        orig_seq_lens, context_lens, query_lens: the numbers of all tokens, of tokens before this step and of new ones.
        block_tables: by sequence id, at least the pages of all its tokens; None (or None for each): a profile run.
        computed_block_nums: the pages found in the prefix cache, if `prefix_cache_hit`.
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
    """The collector of a step's sequences, prompts first."""

    runner: VllmModelRunner
    sliding_window: int | None
    block_size: int
    chunked_prefill_enabled: bool
    inter_data_list: Sequence[SequenceGroup]


class ModelInput(Protocol):
    """The input of a step: tokens and positions [at least num_seqs], and embeddings instead of tokens, or None."""

    attn_metadata: Any
    input_tokens: Tensor
    input_positions: Tensor
    inputs_embeds: Tensor | None
    virtual_engine: int
