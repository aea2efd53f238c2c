"""LoRAX's way to attention: wrappers as states that a context manager plans and makes current.

Names, parameters and meanings are those of `lorax_server.utils.flashinfer_attention`. A state is made once; each batch
enters the manager of its phase, and attention layers, which are not handed a state, find it in the context variable::

    state = create_decode_state(device=device, num_heads=32, num_kv_heads=8)
    with use_decode_state(state=state, input_lengths=..., block_tables=..., ...):
        ...  # in a layer:
        out = decode_state.get().run(query, (k_cache, v_cache))

Within a manager's body, `run` and `forward` keep its window where they are given none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from quire import decode, prefill
from quire._wrapper import AttentionWrapper
from quire.attention.pages import PageTable, table
from quire.attention.spec import as_dtype
from quire.serving.base import Heads, plan, workspace

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


class _State(AttentionWrapper):
    """A wrapper whose deprecated `forward`, too, keeps the planned window where it is given none."""

    def forward(self, *args: Any, window_left: int | None = None, **options: Any) -> Any:
        window_left = self._planned().window_left if window_left is None else window_left
        return super().forward(*args, window_left=window_left, **options)


class _Ragged(_State, prefill.BatchPrefillWithRaggedKVCacheWrapper):
    pass


class _Paged(_State, prefill.BatchPrefillWithPagedKVCacheWrapper):
    pass


class _Decode(_State, decode.BatchDecodeWithPagedKVCacheWrapper):
    pass


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
    return _Paged(get_workspace(device), "NHD")


def create_prefill_state(*, device: torch.device | str) -> prefill.BatchPrefillWithRaggedKVCacheWrapper:
    """A state for prefills whose keys and values are rows beside the queries."""
    return _Ragged(get_workspace(device), "NHD")


def create_decode_state(
    *, device: torch.device | str, num_heads: int, num_kv_heads: int
) -> decode.BatchDecodeWithPagedKVCacheWrapper:
    """A state for decode; with tensor cores where more than 4 query heads share a KV head."""
    return _Decode(get_workspace(device), "NHD", use_tensor_cores=num_heads // num_kv_heads > 4)


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
    return _Decode(
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
) -> AbstractContextManager[None]:
    """A context manager: within it, `prefill_with_paged_kv_state` is this state, planned for a batch, causal.

    Args:
        block_tables: int32, the requests' pages one after another, as many as input_lengths fill.
        cu_seqlens: int32 [batch_size + 1], the requests' begins among the queries.
        input_lengths: int32 [batch_size], the requests' tokens in the cache, the new ones counted.
        head_size, page_size, dtype: of the cache; queries have the same dtype.
        window_left: how many keys before its own a query sees; 0, -1 or None: all.

    Raises:
        ValueError: an argument that does not fit.
        RuntimeError: the state is in use by another thread or task.
    """
    pages = PageTable.from_pages(block_tables, table(input_lengths, "input_lengths"), page_size)
    heads, of = Heads(num_heads, num_kv_heads, head_size, head_size), as_dtype(dtype)
    table(cu_seqlens, "cu_seqlens", len(input_lengths) + 1)
    options: Any = {"causal": True, "window_left": window_left or -1}
    return _use(prefill_with_paged_kv_state, state, lambda: plan(state, pages, heads, of, of, cu_seqlens, **options))


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
        cu_seqlens: int32 [batch_size + 1], the requests' begins among the queries and among the keys.
        query_dtype: of queries, keys and values, or its name.

    The other arguments and errors are those of `use_prefill_with_paged_kv_state`.
    """

    def begin() -> None:
        state.plan(
            cu_seqlens,
            cu_seqlens,
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
) -> AbstractContextManager[None]:
    """A context manager: within it, `decode_state` is this state, planned for a batch of one new token per request.

    The arguments and errors are those of `use_prefill_with_paged_kv_state`. A state for CUDA graphs copies the tables
    into its buffers, so that what was captured reads this batch.
    """
    pages = PageTable.from_pages(block_tables, table(input_lengths, "input_lengths"), page_size)
    heads, of = Heads(num_heads, num_kv_heads, head_size, head_size), as_dtype(dtype)
    return _use(decode_state, state, lambda: plan(state, pages, heads, of, of, window_left=window_left or -1))


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
    kept = dict(vars(state))
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
            vars(state).update(kept)
