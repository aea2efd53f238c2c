"""Continuous batching, `generate_batch`: keys and values in Transformers' paged cache."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching import ContinuousBatchingManager

from quire.integrations.transformers.batch import PackedBatch, flat_rows, of_indptr, of_pages

NAME = "quire"
StepBatch = tuple[Tensor, Tensor, "partial[PackedBatch]"]


def admit() -> None:
    """Let continuous batching take models whose attention implementation is Quire's. Its manager would replace this
    by an implementation from a list of its own. All other code of Transformers decides by name whether masks or a
    FlashAttention package are needed; Quire needs neither.
    """
    own = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    # A version of Transformers without this method refuses the name itself.
    if own is None:
        return

    @wraps(own)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            own(self, model, *args, **kwargs)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch


def step_batch(cache: Any, layer: int, key: Tensor, value: Tensor, step: dict[str, Any]) -> StepBatch:
    """Store the new keys and values of a step, and return rows of keys and values, and what makes the step's batch.

    Full attention reads the cache where it lies, by Transformers' index of its tokens. Windows are kept in rings, of
    which a step may overwrite tokens that it reads: there the cache returns a copy of what the step reads.

    Args:
        cache: Transformers' PagedAttentionCache.
        key, value: [1, num_kv_heads, tokens, head_dim].
        step: cu_seq_lens_q, cu_seq_lens_k, max_length_q (or max_seqlen_q), read_index and write_index.

    Raises:
        ValueError: a block table is given, which only Transformers' names of FlashAttention get; or the cache has other
            heads than the layer, as it has for MLA.
    """
    if step.get("block_table") is not None:
        raise ValueError("block_table is given, which attn_implementation = 'quire' does not support: None is")
    allocators = getattr(cache, "layer_to_allocator", None)
    if allocators is not None:
        allocator = allocators[layer]
        group, kind = allocator.index, allocator.layer_type
        window = getattr(allocator, "sliding_window", 0)
        stored = None if window else allocator.get_cache_for_block_table(layer)
        update = partial(cache.update, kwargs=dict(step))
    else:
        # In Transformers 5.17, a window of 1 stands for none.
        group, index = cache.layer_index_to_group_indices[layer]
        window = cache.sliding_windows[layer] if cache.sliding_windows[layer] > 1 else 0
        kind = "sliding_attention" if window else "full_attention"
        stored = None if window else (cache.key_cache[index], cache.value_cache[index])
        update = partial(cache.update, read_index=step["read_index"], write_index=step["write_index"])
    cu_q, cu_k = step["cu_seq_lens_q"], step["cu_seq_lens_k"]
    cu_k = cu_k if isinstance(cu_k, Tensor) else cu_k[kind]
    longest = step.get("max_length_q") or step.get("max_seqlen_q") or key.shape[2]
    k, v = flat_rows(key), flat_rows(value)
    if stored is None:
        k, v = (x if x.ndim == 3 else flat_rows(x) for x in update(key, value, layer))
    else:
        if any(old.shape[-2:] != new.shape[1:] for old, new in zip(stored, (k, v), strict=True)):
            sizes = " and ".join(str(list(new.shape[1:])) for new in (k, v))
            what = f"the paged cache has heads of {list(stored[0].shape[-2:])}, and the layer {sizes}"
            raise ValueError(f"{what}: attn_implementation = 'quire' needs equal ones")
        read, write = step["read_index"][group], step["write_index"][group]
        k_rows, v_rows = (x.view(-1, *new.shape[1:]) for x, new in zip(stored, (k, v), strict=True))
        k_rows.index_copy_(0, write, k)
        v_rows.index_copy_(0, write, v)
        # If nothing is read, all requests are new, and see only their own keys.
        if read.numel():
            return k_rows, v_rows, partial(of_pages, cu_q, cu_k, read, longest)
    return k, v, partial(of_indptr, cu_q, cu_k, longest, True, window - 1)
