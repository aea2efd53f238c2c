"""Attention in levels, and merging attention states: the outputs over disjoint sets of keys into that over all of them.

Names, parameters and meanings are those of `flashinfer.cascade`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import check_indptr, table
from quire.definition.spec import check
from quire.definition.state import merge_ragged
from quire.definition.tensors import check_apart, check_cache, check_optional, check_tensor, check_tensors, refuse_grad
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
    """Merge the states of two disjoint sets of keys.

    Args:
        v_a, v_b: outputs, [tokens, heads, head_dim], of one dtype.
        s_a, s_b: their lse (base 2), [tokens, heads]; other dtypes than float32 are converted.

    Returns:
        (v, s) of the union; v has v_a's dtype, s is float32. Where neither saw a key, v is 0 and s is -inf.

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
    """Merge the state (v_other, s_other) into (v, s).

    Args:
        v, v_other, s_other: as in `merge_state`.
        s: float32 [tokens, heads].
        mask: bool [tokens], any stride: the tokens to merge; the others keep their state.

    Raises:
        ValueError: as `merge_state`; a state to be written to whose elements overlap.
    """
    check_tensors(v=v, s=s, v_other=v_other, s_other=s_other)
    refuse_grad(v=v, s=s, v_other=v_other, s_other=s_other)
    s_other = s_other.float()
    _check_state(v, s, ("v", "s"))
    _check_state(v_other, s_other, ("v_other", "s_other"))
    check_tensor(v_other, "v_other", tuple(v.shape), v.dtype, v.device)
    check_apart(v, "v")
    check_apart(s, "s")
    check_optional(mask=mask)
    if mask is not None and ((mask.shape, mask.dtype, mask.device) != (v.shape[:1], torch.bool, v.device)):
        given = f"{mask.dtype} of shape {list(mask.shape)} on {mask.device}"
        raise ValueError(f"mask is {given}: it must be torch.bool of shape [{len(v)}] on {v.device}")
    merge.merge_state_in_place(v, s, v_other, s_other, mask)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states of several disjoint sets of keys, or of none.

    Args:
        v: outputs, [tokens, sets, heads, head_dim].
        s: their lse (base 2), [tokens, sets, heads]; other dtypes than float32 are converted.

    Returns:
        v [tokens, heads, head_dim] and s float32 [tokens, heads] of the union.

    Raises:
        ValueError: as `merge_state`.
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
    """Merge states of which each row has a number of its own, as `flashinfer.triton.cascade` does.

    Args:
        v: outputs, [sets, heads, head_dim], those of a row one after another.
        s: their lse (base 2), [sets, heads]; other dtypes than float32 are converted.
        indptr: int32 or int64 [rows + 1]: row i has the sets indptr[i] to indptr[i + 1], which may be none.

    Returns:
        v [rows, heads, head_dim] and s float32 [rows, heads] of each row's union. Never waits for a device.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; in grad mode, a state that requires grad; on the
            host also an indptr that falls or ends beyond the sets.
    """
    check_tensors(v=v, s=s)
    refuse_grad(v=v, s=s)
    s = s.float()
    _check_state(v, s, ("v", "s"))
    indptr = table(indptr, "indptr")
    check(indptr.device == v.device, "indptr.device", str(indptr.device), f"{v.device}, where v lies")
    check_indptr(indptr, "indptr", len(v), "the number of sets")
    return merge_ragged(v, s, indptr)


