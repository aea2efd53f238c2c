"""Cascade attention, and merging the partial states of attention over disjoint sets of keys.

Names, parameters and meanings are those of `flashinfer.cascade`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.checks import check
from quire.definition.pages import check_indptr, table
from quire.definition.state import merge_ragged
from quire.definition.tensors import (
    check_cache,
    check_no_overlap,
    check_optional,
    check_tensor,
    check_tensors,
    refuse_grad,
)
from quire.kernels import merge
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache_return_lse
from quire.wrappers.arguments import DType
from quire.wrappers.composite import CompositeWrapper

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]


def _check_state(v: Tensor, s: Tensor, names: tuple[str, str]) -> None:
    if v.ndim != 3:
        raise ValueError(f"{names[0]} has shape {list(v.shape)}: it must be [tokens, heads, head_dim]")
    check_tensor(v, names[0], tuple(v.shape), None, v.device)
    check_tensor(s, names[1], tuple(v.shape[:2]), torch.float32, v.device)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the partial states of two disjoint sets of keys.

    Args:
        v_a, v_b: outputs, [tokens, heads, head_dim], of one floating-point dtype.
        s_a, s_b: the LSE (base 2) of v_a and v_b, [tokens, heads]; converted to float32.

    Returns:
        (v, s) over the union of the sets: [tokens, heads, head_dim] of v_a's dtype, and float32 [tokens, heads]. If
        neither set has a visible key, v is 0 and s is -inf.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; in grad mode, a state that requires grad.
    """
    check_tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    refuse_grad(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    s_a, s_b = s_a.float(), s_b.float()
    _check_state(v_a, s_a, ("v_a", "s_a"))
    _check_state(v_b, s_b, ("v_b", "s_b"))
    check_tensor(v_b, "v_b", tuple(v_a.shape), v_a.dtype, v_a.device)
    out, lse = v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)
    merge.merge_state(v_a, s_a, v_b, s_b, out, lse)
    return out, lse


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge the partial state (v_other, s_other) into (v, s).

    Args:
        v, v_other: outputs, [tokens, heads, head_dim], of one floating-point dtype.
        s: float32 [tokens, heads], the LSE (base 2) of v.
        s_other: [tokens, heads], the LSE (base 2) of v_other; converted to float32.
        mask: bool [tokens], any stride: the tokens to merge; v and s of other tokens stay. None: all tokens.

    Raises:
        ValueError: as in `merge_state`; also v or s with overlapping elements.
    """
    check_tensors(v=v, s=s, v_other=v_other, s_other=s_other)
    refuse_grad(v=v, s=s, v_other=v_other, s_other=s_other)
    s_other = s_other.float()
    _check_state(v, s, ("v", "s"))
    _check_state(v_other, s_other, ("v_other", "s_other"))
    check_tensor(v_other, "v_other", tuple(v.shape), v.dtype, v.device)
    check_no_overlap(v, "v")
    check_no_overlap(s, "s")
    check_optional(mask=mask)
    if mask is not None and ((mask.shape, mask.dtype, mask.device) != (v.shape[:1], torch.bool, v.device)):
        found = f"{mask.dtype} of shape {list(mask.shape)} on {mask.device}"
        raise ValueError(f"mask is {found}: it must be torch.bool of shape [{len(v)}] on {v.device}")
    merge.merge_state_in_place(v, s, v_other, s_other, mask)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the partial states of any number of disjoint sets of keys, which may be 0.

    Args:
        v: outputs, [tokens, sets, heads, head_dim].
        s: the LSE (base 2) of v, [tokens, sets, heads]; converted to float32.

    Returns:
        (v, s) over the union of the sets: [tokens, heads, head_dim] of v's dtype, and float32 [tokens, heads].

    Raises:
        ValueError: as in `merge_state`.
    """
    check_tensors(v=v, s=s)
    refuse_grad(v=v, s=s)
    if v.ndim != 4:
        raise ValueError(f"v has shape {list(v.shape)}: it must be [tokens, sets, heads, head_dim]")
    s = s.float()
    check_tensor(v, "v", tuple(v.shape), None, v.device)
    check_tensor(s, "s", tuple(v.shape[:3]), torch.float32, v.device)
    tokens, _, heads, dim = v.shape
    out, lse = v.new_empty(tokens, heads, dim), s.new_empty(tokens, heads)
    merge.merge_states(v, s, out, lse)
    return out, lse


