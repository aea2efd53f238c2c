"""The attention states of LoRAX: wrappers that a context manager plans and puts into a context variable.

Names, parameters and meanings are those of `lorax_server.utils.flashinfer_attention`. A state is made once. Each batch
enters the context manager of its phase, and attention layers read the state from the context variable::

    state = create_decode_state(device=device, num_heads=32, num_kv_heads=8)
    with use_decode_state(state=state, input_lengths=..., block_tables=..., ...):
        ...  # in a layer:
        out = decode_state.get().run(query, (k_cache, v_cache))

The context managers plan causal attention. Arguments of `run` and `forward` that are omitted or None have the planned
value, and arguments of `forward` hold for one call, so layers may differ. (In FlashInfer, `forward` changes the plan
and is not causal by default.)
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
from quire.definition.checks import as_dtype, check
from quire.definition.pages import PageTable, as_int32, refuse_first, table
from quire.definition.spec import FLOATS8
from quire.steps import Heads, plan, workspace

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

# Sizes of workspaces count bytes.
WORKSPACE_SIZE = 128 << 20

# Arguments of `forward` that `run` does not have, and their names in `AttentionSpec`.
_PLANNED = {
    "causal": "causal",
    "pos_encoding_mode": "pos_encoding",
    "rope_scale": "rope_scale",
    "rope_theta": "rope_theta",
}


class _State:
    """A wrapper whose `forward` leaves the plan as it was."""

    # The signature of FlashInfer's `forward`.
    _of_forward: Signature

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        """`run` with the arguments of FlashInfer's deprecated `forward`, for this call only. Arguments that are omitted
        or None have the planned value.
        """
        arguments = self._of_forward.bind(self, *args, **options).arguments
        del arguments["self"]
        arguments.pop("use_fp16_qk_reduction", None)
        plan = self.require_plan()
        changes = {field: arguments.pop(name, None) for name, field in _PLANNED.items()}
        changed = plan.replace(**{field: x for field, x in changes.items() if x is not None})
        if changed is plan:
            return self.run(**arguments)
        self.planned = changed
        try:
            return self.run(**arguments)
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
    """The workspace of 128 MiB, uint8, that all states of a device share. The first call allocates it."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return workspace(device, WORKSPACE_SIZE)


def create_prefill_with_paged_kv_state(*, device: torch.device | str) -> prefill.BatchPrefillWithPagedKVCacheWrapper:
    """A state for prefill over a paged cache."""
    return _PagedState(get_workspace(device), "NHD")


def create_prefill_state(*, device: torch.device | str) -> prefill.BatchPrefillWithRaggedKVCacheWrapper:
    """A state for prefill over ragged keys and values, which are not read from a cache."""
    return _RaggedState(get_workspace(device), "NHD")