def _merge_levels(levels: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The output over all levels' keys. Each level's (v, s) is float32; they are rounded once, at the end."""
    v, s = levels[0]
    out = torch.empty_like(v, dtype=dtype)
    merge.merge_levels(levels, out, torch.empty_like(s))
    return out


def _check_variant(variant: str) -> None:
    check(variant == "independent", "variant", variant, "independent")


class MultiLevelCascadeAttentionWrapper(CompositeWrapper):
    """Attention of requests that share prefixes, level by level: each level is a batch of its own over the same pages.

    All requests of a level see that level's keys; what the levels saw is merged. The first level has the keys that
    most requests share, the last one those of single requests.

    Args:
        num_levels: how many levels there are.
        float_workspace_buffer, kv_layout, use_cuda_graph: as in `BatchPrefillWithPagedKVCacheWrapper`.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: for each
            level, that wrapper's buffer; with use_cuda_graph.

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
        """Whether plans go into buffers given once, with fixed batch sizes."""
        return self._use_cuda_graph

    def _levels(self, suffix: str, **arrays: Sequence[Tensor] | None) -> list[dict[str, Any]]:
        """Lists with a tensor for each level, as one set of tensors for each level, named without the suffix."""
        for name, array in arrays.items():
            have = None if array is None else len(array)
            check(have == self._num_levels, f"len({name})", have, f"num_levels = {self._num_levels}")
            check_tensors(**{f"{name}[{i}]": x for i, x in enumerate(array or ())})
        given = {name.removesuffix(suffix): array for name, array in arrays.items() if array}
        return [{name: array[i] for name, array in given.items()} for i in range(self._num_levels)]

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: Sequence[Tensor]) -> None:
        """Replace the workspace buffers, of which each level has an own for integers."""
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
        """Record each level's query rows and pages, and the layer that runs share.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for each level, the
                tensor of that name of `BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal: of the last level; in the others, all queries see all keys.
            pos_encoding_mode, window_left: their positions count within a level, as FlashInfer's do.

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
                **tables,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim_qk=head_dim,
                page_size=page_size,
                causal=causal and i == self._num_levels - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=torch.float32,
            )

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted: k and v may differ in strides without any preparation."""
        _check_variant(variant)

    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Attention of one layer.

        Args:
            q: [tokens, num_qo_heads, head_dim], the rows of every level.
            paged_kv_cache: as in `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns:
            [tokens, num_qo_heads, head_dim], of q's dtype; levels are computed and merged in float32.

        Raises:
            RuntimeError: nothing has been planned.
            ValueError: a tensor that does not fit the plan.
        """
        return _merge_levels([x.run_return_lse(q, paged_kv_cache) for x in self._batch_prefill_wrappers], q.dtype)

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(CompositeWrapper):
    """Decode attention of a batch whose requests all begin with one prefix, kept apart from their pages.

    `MultiLevelCascadeAttentionWrapper` does the same with the prefix in pages, too.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD") -> None:
        self._batch_decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._wrappers = (self._batch_decode_wrapper,)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must lie on the wrapper's device."""
        self._batch_decode_wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

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
        """Record the pages of what follows the prefix: the arguments of `BatchDecodeWithPagedKVCacheWrapper.plan`."""
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
        check_tensors(k_shared=k_shared, v_shared=v_shared)
        check_cache(unique_kv_cache, "unique_kv_cache")
        own = self._batch_decode_wrapper.run_return_lse(q, unique_kv_cache)
        shared = single_prefill_with_kv_cache_return_lse(
            q, k_shared, v_shared, o_dtype=torch.float32, kv_layout=self._kv_layout
        )
        return _merge_levels([own, shared], q.dtype)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(CompositeWrapper):
    """Prefill attention of a batch whose requests all begin with one prefix, kept apart from their pages.

    `MultiLevelCascadeAttentionWrapper` does the same with the prefix in pages, too.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD") -> None:
        self._batch_prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._wrappers = (self._batch_prefill_wrapper,)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must lie on the wrapper's device."""
        self._batch_prefill_wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

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
        """Record the query rows, and the pages of what follows the prefix.

        The arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`; `data_type`, which FlashInfer does not
        have here, is the dtype of q and of the cache.
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

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted: k and v may differ in strides without any preparation."""
        _check_variant(variant)

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
            causal: among a request's own tokens; all of them see all of the prefix.
            sm_scale: the logits' factor, 1/sqrt(head_dim) by default.
            use_fp16_qk_reduction, rope_scale, rope_theta: accepted: sums are float32, and nothing is rotated here.

        Returns:
            [qo_indptr[-1], num_qo_heads, head_dim], of q's dtype.
        """
        check_tensors(k_shared=k_shared, v_shared=v_shared)
        check_cache(unique_kv_cache, "unique_kv_cache")
        own = self._batch_prefill_wrapper.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        shared = single_prefill_with_kv_cache_return_lse(
            q, k_shared, v_shared, o_dtype=torch.float32, kv_layout=self._kv_layout, sm_scale=sm_scale
        )
        return _merge_levels([own, shared], q.dtype)
