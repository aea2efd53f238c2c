"""The types of pymllm's engine that attention reads: the mode and the tables of a forward pass, pools, and layers.

SGLang's objects have attributes of equal names and are accepted in their place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Protocol

from torch import Tensor


class ForwardMode(IntEnum):
    """The kind of a forward pass.

    EXTEND: new tokens of requests whose earlier tokens may be in the cache. DECODE: one token of each request. MIXED:
    both in one batch. IDLE: no tokens. TARGET_VERIFY: an equal number of drafted tokens for each request.
    """

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_extend(self) -> bool:
        """Whether requests may have several new tokens."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)

    def is_prefill(self) -> bool:
        """An alias of `is_extend`."""
        return self.is_extend()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY


class KVPool(Protocol):
    """The keys and values of all layers, with one slot per token."""

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, [slots, num_kv_heads, head_dim] each."""

    def set_kv_buffer(self, layer_id: int, indices: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, [tokens, num_kv_heads, head_dim], to the slots `indices`, [tokens]."""


class ReqToTokenPool(Protocol):
    """The slots of each request's tokens: int32 [max_reqs, max_context_len], a row for each request."""

    req_to_token: Tensor


class RadixAttention(Protocol):
    """The attributes of an attention layer that the backend reads.

    Attributes:
        tp_q_head_num, tp_k_head_num, tp_v_head_num: heads on this device.
        head_dim, v_head_dim: sizes of a query and key head, and of a value head.
        scaling: the softmax scale.
        layer_id: the index of the layer in the pool.
        logit_cap: soft cap of the logits; 0: none.
        sliding_window_size: the number of keys to the left of a query that it sees; -1: all.
        is_cross_attention: whether the keys are those of an encoder.
        attn_type: "decoder", "decoder_bidirectional" or "encoder_only", or an enum member with such a value.
    """

    tp_q_head_num: int
    tp_k_head_num: int
    tp_v_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    layer_id: int
    logit_cap: float
    sliding_window_size: int
    is_cross_attention: bool
    attn_type: Any


@dataclass
class VerifyInput:
    """The input of TARGET_VERIFY.

    Attributes:
        draft_token_num: the number of drafted tokens of each request.
        custom_mask: bool [sum of draft_token_num * kv_len], the requests' masks one after another, row by row, where
            kv_len includes the drafted tokens; None: causal.
    """

    draft_token_num: int
    custom_mask: Tensor | None = None


@dataclass
class ForwardBatch:
    """The tables of a forward pass. Tensors lie on the device unless their name ends with `_cpu`.

    Attributes:
        forward_mode: the kind of the forward pass.
        batch_size: the number of requests.
        input_ids, positions: [tokens], the new tokens and their positions in their requests.
        req_pool_indices: int32 or int64 [batch_size], the requests' rows of req_to_token.
        seq_lens: [batch_size], the length of each request, including new tokens but not those that are only drafted.
        out_cache_loc: int32 or int64 [tokens], the slots of the new tokens.
        seq_lens_sum, seq_lens_cpu: the sum of seq_lens, and seq_lens on the host. With one of them, nothing waits for
            the device.
        extend_num_tokens: the number of new tokens of EXTEND and MIXED.
        extend_seq_lens, extend_prefix_lens: [batch_size], the number of new tokens of each request and of tokens before
            them; their sum is seq_lens. extend_start_loc: [batch_size], offsets of the requests among the new tokens.
        extend_seq_lens_cpu, extend_prefix_lens_cpu: extend_seq_lens and extend_prefix_lens on the host. Without the
            latter, every request is assumed to have a prefix.
        encoder_lens: [batch_size], the number of encoder tokens of each request, whose slots come first in its row;
            encoder_lens_cpu: encoder_lens on the host.
        encoder_out_cache_loc: the slots of new encoder tokens.
        spec_info: the input of TARGET_VERIFY.
        token_to_kv_pool, req_to_token_pool, attn_backend: the pools, and the backend of the layers.

    The engine alone reads the other attributes.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_sum: int | None = None
    seq_lens_cpu: Tensor | None = None
    positions: Tensor | None = None
    extend_num_tokens: int | None = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    extend_start_loc: Tensor | None = None
    extend_prefix_lens_cpu: Sequence[int] | None = None
    extend_seq_lens_cpu: Sequence[int] | None = None
    return_logprob: bool = False
    top_logprobs_nums: Sequence[int] | None = None
    req_to_token_pool: ReqToTokenPool | None = None
    token_to_kv_pool: KVPool | None = None
    attn_backend: AttentionBackend | None = None
    mrope_position_deltas: Tensor | None = None
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    encoder_lens: Tensor | None = None
    encoder_lens_cpu: Sequence[int] | None = None
    encoder_out_cache_loc: Tensor | None = None
    spec_info: VerifyInput | None = None


class AttentionBackend(ABC):
    """The interface that pymllm's and SGLang's layers call."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a forward pass, whose layers then call `forward`."""

    @abstractmethod
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of a layer with one new token per request."""

    @abstractmethod
    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of a layer with any number of new tokens per request."""

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Call `forward_decode` or `forward_extend`, depending on the batch's mode; IDLE returns zeros."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
