"""The mask function: from what Transformers says about a mask to one tensor, without waiting for the device.

A model makes a mask for each kind of layer once per forward pass, and hands it on to its layers. `generate` may make
masks before a compiled forward pass: the model then takes any tensor of four dimensions for a mask that is ready. So
all masks have four dimensions, and numbers that the host must know are sizes of dimensions, some of them expanded:

- None, for one query token per row, which sees all keys.
- A table, for one query token per row: the page table of the keys that it sees, in pages of one token. It holds for any
  mask, since what a single query sees is a list of keys. int32 [1, heads, batch_size + 1, kv_len + 3], whose elements
  for each head are batch_size * kv_len page ids, then unused ones and, at the end, last_page_len, qo_indptr and
  kv_indptr. Page ids are those of a contiguous cache [batch_size, heads, kv_len, head_dim].
- Spans, for several query tokens per row: int32 [1, window + 1, batch_size, 2], the start and the end of the keys of
  each row. The last query token is at the end. Rows are causal; a query token sees `window` keys, all of them if it
  is 0.
- Packed sequences: int32 [1, window + 1, 1, batch_size * q_len + 1], the indptr of all sequences in all rows; entries
  beyond the last sequence repeat its end.
- Anything else: bool [batch_size, 1, q_len, kv_len].
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from inspect import getclosurevars, getsource
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from quire.kernels.torch_internals import assert_async

_HOLES = (
    "quire: a row of attention_mask hides tokens between others, which can be computed for one new token at a time, or "
    "for several if attention_mask is a bool mask [batch_size, 1, q_len, kv_len]"
)

# Models that call attention functions, but also read the mask in code of their own: in an encoder's attention, in a
# router, or to build another mask.
_OWN_USES = {"bigbird_pegasus", "nllb-moe", "deepseek_v4"}


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The function of Transformers' mask interface.

    Args:
        q_offset, kv_offset: positions of the first query token and of the first key.
        mask_function: whether a query token at a position sees the key at another, besides attention_mask.
        attention_mask: bool [batch_size, tokens so far], False for padding.
        local_size: the sliding window, counting the token itself, or the size of chunks.
        allow_is_causal_skip: whether mask_function is nothing but causal, a window or chunks, and the mask is for the
            attention function alone.
        use_vmap: whether the caller has added functions of its own.

    Returns:
        one of the masks that this module describes.
    """
    window = _window(mask_function, local_size, allow_is_causal_skip, use_vmap, config)
    if window is not None and window >= kv_length:
        window = 0
    if not torch.compiler.is_compiling():
        _refuse_own_attention(config)
    causal = window == 0 or mask_function is causal_mask_function
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_length + kv_offset
    if q_length == 1 and causal and at_end and attention_mask is None:
        return None

    whole = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    if q_length == 1:
        return _table(whole()[:, 0, 0], _kv_heads(config))
    # The last query token sees keys up to this one.
    end, found = q_offset + q_length - kv_offset, None
    if window is None and attention_mask is None:
        found = _packed(mask_function, local_size, use_vmap, config)
    elif window is not None and attention_mask is None and _is_within(end, kv_length):
        found = _spans(torch.zeros(batch_size, dtype=torch.int64, device=device), end, window)
    elif window is not None and attention_mask is not None and _is_within(end, kv_length):
        found = _padded(attention_mask[:, kv_offset : kv_offset + kv_length], end, window)
    return whole() if found is None else found


def _is_within(end: int | Tensor, kv_length: int) -> bool:
    """Whether the query tokens are among the keys, as they always are in static caches, whose length is a tensor."""
    return not isinstance(end, int) or end <= kv_length


def _padded(real: Tensor, end: int | Tensor, window: int) -> Tensor | None:
    """The spans of rows whose tokens are padding where bool `real` [batch_size, tokens] is False. On the CPU, None if
    padding is not on the left alone. On other devices that is not known without waiting: keys on the right that are
    padding are then in the span, but only tokens of padding see them; padding between tokens makes the device fail.
    """
    before_end = torch.arange(real.shape[1], device=real.device) < end
    real = real & before_end
    if real.is_cpu and not torch.compiler.is_compiling() and (real[:, :-1] & ~real[:, 1:] & before_end[1:]).any():
        return None
    begins = real[:, 1:] & ~real[:, :-1]
    assert_async((begins.sum(1) + real[:, 0] <= 1).all(), _HOLES)
    return _spans(torch.where(real.any(1), real.int().argmax(1), end), end, window)


