"""The attention function: what a layer asks for, checked; then a planned run, or one operation for torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.integrations.transformers.batch import flat_rows, is_packed, key_rows, maker, of_indptr
from quire.integrations.transformers.continuous import step_batch
from quire.integrations.transformers.run import LayerSettings, Run, run, run_once

# Arguments of attention functions that change the result, and that Quire does not support.
_REFUSED = ("position_bias", "indices", "block_indices", "sinks")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function of Transformers' attention interface.

    Args:
        query: [batch_size, num_qo_heads, q_len, head_dim_qk].
        key, value: [batch_size, num_kv_heads, kv_len, head_dim_qk or head_dim_vo].
        attention_mask: see `quire.integrations.transformers.masks`; or a caller's bool [batch_size or 1, 1, q_len,
            kv_len], which alone says what is seen.
        scaling: the factor of logits, 1/sqrt(head_dim_qk) by default; softcap: their soft cap; s_aux: sinks,
            [num_qo_heads].
        sliding_window: the number of keys that a query token sees, itself among them; used only without a mask.
        is_causal: whether attention is causal, by default as the module says; used only without a mask.
        cache: the paged cache of continuous batching.
        cu_seq_lens_q, cu_seq_lens_k: int [sequences + 1], the offsets of packed sequences in all query tokens and in
            all keys. A bool mask holds within a sequence; other masks are then without effect. max_length_q: the most
            query tokens of a sequence.

    Returns:
        the output, [batch_size, q_len, num_qo_heads, head_dim_vo], and None.

    Raises:
        ValueError: gradients, dropout, attention weights, another kind of bias or mask, or heads that no kernel
            computes.
    """
    _refuse(query, key, value, dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    settings = LayerSettings(
        float(query.shape[3] ** -0.5 if scaling is None else scaling),
        float(softcap or 0.0),
        bool(causal),
        sliding_window - 1 if sliding_window else -1,
    )
    sinks = None if s_aux is None else s_aux.detach()
    if cache is not None:
        given = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k, "max_length_q": max_length_q}
        return _attend_step(module.layer_idx, query, key, value, cache, {**kwargs, **given}, sinks, settings), None
    if cu_seq_lens_q is not None and attention_mask is not None and attention_mask.dtype == torch.bool:
        _refuse_chunks(module)
    cu_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    longest = max_length_q if isinstance(max_length_q, int) else query.shape[0] * query.shape[2]
    if torch.compiler.is_compiling():
        return _operation(query, key, value, attention_mask, sinks, cu_seq_lens_q, cu_k, longest, *settings), None
    return _attend(query, key, value, attention_mask, sinks, cu_seq_lens_q, cu_k, longest, settings, run), None


def _refuse_chunks(module: torch.nn.Module) -> None:
    """Refuse chunked attention with offsets of packed sequences."""
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk:
        what = f"chunks of {chunk} tokens begin with each sequence, which its mask may not know"
        raise ValueError(f"cu_seq_lens_q is not supported with chunked attention: {what}: give position_ids alone")


def _refuse(query: Tensor, key: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse gradients, dropout, attention weights and other arguments that would otherwise be ignored silently."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError(
            "attn_implementation = 'quire' computes no gradients, so it is not for training: call the model under "
            "torch.no_grad() or torch.inference_mode(), or train it after model.set_attn_implementation('sdpa')"
        )
    if dropout:
        raise ValueError(f"dropout = {dropout} is not supported by attn_implementation = 'quire': call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions = True is not supported by attn_implementation = 'quire': 'eager' is")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is given, which attn_implementation = 'quire' does not support: 'eager' does")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest: int,
    settings: LayerSettings,
    run: Run,
) -> Tensor:
    """`attention` of checked arguments: [batch_size, q_len, num_qo_heads, head_dim_vo]."""
    batch, heads, q_len, _ = query.shape
    offsets = None if cu_q is None or cu_k is None else (cu_q, cu_k)
    if settings.window_left >= 0 and not settings.causal and mask is None and q_len > 1:
        what = "a window of a layer that is not causal is computed by its mask, and there is none"
        raise ValueError(f"sliding_window = {settings.window_left + 1} is not supported here: {what}")
    if offsets is not None and (mask is None or mask.dtype == torch.int32):
        k, v = flat_rows(key), flat_rows(value)
        make = partial(of_indptr, *offsets, longest, settings.causal, settings.window_left)
    else:
        packed = is_packed(mask, batch, q_len)
        k, v, step = (flat_rows(key), flat_rows(value), 0) if packed else key_rows(key, value)
        make = maker(mask, query, key, step, settings.causal, settings.window_left, offsets)
    return run(flat_rows(query), k, v, sinks, make, settings).view(batch, q_len, heads, value.shape[3])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_step(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    step: dict[str, Any],
    sinks: Tensor | None,
    settings: LayerSettings,
) -> Tensor:
    """`attention` of a step of continuous batching: [1, tokens, num_qo_heads, head_dim_vo]."""
    k, v, make = step_batch(cache, layer, key, value, step)
    return run(flat_rows(query), k, v, sinks, make, settings)[None]


@torch.library.custom_op("quire::transformers_attention", mutates_args=())
def _operation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest: int,
    scale: float,
    softcap: float,
    causal: bool,
    window_left: int,
) -> Tensor:
    """`_attend` as one operation for torch.compile."""
    settings = LayerSettings(scale, softcap, causal, window_left)
    return _attend(query, key, value, mask, sinks, cu_q, cu_k, longest, settings, run_once)


@_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
