"""Planning the wrappers of a step from the rows of req_to_token, and the resulting metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.backends.token_pool.slots import Requests, Slots, WrapperDispatch, total
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import PageTable, RaggedLayout
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.steps import Heads, pack_mask, plan, prefix_window_mask


@dataclass
class DecodeMetadata:
    """The metadata of a decode step.

    Attributes:
        decode_wrappers: one or two planned wrappers, see `WrapperDispatch`.
        num_tokens: the number of new tokens, one for each request.
    """

    decode_wrappers: list[BatchDecodeWithPagedKVCacheWrapper]
    num_tokens: int = 0


@dataclass
class PrefillMetadata:
    """The metadata of an extend, mixed or target-verify step.

    Attributes:
        prefill_wrappers: one or two wrappers over pages, see `WrapperDispatch`.
        use_ragged: whether layers that pass keys read the new ones from these rows instead of the pool.
        extend_no_prefix: whether no request has tokens before its new ones, so the rows are all keys.
        num_tokens: the number of new tokens; 0 if it is unknown.
        masked: whether a custom mask was planned.
        step: plans a wrapper when a layer first needs it; None: the wrappers are planned already.
    """

    prefill_wrappers: list[BatchPrefillWithPagedKVCacheWrapper]
    use_ragged: bool
    extend_no_prefix: bool
    num_tokens: int = 0
    masked: bool = False
    step: ExtendStep | None = None


class IndicesUpdaterDecode:
    """Plans decode wrappers."""

    def __init__(self, slots: Slots, heads: Heads, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.slots, self.heads = slots, heads
        self.q_dtype, self.kv_dtype = q_dtype, kv_dtype

    def update(self, requests: Requests, decode_wrappers: Sequence[BatchDecodeWithPagedKVCacheWrapper]) -> None:
        """Plan for requests whose lengths include the one query token of each request."""
        self.slots.check(requests.seq_lens_cpu)
        for wrapper, pages in zip(decode_wrappers, self.slots.tables(requests), strict=True):
            plan(wrapper, pages, self.heads, self.q_dtype, self.kv_dtype)


class IndicesUpdaterPrefill:
    """Plans prefill wrappers: at once for target-verify, and when a layer first needs one for extend steps."""

    def __init__(
        self, slots: Slots, heads: Heads, q_dtype: torch.dtype, kv_dtype: torch.dtype, workspace: Tensor
    ) -> None:
        self.slots, self.heads = slots, heads
        self.q_dtype, self.kv_dtype = q_dtype, kv_dtype
        self._workspace = workspace
        self._spare: dict[tuple[str, Any], Any] = {}

    def spare(self, kind: str, which: Any, wrapper: type) -> Any:
        """A wrapper that only some models need, made once and reused in later steps."""
        if (kind, which) not in self._spare:
            self._spare[kind, which] = wrapper(self._workspace)
        return self._spare[kind, which]

    def extend(self, batch: Any, wrappers: list[BatchPrefillWithPagedKVCacheWrapper], ragged: Any) -> PrefillMetadata:
        """The metadata of an extend step (see `ForwardBatch`), whose wrappers are not planned yet."""
        prefixes, counts = batch.extend_prefix_lens_cpu, getattr(batch, "extend_seq_lens_cpu", None)
        if batch.extend_prefix_lens is None:
            raise ValueError("extend_prefix_lens is None: extend needs each request's tokens before the new ones")
        self.slots.check(batch.seq_lens_cpu)
        tokens = sum(counts) if counts is not None else getattr(batch, "extend_num_tokens", None) or 0
        no_prefix = prefixes is not None and not any(prefixes)
        return PrefillMetadata(wrappers, True, no_prefix, tokens, step=ExtendStep(self, batch, wrappers, ragged))

    def verify(
        self, metadata: PrefillMetadata, requests: Requests, draft_token_num: int, custom_mask: Tensor | None
    ) -> None:
        """Plan for requests with draft_token_num drafted tokens each, which their lengths do not include."""
        self.slots.check(requests.seq_lens_cpu)
        stop, device = len(requests.seq_lens) * draft_token_num + 1, requests.seq_lens.device
        qo_indptr = torch.arange(0, stop, draft_token_num, dtype=torch.int32, device=device)
        requests = requests.drafting(draft_token_num)
        packed = None
        if custom_mask is not None:
            area = None if requests.entries is None else requests.entries * draft_token_num
            packed = pack_mask(self.sized(custom_mask, area), qo_indptr.diff(), requests.seq_lens)
        for i, (wrapper, pages) in enumerate(zip(metadata.prefill_wrappers, self.slots.tables(requests), strict=True)):
            self.plan(wrapper, pages, qo_indptr, i, packed, draft_token_num)

    def sized(self, mask: Tensor, area: int | None) -> Tensor:
        """The custom mask; ValueError if its size is not `area`, the number of its entries if that is known."""
        if area is not None and mask.numel() != area:
            raise ValueError(f"custom_mask has {mask.numel()} entries: the sum of draft tokens * kv_len is {area}")
        return mask

    def plan(
        self,
        wrapper: Any,
        pages: PageTable,
        qo_indptr: Tensor,
        index: int,
        mask: Tensor | None = None,
        max_q_len: int | None = None,
    ) -> None:
        """Plan one of the wrappers over the pages of all tokens; max_q_len: the most query tokens of a request."""
        cross = index == 1 and self.slots.reason is WrapperDispatch.CROSS_ATTENTION
        options: dict[str, Any] = {"causal": not cross, "packed_custom_mask": None if cross else mask}
        options["max_token_per_sequence"] = max_q_len
        plan(wrapper, pages, self.heads, self.q_dtype, self.kv_dtype, qo_indptr, **options)


class ExtendStep:
    """The tables of an extend step, and its wrappers, each planned when a layer first needs it.

    Args:
        updater: plans the wrappers.
        batch: see `ForwardBatch`.
        paged, ragged: the wrappers over pages, and the wrapper over the rows of new tokens.
    """

    def __init__(self, updater: IndicesUpdaterPrefill, batch: Any, paged: list[Any], ragged: Any) -> None:
        self._updater, self._batch = updater, batch
        self._paged, self._ragged = paged, ragged
        # The wrappers that have a plan.
        self._wrappers: dict[Any, Any] = {}

    def paged(self, index: int) -> BatchPrefillWithPagedKVCacheWrapper:
        """The wrapper over all tokens of the requests, or over all tokens of their encoders."""
        if ("paged", index) not in self._wrappers:
            wrapper = self._wrappers["paged", index] = self._paged[index]
            self._updater.plan(wrapper, self._tables[index], self._qo_indptr, index)
        return self._wrappers["paged", index]

    def ragged(self, causal: bool) -> BatchPrefillWithRaggedKVCacheWrapper:
        """The wrapper over the rows of the new tokens."""
        if ("ragged", causal) not in self._wrappers:
            wrapper = self._ragged
            if not causal:
                wrapper = self._updater.spare("ragged", causal, BatchPrefillWithRaggedKVCacheWrapper)
            h, dtype = self._updater.heads, self._updater.q_dtype
            counts = (h.num_qo_heads, h.num_kv_heads, h.head_dim_qk, h.head_dim_vo)
            wrapper.plan(self._qo_indptr, self._qo_indptr, *counts, causal=causal, q_data_type=dtype)
            self._wrappers["ragged", causal] = wrapper
        return self._wrappers["ragged", causal]

    def prefix(self, window_left: int) -> BatchPrefillWithPagedKVCacheWrapper:
        """The wrapper over the tokens before the new ones, within the window of each new token. If there is a window
        and the batch lacks extend_prefix_lens_cpu or extend_seq_lens_cpu, this waits for the device.
        """
        if ("prefix", window_left) not in self._wrappers:
            wrapper = self._updater.spare("prefix", window_left, BatchPrefillWithPagedKVCacheWrapper)
            pages, mask = self._prefix_pages(window_left)
            u = self._updater
            plan(wrapper, pages, u.heads, u.q_dtype, u.kv_dtype, self._qo_indptr, packed_custom_mask=mask)
            self._wrappers["prefix", window_left] = wrapper
        return self._wrappers["prefix", window_left]

    @cached_property
    def _new(self) -> Tensor:
        """int32 [batch_size]: the number of new tokens of each request."""
        counts = getattr(self._batch, "extend_seq_lens", None)
        return (self._batch.seq_lens - self._batch.extend_prefix_lens if counts is None else counts).int()

    @cached_property
    def _qo_indptr(self) -> Tensor:
        return RaggedLayout.from_lengths(self._new).indptr

    @cached_property
    def _tables(self) -> list[PageTable]:
        return self._updater.slots.tables(Requests.of(self._batch))

    def _prefix_pages(self, window_left: int) -> tuple[PageTable, Tensor | None]:
        """The pages before the new tokens, and with a window the packed mask of new tokens over these pages."""
        b, slots = self._batch, self._updater.slots
        lengths, starts = b.extend_prefix_lens.int(), None
        mask = None
        if slots.reason is WrapperDispatch.CROSS_ATTENTION:
            starts = slots.encoder(b.encoder_lens)
        entries = total(lengths, b.extend_prefix_lens_cpu)
        if window_left >= 0:
            prefixes, new = _on_host(b.extend_prefix_lens_cpu, lengths), _on_host(b.extend_seq_lens_cpu, self._new)
            host_tails = prefixes.clamp(max=window_left)
            entries, count, area = (int(x.sum()) for x in (host_tails, new, host_tails * new))
            tails = lengths.clamp(max=window_left)
            starts = lengths - tails if starts is None else starts + lengths - tails
            mask = prefix_window_mask(self._new, tails, window_left, count, area)
            mask, lengths = pack_mask(mask, self._new, tails), tails
        return slots.pages(b.req_pool_indices, lengths, entries, starts), mask


def _on_host(values: Sequence[int] | None, on_device: Tensor) -> Tensor:
    return on_device.cpu().long() if values is None else torch.as_tensor(values, dtype=torch.int64)