def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a variable number of partial states for each row, as `flashinfer.triton.cascade` does.

    Args:
        v: outputs, [sets, heads, head_dim], ordered by row.
        s: the LSE (base 2) of v, [sets, heads]; converted to float32.
        indptr: int32 or int64 [rows + 1]: row i has the sets indptr[i] to indptr[i + 1], any number of them.

    Returns:
        (v, s) over each row's union: [rows, heads, head_dim] of v's dtype, and float32 [rows, heads]. Never waits for a
        device.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; in grad mode, a state that requires grad; on the
            host also an indptr that decreases or ends beyond the sets.
    """
    check_tensors(v=v, s=s)
    refuse_grad(v=v, s=s)
    s = s.float()
    _check_state(v, s, ("v", "s"))
    indptr = table(indptr, "indptr")
    check(indptr.device == v.device, "indptr.device", str(indptr.device), f"{v.device}, where v lies")
    check_indptr(indptr, "indptr", len(v), "the number of sets")
    return merge_ragged(v, s, indptr)


class MultiLevelCascadeAttentionWrapper(CompositeWrapper):
    """Attention of requests that share prefixes, by levels: each level is a prefill batch over the same paged cache.

    A request of a level is a group of neighbouring requests that share the level's keys. The partial states of all
    levels are merged. The first level has the keys that most requests share, the last one those of single requests.

    Args:
        num_levels: the number of levels, 1 or more.
        float_workspace_buffer, kv_layout, use_cuda_graph: as in `BatchPrefillWithPagedKVCacheWrapper`.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: with
            use_cuda_graph, a buffer for each level, as in `BatchPrefillWithPagedKVCacheWrapper`.

    Raises:
        ValueError: a list with another length than num_levels.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Tensor] | None = None,
    ) -> None:
        check(isinstance(num_levels, int) and num_levels >= 1, "num_levels", num_levels, "1 or more")
        self._num_levels, self._use_cuda_graph = num_levels, use_cuda_graph
        buffers: list[dict[str, Any]] = [{} for _ in range(num_levels)]
        if use_cuda_graph:
            buffers = self._levels(
                "_arr",
                qo_indptr_buf_arr=qo_indptr_buf_arr,
                paged_kv_indptr_buf_arr=paged_kv_indptr_buf_arr,
                paged_kv_indices_buf_arr=paged_kv_indices_buf_arr,
                paged_kv_last_page_len_buf_arr=paged_kv_last_page_len_buf_arr,
            )
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **of_level)
            for of_level in buffers
        ]
        self._wrappers = self._batch_prefill_wrappers

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied to fixed buffers, with fixed batch sizes."""
        return self._use_cuda_graph

    def _levels(self, suffix: str, **arrays: Sequence[Tensor] | None) -> list[dict[str, Any]]:
        """A dict of tensors for each level, from lists of one tensor per level; its keys lack the suffix."""
        for name, array in arrays.items():
            have = None if array is None else len(array)
            check(have == self._num_levels, f"len({name})", have, f"num_levels = {self._num_levels}")
            check_tensors(**{f"{name}[{i}]": x for i, x in enumerate(array or ())})
        named = {name.removesuffix(suffix): array for name, array in arrays.items() if array}
        return [{name: array[i] for name, array in named.items()} for i in range(self._num_levels)]

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: Sequence[Tensor]) -> None:
        """Replace the workspace buffers: one for floats, and one for integers for each level."""
        levels = self._levels("s", int_workspace_buffers=int_workspace_buffers)
        for wrapper, level in zip(self._batch_prefill_wrappers, levels, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, **level)

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int | None = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Record each level's query layout and page table, and the layer for later runs.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for each level, the
                tensor of that name of `BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal: whether the last level is causal; in other levels all queries see all keys.
            pos_encoding_mode, window_left: applied with positions within each level, as in FlashInfer.

        The other arguments and errors are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        levels = self._levels(
            "_arr",
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        for i, (wrapper, tables) in enumerate(zip(self._batch_prefill_wrappers, levels, strict=True)):
            wrapper.plan(
                **tables, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim,
                page_size=page_size, causal=causal and i == self._num_levels - 1, pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
                rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=torch.float32,
            )  # fmt: skip

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted, without effect: k and v may have different strides. ValueError for another variant."""
        check(variant == "independent", "variant", variant, "independent")

    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Attention of one layer.

        Args:
            q: [tokens, num_qo_heads, head_dim], the queries of every level.
            paged_kv_cache: as in `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns:
            [tokens, num_qo_heads, head_dim], of q's dtype; partial states are float32.

        Raises:
            RuntimeError: nothing has been planned.
            ValueError: a tensor that does not fit the plan.
        """
        levels: list[Any] = [x.run_return_lse(q, paged_kv_cache) for x in self._batch_prefill_wrappers]
        return merge.merge_levels(levels, dtype=q.dtype)[0]

    forward = run


_Paged = BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper


class _SharedPrefixWrapper(CompositeWrapper):
    """A wrapper over the requests' own pages, and one prefix of all requests that is not paged."""

    def __init__(self, wrapper: _Paged, kv_layout: str) -> None:
        self._wrappers, self._kv_layout = (wrapper,), kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must be on the wrapper's device."""
        self._wrappers[0].reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _run(
        self, run: Callable[..., Any], q: Tensor, k_shared: Tensor, v_shared: Tensor, cache: Any, sm_scale: float | None
    ) -> Tensor:
        """Merge `run` over the requests' own pages with attention over the prefix."""
        check_tensors(k_shared=k_shared, v_shared=v_shared)
        check_cache(cache, "unique_kv_cache")
        own = run(q, cache)
        shared: Any = single_prefill_with_kv_cache_return_lse(
            q, k_shared, v_shared, o_dtype=torch.float32, kv_layout=self._kv_layout, sm_scale=sm_scale
        )
        return merge.merge_levels([own, shared], dtype=q.dtype)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention of a batch whose requests all start with one prefix, which is stored apart from their pages.

    `MultiLevelCascadeAttentionWrapper` computes the same attention for a prefix that is stored in pages.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD") -> None:
        self._batch_decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        super().__init__(self._batch_decode_wrapper, kv_layout)

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Record the pages after the prefix, with the arguments of `BatchDecodeWithPagedKVCacheWrapper.plan`."""
        self._batch_decode_wrapper.plan(
            table(unique_kv_indptr, "unique_kv_indptr"),
            table(unique_kv_indices, "unique_kv_indices"),
            table(unique_kv_last_page_len, "unique_kv_last_page_len"),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            data_type=data_type,
            o_data_type=torch.float32,
        )

    def forward(
        self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Tensor | tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention of one layer over the prefix and each request's own keys.

        Args:
            q: [batch_size, num_qo_heads, head_dim].
            k_shared, v_shared: NHD [prefix_len, num_kv_heads, head_dim] or HND [num_kv_heads, prefix_len, head_dim].
            unique_kv_cache: as in `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns:
            [batch_size, num_qo_heads, head_dim], of q's dtype.
        """
        return self._run(self._batch_decode_wrapper.run_return_lse, q, k_shared, v_shared, unique_kv_cache, None)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill attention of a batch whose requests all start with one prefix, which is stored apart from their pages.

    `MultiLevelCascadeAttentionWrapper` computes the same attention for a prefix that is stored in pages.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD") -> None:
        self._batch_prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        super().__init__(self._batch_prefill_wrapper, kv_layout)

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Record the query layout, and the pages after the prefix.

        The arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`. `data_type`, which FlashInfer's function
        does not have, is the dtype of q and of the cache.
        """
        self._batch_prefill_wrapper.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
            o_data_type=torch.float32,
        )

    prewarm_paged_kv_stride_variant = MultiLevelCascadeAttentionWrapper.prewarm_paged_kv_stride_variant

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attention of one layer over the prefix and each request's own keys.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim].
            k_shared, v_shared: NHD [prefix_len, num_kv_heads, head_dim] or HND [num_kv_heads, prefix_len, head_dim].
            unique_kv_cache: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
            causal: whether attention is causal among a request's own tokens; all tokens see all of the prefix.
            sm_scale: the factor of logits; None: 1/sqrt(head_dim).
            use_fp16_qk_reduction, rope_scale, rope_theta: accepted, without effect: accumulation is float32, and there
                is no RoPE.

        Returns:
            [qo_indptr[-1], num_qo_heads, head_dim], of q's dtype.
        """
        run = partial(self._batch_prefill_wrapper.forward_return_lse, causal=causal, sm_scale=sm_scale)
        return self._run(run, q, k_shared, v_shared, unique_kv_cache, sm_scale)
