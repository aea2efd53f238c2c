"""Reading and checking the layers of pymllm and SGLang, and their tensors.

Only SGLang's layers have some attributes, such as the scales of fp8 caches; they are read where they exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.backends.token_pool.batch import RadixAttention
from quire.definition.pages import refuse_first
from quire.definition.spec import FLOATS8
from quire.steps import Heads


def verifies(mode: Any) -> bool:
    """Whether a mode is target-verify; modes of engines without speculative decoding lack the method."""
    return bool(getattr(mode, "is_target_verify", bool)())


def window(layer: RadixAttention) -> int:
    """The number of keys to the left of a query that it sees; -1: all."""
    size = layer.sliding_window_size
    return -1 if size is None or layer.is_cross_attention else size


def options(layer: RadixAttention) -> dict[str, Any]:
    """The parameters of a layer, as arguments of a wrapper's run."""
    cap = max(layer.logit_cap or 0.0, 0.0)
    return {"sm_scale": layer.scaling, "window_left": window(layer), "logits_soft_cap": cap}


def scales(layer: RadixAttention, dtype: torch.dtype) -> dict[str, Any]:
    """The scales of a layer's keys and values in a cache of a dtype: Python numbers if the layer has them, else
    tensors. None in a cache that is not fp8, whatever the checkpoint has, as keys are stored there as they are.
    """
    values: dict[str, Any] = {"k_scale": None, "v_scale": None}
    if dtype not in FLOATS8:
        return values
    for name in ("k_scale", "v_scale"):
        number = getattr(layer, f"{name}_float", None)
        values[name] = getattr(layer, name, None) if number is None else number
    return values


def encoder_only(layer: RadixAttention) -> bool:
    """Whether all tokens of a request see each other and their keys and values are not stored."""
    return _kind(layer) == "encoder_only"


def causal(layer: RadixAttention, batch: Any) -> bool:
    """Whether new tokens do not see later ones.

    Raises:
        ValueError: the attn_type is unknown, or it is decoder_bidirectional and the batch has images.
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
    """Reshape q, k and v, [tokens, heads * head_dim] or [tokens, heads, head_dim], to [tokens, heads, head_dim].

    Raises:
        ValueError: the layer's heads differ from the backend's, or the tensors contradict them.
    """
    actual = Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim)
    if actual != heads or layer.tp_v_head_num != layer.tp_k_head_num:
        raise ValueError(f"layer {layer.layer_id} has {actual}: the backend was made for {heads}")
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
    """The keys and values of a layer in a pool, [slots, num_kv_heads, head_dim].

    Raises:
        ValueError: the pool does not have the layer, or has other heads or another dtype.
    """
    try:
        if layer.layer_id < 0:
            raise IndexError
        k, v = pool.get_kv_buffer(layer.layer_id)
    except (IndexError, KeyError):
        raise ValueError(f"layer_id = {layer.layer_id}: the pool has no such layer") from None
    for name, x, dim in (("keys", k, heads.head_dim_qk), ("values", v, heads.head_dim_vo)):
        if x.ndim != 3 or x.shape[1] != heads.num_kv_heads or x.shape[2] != dim or x.dtype != dtype:
            actual, needed = f"{x.dtype} {list(x.shape)}", f"{dtype} [slots, {heads.num_kv_heads}, {dim}]"
            raise ValueError(f"the pool's {name} of layer {layer.layer_id} are {actual}: {needed} is needed")
    return k, v


def pages(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The buffers of a layer as a paged cache with pages of one token."""
    return cache[0].unsqueeze(1), cache[1].unsqueeze(1)


def slots(batch: Any, layer: RadixAttention, tokens: int, num_slots: int) -> Tensor:
    """The slots of the new keys and values, one for each of `tokens`.

    Raises:
        ValueError: the batch has more or fewer slots than tokens, or a slot outside the pool (checked where
            slots lie on the host).
    """
    name = "encoder_out_cache_loc" if layer.is_cross_attention else "out_cache_loc"
    loc = getattr(batch, name)
    if loc is None or loc.ndim != 1 or loc.dtype not in (torch.int32, torch.int64) or len(loc) != tokens:
        actual = loc if loc is None else f"{loc.dtype} {list(loc.shape)}"
        raise ValueError(f"{name} is {actual}: {tokens} new tokens need as many slots, as integers")
    if loc.is_cpu:
        refuse_first((loc < 0) | (loc >= num_slots), name, loc, f"the pool's slots are 0 to {num_slots - 1}")
    return loc


def refuse(**options: Any) -> None:
    """Refuse options of a layer's call that are not supported; None and False leave an option out."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported")


def _kind(layer: RadixAttention) -> str:
    kind = getattr(layer, "attn_type", "decoder")
    return getattr(kind, "value", kind)


def _split(name: str, x: Tensor, heads: int, dim: int) -> Tensor:
    if x.ndim not in (2, 3) or x.numel() != x.shape[0] * heads * dim:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be [tokens, {heads} * {dim}]")
    return x.reshape(-1, heads, dim)
