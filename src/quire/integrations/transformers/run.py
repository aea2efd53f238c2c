"""One layer's attention over rows of keys: planned once for all layers of a forward pass, or without a plan."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import attention_spec
from quire.definition.tensors import check_qkv
from quire.integrations.transformers.batch import PackedBatch
from quire.kernels.attention import attend
from quire.kernels.call import Call
from quire.kernels.torch_internals import current_raw_stream
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper


class LayerSettings(NamedTuple):
    """What a layer asks for, besides its mask.

    Attributes:
        scale: the factor of logits.
        softcap: their soft cap, 0 for none.
        causal, window_left: used only without a mask, which would say the same.
    """

    scale: float
    softcap: float
    causal: bool
    window_left: int


Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, "partial[PackedBatch]", LayerSettings], Tensor]


class _Plan:
    """A wrapper, and the function and arguments that its planned batch was made by."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._made_of: tuple[Any, ...] = ()
        self._has_tensors = False

    def is_of(self, make: partial[PackedBatch]) -> bool:
        """Whether the planned batch is what this call would make: of the same tensors, unchanged, and equal numbers."""
        given = make.args
        if not self._has_tensors:
            # A function takes tensors always or never. Layers of a decode step without padding take this branch.
            return bool(given == self._made_of)
        return len(given) == len(self._made_of) and all(map(_is_same, self._made_of, given))

    def keep(self, make: partial[PackedBatch]) -> None:
        """Remember what the planned batch was made of."""
        self._has_tensors = any(isinstance(x, Tensor) for x in make.args)
        self._made_of = tuple((weakref.ref(x), _version(x)) if isinstance(x, Tensor) else x for x in make.args)


def _is_same(kept: Any, given: Any) -> bool:
    if isinstance(given, Tensor):
        return isinstance(kept, tuple) and kept[0]() is given and kept[1] == _version(given)
    return bool(kept == given)


def _version(x: Tensor) -> Any:
    """A value that changes when a tensor is written to. Inference tensors have no version counter, so they always
    count as changed, except the masks of `quire.integrations.transformers.masks`, which are never written to.
    """
    if not x.is_inference():
        return x._version
    return 0 if x.ndim == 4 and x.dtype == torch.int32 else object()


class _Plans(threading.local):
    """The plans of a thread, by stream, because runs at the same time must not share a workspace. Plans are never
    dropped, as a process has few kinds of layers.
    """

    def __init__(self) -> None:
        self.found: dict[Any, _Plan] = {}


_plans = _Plans()


def run(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, make: partial[PackedBatch], settings: LayerSettings
) -> Tensor:
    """Attention of one layer, by a plan that other layers share.

    Args:
        q: [tokens, num_qo_heads, head_dim_qk].
        k, v: [rows, num_kv_heads, head_dim_qk or head_dim_vo].
        sinks: [num_qo_heads].
        make: makes the batch, whose tables are for rows of k and v.

    Returns:
        [tokens, num_qo_heads, head_dim_vo].
    """
    stream = 0
    if q.is_cuda:
        # A graph reads tables that must not change with a later plan.
        if torch.cuda.is_current_stream_capturing():
            return run_once(q, k, v, sinks, make, settings)
        stream = current_raw_stream(q.device.index)
    key = (make.func, q.device, stream, q.dtype, q.shape[1:], k.shape[1:], v.shape[2], settings)
    plan = _plans.found.get(key)
    if plan is None or not plan.is_of(make):
        plan = _plans.found[key] = _planned(plan, make(), q, k, v, settings)
        plan.keep(make)
    paged = isinstance(plan.wrapper, BatchPrefillWithPagedKVCacheWrapper)
    cache = ((k[:, None], v[:, None]),) if paged else (k, v)
    out: Tensor = plan.wrapper.run(q, *cache, sinks=sinks)
    return out


def _planned(plan: _Plan | None, batch: PackedBatch, q: Tensor, k: Tensor, v: Tensor, settings: LayerSettings) -> _Plan:
    """Plan a batch, by the wrapper of an earlier plan if there is one."""
    if plan is None:
        kind = BatchPrefillWithRaggedKVCacheWrapper if batch.indices is None else BatchPrefillWithPagedKVCacheWrapper
        plan = _Plan(kind(torch.empty(0, dtype=torch.uint8, device=q.device)))
    options: Any = {
        "num_qo_heads": q.shape[1],
        "num_kv_heads": k.shape[1],
        "head_dim_qk": q.shape[2],
        "head_dim_vo": v.shape[2],
        "packed_custom_mask": batch.bits,
        "causal": batch.causal,
        "window_left": batch.window_left,
        "logits_soft_cap": settings.softcap,
        "sm_scale": settings.scale,
        "q_data_type": q.dtype,
        "max_token_per_sequence": batch.max_q_len,
    }
    if batch.indices is None:
        plan.wrapper.plan(batch.qo_indptr, batch.kv_indptr, **options)
    else:
        tables = (batch.qo_indptr, batch.kv_indptr, batch.indices, batch.last_page_len)
        plan.wrapper.plan(*tables, page_size=1, **options)
    return plan


def run_once(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, make: partial[PackedBatch], settings: LayerSettings
) -> Tensor:
    """`run` without a plan that outlives it: CUDA graphs that capture it read no memory but their own."""
    batch = make()
    spec = attention_spec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2],
        q_dtype=q.dtype,
        causal=batch.causal,
        window_left=batch.window_left,
        logits_soft_cap=settings.softcap,
        sm_scale=settings.scale,
        custom_mask=batch.bits is not None,
        sinks=sinks is not None,
    )
    check_qkv(q, k, v, spec, q.device)
    qo = RaggedLayout(batch.qo_indptr)
    kv: PageTable | RaggedLayout = RaggedLayout(batch.kv_indptr)
    mask = None
    if batch.bits is not None:
        mask = PackedMask.from_packed(batch.bits, qo.lengths(), kv.lengths())
    if batch.indices is not None and batch.last_page_len is not None:
        kv = PageTable(batch.kv_indptr, batch.indices, batch.last_page_len, 1)
        k, v = k[:, None], v[:, None]
    out = torch.empty((q.shape[0], q.shape[1], v.shape[-1]), dtype=q.dtype, device=q.device)
    attend(Call(q, k, v, qo, kv, spec, mask, sinks, max_q_len=batch.max_q_len), out, None, "auto")
    return out