def _refuse_own_attention(config: Any) -> None:
    """Raise a ValueError for a model that would take a mask for one of its own."""
    name = type(config).__name__.removesuffix("Config")
    if not _has_interface(type(config).__module__):
        raise ValueError(f"{name} computes attention by itself, and not by attn_implementation = 'quire': use 'eager'")
    if getattr(config, "model_type", "") in _OWN_USES:
        what = "uses masks by itself, and not by attn_implementation = 'quire' alone"
        raise ValueError(f"{name} {what}: use 'eager'")


@lru_cache(maxsize=256)
def _has_interface(config_module: str) -> bool:
    """Whether the code of a config's model calls attention functions by name, or has no attention of its own, as far as
    it is known. Other models would take a mask for one of their own.
    """
    module = sys.modules.get(config_module.replace("configuration_", "modeling_"))
    try:
        code = "" if module is None else getsource(module)
    except (OSError, TypeError):
        return True
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    return own is None or "ALL_ATTENTION_FUNCTIONS" in code


def _window(
    mask_function: Callable[..., Any], local_size: int | None, is_known_kind: bool, use_vmap: bool, config: Any
) -> int | None:
    """The sliding window of a causal mask, 0 if it has none; None if the mask is another one."""
    if not is_known_kind or use_vmap:
        return None
    if mask_function is causal_mask_function:
        return 0
    return local_size if _is_window(local_size, config) else None


def _is_window(local_size: int | None, config: Any) -> bool:
    """Whether local_size is a sliding window, and not the size of chunks."""
    own = local_size is not None and local_size == getattr(config, "sliding_window", None)
    return own and getattr(config, "attention_chunk_size", None) is None


def _kv_heads(config: Any) -> int:
    """The number of KV heads that a cache is expected to have. Tables for another number are converted later."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) and heads > 0 else 1


def _table(seen: Tensor, heads: int) -> Tensor:
    """The table of the keys that are seen, bool [batch_size, kv_len]."""
    batch, length = seen.shape
    row, token = (torch.arange(n, dtype=torch.int32, device=seen.device) for n in (batch + 1, length))
    pages = (row[:-1, None] * (heads * length) + token).flatten()
    flat = seen.flatten()
    rank = flat.cumsum(0)
    table = torch.ones((batch + 1) * (length + 3), dtype=torch.int32, device=seen.device)
    # All keys that are not seen go to the first element behind the page ids.
    table.scatter_(0, torch.where(flat, rank - 1, flat.numel()), pages)
    table[-2 * batch - 2 : -batch - 1] = row
    # Assignment of a number to an element would copy it from the host, and wait.
    table[-batch - 1].fill_(0)
    table[-batch:] = rank.view(batch, length)[:, -1]
    return table.view(1, 1, batch + 1, length + 3).expand(1, heads, -1, -1)


def _spans(start: Tensor, end: int | Tensor, window: int) -> Tensor:
    """The spans of rows from start, int64 [batch_size], to a common end."""
    spans = torch.stack([start, torch.zeros_like(start) + end], 1).int()
    return spans.view(1, 1, -1, 2).expand(1, window + 1, -1, -1)


def _packed(mask_function: Callable[..., Any], local_size: int | None, use_vmap: bool, config: Any) -> Tensor | None:
    """The indptr of packed sequences that position_ids describe; None if the mask is another one, or is traced."""
    if torch.compiler.is_compiling() or use_vmap or getattr(mask_function, "__name__", "") != "and_mask":
        return None
    if local_size is not None and not _is_window(local_size, config):
        return None
    parts = getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    known = [x for x in parts if getattr(x, "__qualname__", "") == "packed_sequence_mask_function.<locals>.inner_mask"]
    if len(known) != 1:
        return None
    sequence = getclosurevars(known[0]).nonlocals["packed_sequence_mask"]
    count = sequence.numel()
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    begins = begins.flatten()
    indptr = torch.full((count + 1,), count, dtype=torch.int32, device=sequence.device)
    token = torch.arange(count, dtype=torch.int32, device=sequence.device)
    indptr.scatter_(0, torch.where(begins, begins.cumsum(0) - 1, count), torch.where(begins, token, count))
    return indptr.view(1, 1, 1, -1).expand(1, (local_size or 0) + 1, 1, -1)
