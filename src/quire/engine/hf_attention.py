"""The attention function that Transformers' models call, which hands each layer's tensors to the step in progress."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.steps import Heads, Layer

NAME = "quire_engine"
_IGNORED = {"dropout", "is_causal", "logits_to_keep", "output_attentions", "position_ids", "use_cache"}


class StepAttention(Protocol):
    """A forward pass, which computes the attention of its layers."""

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of layer `index` for the new tokens: q [tokens, num_qo_heads, head_dim_qk], k and v [tokens,
        num_kv_heads, ...]; returns [tokens, num_qo_heads, head_dim_vo].
        """


class _NoStep:
    """Stands for the step where none is in progress."""

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        raise ValueError(f"layer {index} computes attention outside of a step of Quire")


class _Running(threading.local):
    """The step in progress and the layers of its model; each engine runs in a thread of its own."""

    step: StepAttention = _NoStep()
    layers: Sequence[Layer] = ()


_running = _Running()


class AttentionRecorder:
    """A step that records the layers and computes no attention.

    Attributes:
        layers: the parameters of each layer's attention.
        modules: the module of each layer that called `attention`.
        rotated: the queries and keys of each layer, after rotary embedding, of all tokens but the last.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        self.rotated: dict[int, Tensor] = {}

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if index in self.layers:
            raise ValueError(f"layer {index} computes attention more than once, and has one cache for it")
        self.layers[index] = layer
        self.rotated[index] = torch.cat([q[:-1].flatten(), k[:-1].flatten()]).float()
        return q.new_zeros(len(q), layer.heads.num_qo_heads, layer.heads.head_dim_vo)


class PaddedAttention:
    """A step whose tokens are followed by padding, which has no part in its attention."""

    def __init__(self, step: StepAttention, count: int) -> None:
        self._step, self._count = step, count

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        n = self._count
        out = self._step.attend(index, layer, q[:n], k[:n], v[:n], sinks)
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - n))


@contextmanager
def running(step: StepAttention, layers: Sequence[Layer] = ()) -> Iterator[None]:
    """A context in which `attention`, called in this thread, passes its tensors to `step`. Compiled code passes only
    the index of a layer, so it needs the parameters of all `layers`.
    """
    _running.step, _running.layers = step, layers
    try:
        yield
    finally:
        _running.step, _running.layers = _NoStep(), ()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function of Transformers' attention interface: query [1, num_qo_heads, tokens, head_dim], key and value
    [1, num_kv_heads, tokens, head_dim]; returns [1, tokens, num_qo_heads, head_dim].
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.compiler.is_compiling():
        return _attend(q.contiguous(), k, v, s_aux, module.quire_index)[None], None
    name, step = type(module).__name__, _running.step
    if attention_mask is not None:
        raise ValueError(f"{name} computes an attention mask of its own")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{name} is not causal")
    unknown = [key for key, value in kwargs.items() if key not in _IGNORED and value is not None and value is not False]
    if unknown:
        raise ValueError(f"{name} asks its attention function for {', '.join(unknown)}, which is not known here")
    layer = _layer(
        *(q.shape[1], k.shape[1], q.shape[2], v.shape[2]),
        sm_scale=float(scaling) if scaling is not None else q.shape[2] ** -0.5,
        # Transformers includes the token itself in the window.
        window_left=sliding_window - 1 if sliding_window else -1,
        logits_soft_cap=float(softcap) if softcap else 0.0,
    )
    if isinstance(step, AttentionRecorder):
        step.modules[module.layer_idx] = module
    return step.attend(module.layer_idx, layer, q, k, v, s_aux)[None], None


@lru_cache(maxsize=256)
def _layer(qo_heads: int, kv_heads: int, head_dim_qk: int, head_dim_vo: int, **params: Any) -> Layer:
    """One `Layer` for all steps, since making it takes longer than looking it up."""
    return Layer(Heads(qo_heads, kv_heads, head_dim_qk, head_dim_vo), **params)


@torch.library.custom_op("quire::attend_layer", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: Tensor) -> Tensor:
    """`StepAttention.attend` of the step in progress, as one operation for torch.compile.

    `index` is an int64 [] tensor on the host: with a Python number, torch.compile would compile each layer anew. For
    the same reason scale, window and soft cap are those that the layer had when it was recorded. The keys and values
    that the step stores are state of the step and no argument: nothing else in a compiled layer reads them.
    """
    at = int(index)
    return _running.step.attend(at, _running.layers[at], q, k, v, sinks).contiguous()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])
