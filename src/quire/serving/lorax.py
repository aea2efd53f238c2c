"""LoRAX's way to attention: wrappers as states that a context manager plans and makes current.

Names, parameters and meanings are those of `lorax_server.utils.flashinfer_attention`. A state is made once; each batch
enters the manager of its phase, and attention layers, which are not handed a state, find it in the context variable::

    state = create_decode_state(device=device, num_heads=32, num_kv_heads=8)
    with use_decode_state(state=state, input_lengths=..., block_tables=..., ...):
        ...  # in a layer:
        out = decode_state.get().run(query, (k_cache, v_cache))

Managers plan layers that are causal. Within a manager's body, `run` and `forward` keep what was planned where they are
given nothing, or None; what `forward` is given holds for that call alone, so that layers may differ. (The `forward` of
FlashInfer's wrappers changes the plan, and is not causal unless told so.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor

from quire import decode, prefill
from quire.definition.pages import PageTable, as_int32, refuse_first, table
from quire.definition.spec import FLOATS8, as_dtype, check
from quire.serving.base import Heads, plan, workspace
from quire.wrappers.base import AttentionWrapper

__all__ = [
    "create_decode_state",
    "create_decode_state_cuda_graphs",
    "create_prefill_state",
    "create_prefill_with_paged_kv_state",
    "decode_state",
    "get_workspace",
    "prefill_state",
    "prefill_with_paged_kv_state",
    "use_decode_state",
    "use_prefill_state",
    "use_prefill_with_paged_kv_state",
]

WORKSPACE_SIZE = 128 << 20  # bytes


# What `run` has no arguments for, and the attributes of `AttentionSpec` that they are.
_PLANNED = {
    "causal": "causal",
    "pos_encoding_mode": "pos_encoding",
    "rope_scale": "rope_scale",
    "rope_theta": "rope_theta",
}


class _State(AttentionWrapper):
    """A wrapper whose `forward` is `run` with other values for this call: the plan stays."""

    _of_forward: Signature  # FlashInfer's

    def forward(self, *args: Any, **options: Any) -> Any:
        """`run` by the arguments of FlashInfer's deprecated `forward`; those left out, or None, are as planned."""
        given = self._of_forward.bind(self, *args, **options).arguments
        del given["self"]
        given.pop("use_fp16_qk_reduction", None)
        plan = self.require_plan()
        layer = {to: given.pop(name, None) for name, to in _PLANNED.items()}
        changes = {name: x for name, x in layer.items() if x is not None and x != getattr(plan.spec, name)}
        if not changes:
            return self.run(**given)
        self.planned = plan.but(**changes)
        try:
            return self.run(**given)
        finally:
            self.planned = plan


class _RaggedState(_State, prefill.BatchPrefillWithRaggedKVCacheWrapper):
    _of_forward = signature(prefill.BatchPrefillWithRaggedKVCacheWrapper.forward)


class _PagedState(_State, prefill.BatchPrefillWithPagedKVCacheWrapper):
    _of_forward = signature(prefill.BatchPrefillWithPagedKVCacheWrapper.forward)


class _DecodeState(_State, decode.BatchDecodeWithPagedKVCacheWrapper):
    _of_forward = signature(decode.BatchDecodeWithPagedKVCacheWrapper.forward)


prefill_state: ContextVar[prefill.BatchPrefillWithRaggedKVCacheWrapper] = ContextVar("prefill_state")
prefill_with_paged_kv_state: ContextVar[prefill.BatchPrefillWithPagedKVCacheWrapper] = ContextVar(
    "prefill_with_paged_kv_state"
)
decode_state: ContextVar[decode.BatchDecodeWithPagedKVCacheWrapper] = ContextVar("decode_state")