def create_decode_state(
    *, device: torch.device | str, num_heads: int, num_kv_heads: int
) -> decode.BatchDecodeWithPagedKVCacheWrapper:
    """A state for decode; it uses tensor cores if more than 4 query heads share a KV head."""
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
    """A state for decode in CUDA graphs, which writes its plans into these buffers.

    Args:
        block_tables: int32 [the largest number of pages of a batch].
        block_tables_ptr: int32 [batch_size + 1].
        last_page_len: int32 [batch_size].

    Raises:
        ValueError: a buffer has another dtype, device or size.
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
    """A context manager that plans a state for a batch, causal, and sets `prefill_with_paged_kv_state` to it.

    Args:
        state: from `create_prefill_with_paged_kv_state`.
        block_tables: the pages of all requests, concatenated; each request has as many as its length needs.
        cu_seqlens: [batch_size + 1], the offsets of the requests among the queries.
        input_lengths: [batch_size], tokens of each request in the cache, including the new ones. All three tables are
            int32 or int64 vectors.
        head_size, page_size, dtype: of the cache.
        window_left: the number of keys to the left of a query that it sees; 0, -1 or None: all.
        query_dtype: of the queries; by default the cache's dtype, or float16 if that is fp8. `run` and `forward` take
            the k_scale and v_scale of an fp8 cache.

    Raises:
        ValueError: an argument is invalid, or tables contradict each other.
        RuntimeError: another thread or task uses the state.
    """
    _check_state(state, prefill.BatchPrefillWithPagedKVCacheWrapper)
    pages = _pages(block_tables, input_lengths, page_size)
    indptr = table(_int32(cu_seqlens, "cu_seqlens"), "cu_seqlens", pages.batch_size + 1)
    layer = (Heads(num_heads, num_kv_heads, head_size, head_size), *_dtypes(dtype, query_dtype))
    options: Any = {"causal": True, "window_left": window_left or -1}
    return _use(prefill_with_paged_kv_state, state, lambda: plan(state, pages, *layer, indptr, **options))


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
    """A context manager that plans a state for a batch, causal, and sets `prefill_state` to it.

    Args:
        state: from `create_prefill_state`.
        cu_seqlens: [batch_size + 1], the offsets of the requests among the queries and among the keys.
        query_dtype: the dtype of queries, keys and values, or its name.

    The other arguments and errors are those of `use_prefill_with_paged_kv_state`.
    """
    _check_state(state, prefill.BatchPrefillWithRaggedKVCacheWrapper)
    indptr = _int32(cu_seqlens, "cu_seqlens")
    heads = (num_heads, num_kv_heads, head_size)
    options: Any = {"causal": True, "window_left": window_left or -1, "q_data_type": query_dtype}
    return _use(prefill_state, state, lambda: state.plan(indptr, indptr, *heads, **options))


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
    """A context manager that plans a state for a batch of one new token per request, and sets `decode_state` to it.

    The state is from `create_decode_state` or `create_decode_state_cuda_graphs`; the other arguments and the errors are
    those of `use_prefill_with_paged_kv_state`. A state for CUDA graphs copies the tables into its buffers, which its
    captured graphs read.
    """
    _check_state(state, decode.BatchDecodeWithPagedKVCacheWrapper)
    pages = _pages(block_tables, input_lengths, page_size)
    layer = (Heads(num_heads, num_kv_heads, head_size, head_size), *_dtypes(dtype, query_dtype))
    return _use(decode_state, state, lambda: plan(state, pages, *layer, window_left=window_left or -1))


def _check_state(state: object, kind: type) -> None:
    check(isinstance(state, kind), "state", type(state).__name__, f"a {kind.__name__} is needed here")


def _int32(x: Tensor, name: str) -> Tensor:
    """A table as int32, converted if it is int64, as LoRAX's cumulative lengths may be. Never waits for the device."""
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
    """The dtypes of the queries and of the cache."""
    kv_dtype = as_dtype(dtype)
    if query_dtype is not None:
        return as_dtype(query_dtype, "query_dtype"), kv_dtype
    return torch.float16 if kv_dtype in FLOATS8 else kv_dtype, kv_dtype


# The thread and the task that use a state, by the state's id.
_users: dict[int, tuple[int, int]] = {}


def _user() -> tuple[int, int]:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # This thread has no running event loop.
        task = None
    return threading.get_ident(), id(task)


@contextmanager
def _use(variable: ContextVar[Any], state: Any, make_plan: Callable[[], None]) -> Iterator[None]:
    """Plan a state and set the context variable to it. A state that is nested in itself gets its outer plan back."""
    outer = _users.get(id(state))
    if outer not in (None, _user()):
        raise RuntimeError("this state is in use by another thread or task, whose plan it holds: make another state")
    if outer is not None and state.is_cuda_graph_enabled:
        raise RuntimeError("this state is in use, and its buffers hold that batch: make another state")
    outer_plan = state.planned
    _users[id(state)] = _user()
    token = variable.set(state)
    try:
        make_plan()
        yield
    finally:
        variable.reset(token)
        state.end_forward()
        if outer is None:
            del _users[id(state)]
        else:
            state.planned = outer_plan
