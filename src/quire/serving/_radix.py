"""What a layer of pymllm's or SGLang's asks for, read from it and checked.

SGLang's layers have a few attributes more (scales of fp8 caches among them), which are read where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.definition.pages import refuse_first
from quire.serving._forward_batch import RadixAttention
from quire.serving.base import Heads


def verifies(mode: Any) -> bool:
    """Whether a mode is target-verify; engines without speculative decoding have no such question."""
    return bool(getattr(mode, "is_target_verify", bool)())


def window(layer: RadixAttention) -> int:
    """Keys to the left of a query that it still sees; -1: all."""
    size = layer.sliding_window_size
    return -1 if size is None or layer.is_cross_attention else size


def options(layer: RadixAttention) -> dict[str, Any]:
    """The arguments of a wrapper's run that are a layer's own."""
    cap = max(layer.logit_cap or 0.0, 0.0)
    return {"sm_scale": layer.scaling, "window_left": window(layer), "logits_soft_cap": cap}


def scales(layer: RadixAttention) -> dict[str, Any]:
    """What a layer's stored keys and values are to be multiplied by: numbers, where the layer knows them."""
    found = {}
    for name in ("k_scale", "v_scale"):
        number = getattr(layer, f"{name}_float", None)
        found[name] = getattr(layer, name, None) if number is None else number
    return found


def encoder_only(layer: RadixAttention) -> bool:
    """Whether a layer's tokens all see each other, and are never looked at again."""
    return _kind(layer) == "encoder_only"


def causal(layer: RadixAttention, batch: Any) -> bool:
    """Whether new tokens see none after themselves.

    Raises:
        ValueError: an unknown attn_type, or a decoder whose pictures' tokens see each other, where there are pictures.
    """
    kind = _kind(layer)
    if kind not in ("decoder", "decoder_bidirectional", "encoder_only"):
        raise ValueError(f"layer.attn_type = {kind!r} is not known")
    if kind == "decoder_bidirectional":
        pictures = getattr(batch, "pixel_values", None) is not None or any(getattr(batch, "mm_inputs", None) or ())
        if pictures:
            raise ValueError(f"layer {layer.layer_id}: pictures whose tokens see each other are not supported")
    return kind != "encoder_only"


def by_heads(
    q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention, heads: Heads
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Q, k and v as [tokens, heads, head_dim], from that or from [tokens, heads * head_dim].

    Raises:
        ValueError: a layer of other heads than the backend's, or tensors that do not fit the layer.
    """
    theirs = Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim)
    if theirs != heads or layer.tp_v_head_num != layer.tp_k_head_num:
        raise ValueError(f"layer {layer.layer_id} has {theirs}: the backend was made for {heads}")
    q = _split("q", q, heads.num_qo_heads, heads.head_dim_qk)
    if k is None and v is None:
        return q, None, None
    if k is None or v is None:
        raise ValueError("k and v belong together: both must be given, or none")
    k = _split("k", k, heads.num_kv_heads, heads.head_dim_qk)
    v = _split("v", v, heads.num_kv_heads, heads.head_dim_vo)
    if len(k) != len(v):
        raise ValueError(f"k has {len(k)} tokens, v {len(v)}")
    return q, k, v


def buffers(pool: Any, layer: RadixAttention, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A layer's keys and values in a pool, [slots, num_kv_heads, head_dim].

    Raises:
        ValueError: a pool that does not know the layer, or is made for other heads or another dtype.
    """
    try:
        if layer.layer_id < 0:
            raise IndexError
        k, v = pool.get_kv_buffer(layer.layer_id)
    except (IndexError, KeyError):
        raise ValueError(f"layer_id = {layer.layer_id}: the pool has no such layer") from None
    for name, x, dim in (("keys", k, heads.head_dim_qk), ("values", v, heads.head_dim_vo)):
        if x.ndim != 3 or x.shape[1] != heads.num_kv_heads or x.shape[2] != dim or x.dtype != dtype:
            fits = f"{dtype} [slots, {heads.num_kv_heads}, {dim}]"
            given = f"{x.dtype} {list(x.shape)}"
            raise ValueError(f"the pool's {name} of layer {layer.layer_id} are {given}: {fits} is needed")
    return k, v


def pages(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The buffers as pages of one token."""
    return cache[0].unsqueeze(1), cache[1].unsqueeze(1)


def slots(batch: Any, layer: RadixAttention, tokens: int, room: int) -> Tensor:
    """Where new keys and values go: the batch's slots, one for each of `tokens`.

    Raises:
        ValueError: more or fewer slots than tokens, or, on the host, one outside the pool's `room`.
    """
    name = "encoder_out_cache_loc" if layer.is_cross_attention else "out_cache_loc"
    found = getattr(batch, name)
    if found is None or found.ndim != 1 or found.dtype not in (torch.int32, torch.int64) or len(found) != tokens:
        given = found if found is None else f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"{name} is {given}: {tokens} new tokens need as many slots, as integers")
    if found.is_cpu:
        refuse_first((found < 0) | (found >= room), name, found, f"the pool's slots are 0 to {room - 1}")
    return found


def _kind(layer: RadixAttention) -> str:
    kind = getattr(layer, "attn_type", "decoder")
    return getattr(kind, "value", kind)


def _split(name: str, x: Tensor, heads: int, dim: int) -> Tensor:
    if x.ndim not in (2, 3) or x.numel() != x.shape[0] * heads * dim:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be [tokens, {heads} * {dim}]")
    return x.reshape(-1, heads, dim)