def get_workspace(device: torch.device | str) -> Tensor:
    """The 128 MB, uint8, that all states of a device share; taken when first asked for."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return workspace(device, WORKSPACE_SIZE)


def create_prefill_with_paged_kv_state(*, device: torch.device | str) -> prefill.BatchPrefillWithPagedKVCacheWrapper:
    """A state for prefills that read the cache."""
    return _PagedState(get_workspace(device), "NHD")


def create_prefill_state(*, device: torch.device | str) -> prefill.BatchPrefillWithRaggedKVCacheWrapper:
    """A state for prefills whose keys and values are rows beside the queries."""
    return _RaggedState(get_workspace(device), "NHD")


def create_decode_state(
    *, device: torch.device | str, num_heads: int, num_kv_heads: int
) -> decode.BatchDecodeWithPagedKVCacheWrapper:
    """A state for decode; with tensor cores where more than 4 query heads share a KV head."""
    return _DecodeState(get_workspace(device), "NHD", use_tensor_cores=num_heads // num_kv_heads > 4)


def create_decode_state_cuda_graphs(
    *,
    device: torch.device | str,
    block_tables: Tensor,
    block_tables_ptr: Tensor,
    last_page_len: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> decode.BatchDecodeWithPagedKVCacheWrapper:
    """A state for decode in CUDA graphs, whose plans go into these buffers.

    Args:
        block_tables: int32 [as many pages as a batch may have].
        block_tables_ptr: int32 [batch_size + 1].
        last_page_len: int32 [batch_size].

    Raises:
        ValueError: a buffer that does not fit.
    """
    return _DecodeState(
        get_workspace(device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=num_heads // num_kv_heads > 4,
        paged_kv_indptr_buffer=block_tables_ptr,
        paged_kv_indices_buffer=block_tables,
        paged_kv_last_page_len_buffer=last_page_len,
    )


def use_prefill_with_paged_kv_state(
    *,
    state: prefill.BatchPrefillWithPagedKVCacheWrapper,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    input_lengths: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    page_size: int,
    dtype: torch.dtype | str,
    window_left: int | None,
    query_dtype: torch.dtype | str | None = None,
) -> AbstractContextManager[None]:
    """A context manager: within it, `prefill_with_paged_kv_state` is this state, planned for a batch, causal.

    Args:
        state: from `create_prefill_with_paged_kv_state`.
        block_tables: the requests' pages one after another, as many as input_lengths fill.
        cu_seqlens: [batch_size + 1], the requests' begins among the queries.
        input_lengths: [batch_size], the requests' tokens in the cache, the new ones counted. These tables are int32 or
            int64 vectors.
        head_size, page_size, dtype: of the cache.
        window_left: how many keys before its own a query sees; 0, -1 or None: all.
        query_dtype: of the queries, by default the cache's, or float16 where that is fp8. An fp8 cache is read with the
            k_scale and v_scale of `run` or `forward`.

    Raises:
        ValueError: an argument that does not fit.
        RuntimeError: the state is in use by another thread or task.
    """
    _check_state(state, prefill.BatchPrefillWithPagedKVCacheWrapper)
    pages = _pages(block_tables, input_lengths, page_size)
    rows = table(_int32(cu_seqlens, "cu_seqlens"), "cu_seqlens", pages.batch_size + 1)
    layer = (Heads(num_heads, num_kv_heads, head_size, head_size), *_dtypes(dtype, query_dtype))
    options: Any = {"causal": True, "window_left": window_left or -1}
    return _use(prefill_with_paged_kv_state, state, lambda: plan(state, pages, *layer, rows, **options))


def use_prefill_state(
    *,
    state: prefill.BatchPrefillWithRaggedKVCacheWrapper,
    cu_seqlens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    query_dtype: torch.dtype | str = "float16",
    window_left: int | None,
) -> AbstractContextManager[None]:
    """A context manager: within it, `prefill_state` is this state, planned for a batch, causal.

    Args:
        state: from `create_prefill_state`.
        cu_seqlens: [batch_size + 1], the requests' begins among the queries and among the keys.
        query_dtype: of queries, keys and values, or its name.

    The other arguments and errors are those of `use_prefill_with_paged_kv_state`.
    """
    _check_state(state, prefill.BatchPrefillWithRaggedKVCacheWrapper)
    rows = _int32(cu_seqlens, "cu_seqlens")

    def begin() -> None:
        state.plan(
            rows,
            rows,
            num_heads,
            num_kv_heads,
            head_size,
            causal=True,
            window_left=window_left or -1,
            q_data_type=query_dtype,
        )

    return _use(prefill_state, state, begin)


def use_decode_state(
    *,
    state: decode.BatchDecodeWithPagedKVCacheWrapper,
    input_lengths: Tensor,
    block_tables: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    page_size: int,
    dtype: torch.dtype | str,
    window_left: int | None,
    query_dtype: torch.dtype | str | None = None,
) -> AbstractContextManager[None]:
    """A context manager: within it, `decode_state` is this state, planned for a batch of one new token per request.

    The state is from `create_decode_state` or `create_decode_state_cuda_graphs`; the other arguments and the errors are
    those of `use_prefill_with_paged_kv_state`. A state for CUDA graphs copies the tables into its buffers, so that what
    was captured reads this batch.
    """
    _check_state(state, decode.BatchDecodeWithPagedKVCacheWrapper)
    pages = _pages(block_tables, input_lengths, page_size)
    layer = (Heads(num_heads, num_kv_heads, head_size, head_size), *_dtypes(dtype, query_dtype))
    return _use(decode_state, state, lambda: plan(state, pages, *layer, window_left=window_left or -1))


def _check_state(state: object, kind: type[AttentionWrapper]) -> None:
    check(isinstance(state, kind), "state", type(state).__name__, f"a {kind.__name__} is needed here")


def _int32(x: Tensor, name: str) -> Tensor:
    """A table, int32 where it is int64, as LoRAX's sums of lengths may be. Never waits for the device."""
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        return table(x, name)
    short = as_int32(x)
    if x.is_cpu:
        refuse_first(short != x, name, x, "less than 2**31")
    return table(short, name)


def _pages(block_tables: Tensor, input_lengths: Tensor, page_size: int) -> PageTable:
    pages, lengths = _int32(block_tables, "block_tables"), _int32(input_lengths, "input_lengths")
    return PageTable.from_pages(pages, lengths, page_size)


def _dtypes(dtype: torch.dtype | str, query_dtype: torch.dtype | str | None) -> tuple[torch.dtype, torch.dtype]:
    """Of queries, and of the cache."""
    of_cache = as_dtype(dtype)
    if query_dtype is not None:
        return as_dtype(query_dtype, "query_dtype"), of_cache
    return torch.float16 if of_cache in FLOATS8 else of_cache, of_cache


_users: dict[int, tuple[int, int]] = {}  # states in use, by id, and the thread and task that use them


def _user() -> tuple[int, int]:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return threading.get_ident(), id(task)


@contextmanager
def _use(variable: ContextVar[Any], state: Any, begin: Callable[[], None]) -> Iterator[None]:
    """Plan a state and make it current. Nested in itself, it has the outer plan again afterwards."""
    outer = _users.get(id(state))
    if outer not in (None, _user()):
        raise RuntimeError("this state is in use by another thread or task, whose plan it holds: make another state")
    if outer is not None and state.is_cuda_graph_enabled:
        raise RuntimeError("this state is in use, and its buffers hold that batch: make another state")
    plan = state.planned
    _users[id(state)] = _user()
    token = variable.set(state)
    try:
        begin()
        yield
    finally:
        variable.reset(token)
        state.end_forward()
        if outer is None:
            del _users[id(state)]
        else:
            state.planned = plan
