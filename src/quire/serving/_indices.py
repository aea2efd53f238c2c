"""How pymllm's and SGLang's backends plan a step: from rows of req_to_token to what wrappers need.

A request's slots stand in its row of req_to_token, those of its encoder's tokens first, if it has any. Slots are given
to wrappers as pages of one token. A backend that tells windows or cross-attention apart has two wrappers of a kind:
`WrapperDispatch` says which layers use which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import PageTable, RaggedLayout, refuse_first
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.serving.base import Heads, pack_mask, plan, prefix_window_mask


class WrapperDispatch(Enum):
    """Why a backend has two wrappers of a kind.

    SLIDING_WINDOW: the first is for layers with a window, the second for those without. CROSS_ATTENTION: the first is
    for self-attention, the second for attention over an encoder's tokens.
    """

    SLIDING_WINDOW = auto()
    CROSS_ATTENTION = auto()


@dataclass
class DecodeMetadata:
    """A decode step.

    Attributes:
        decode_wrappers: planned for it, one or two: see `WrapperDispatch`.
        num_tokens: one for each request.
    """

    decode_wrappers: list[BatchDecodeWithPagedKVCacheWrapper]
    num_tokens: int = 0


@dataclass
class PrefillMetadata:
    """An extend, mixed or target-verify step.

    Attributes:
        prefill_wrappers: over pages, one or two: see `WrapperDispatch`.
        use_ragged: whether new keys are attended to as rows, where a layer gives them.
        extend_no_prefix: whether no request has tokens before its new ones, so that rows are all there is.
        num_tokens: the new tokens; 0 if nobody knows.
        masked: whether a custom mask was planned.
        step: plans wrappers when a layer first asks for one; None: they are planned.
    """

    prefill_wrappers: list[BatchPrefillWithPagedKVCacheWrapper]
    use_ragged: bool
    extend_no_prefix: bool
    num_tokens: int = 0
    masked: bool = False
    step: ExtendStep | None = None


def total(lengths: Tensor, on_host: Tensor | Sequence[int] | None = None, known: int | None = None) -> int | None:
    """The sum of lengths, if it can be had without waiting for the device."""
    if lengths.device.type == "cpu":
        on_host = lengths
    return known if on_host is None else int(torch.as_tensor(on_host).sum())


@dataclass(frozen=True, eq=False)
class Slots:
    """Page tables of requests, from the matrix of their slots.

    Attributes:
        req_to_token: int32 [max_reqs, max_context_len].
        wrappers: how many wrappers of a kind there are; reason: why there are two.
    """

    req_to_token: Tensor
    wrappers: int
    reason: WrapperDispatch | None

    def pages(self, rows: Tensor, lengths: Tensor, entries: int | None, starts: Tensor | None = None) -> PageTable:
        """The slots of `lengths` tokens of each request, from column `starts` on; entries: their sum, or more."""
        if len(rows) != len(lengths):
            raise ValueError(f"req_pool_indices has {len(rows)} requests, seq_lens {len(lengths)}")
        entries = None if lengths.device.type == "cpu" else entries
        found = PageTable.from_req_to_token(self.req_to_token, rows, lengths.int(), starts=starts, entries=entries)
        return PageTable.from_slots(found.indices, found.indptr)  # graphs of two wrappers share last_page_len: all 1

    def tables(
        self, rows: Tensor, lengths: Tensor, entries: int | None, encoder_lens: Tensor | None, encoder_lens_cpu: Any
    ) -> list[PageTable]:
        """A table for each wrapper."""
        if self.reason is not WrapperDispatch.CROSS_ATTENTION:
            return [self.pages(rows, lengths, entries)] * self.wrappers
        starts = self.encoder(encoder_lens)
        own = self.pages(rows, lengths, entries, starts)
        return [own, self.pages(rows, starts, total(starts, encoder_lens_cpu))]

    def encoder(self, encoder_lens: Tensor | None) -> Tensor:
        """The encoder's lengths, which cross-attention can't do without."""
        if encoder_lens is None:
            raise ValueError("encoder_lens is None: a backend for cross-attention needs them, 0 for requests without")
        return encoder_lens.int()

    def check(self, seq_lens_cpu: Tensor | None) -> None:
        """Refuse requests that are longer than their rows, where that is known on the host."""
        if seq_lens_cpu is not None:
            width = self.req_to_token.shape[1]
            bad = (seq_lens_cpu < 0) | (seq_lens_cpu > width)
            refuse_first(bad, "seq_lens", seq_lens_cpu, f"0 to max_context_len = {width}")


class IndicesUpdaterDecode:
    """Plans decode wrappers."""

    def __init__(self, slots: Slots, heads: Heads, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.slots, self.heads, self.q_dtype, self.kv_dtype = slots, heads, q_dtype, kv_dtype

    def update(
        self,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
        seq_lens_sum: int | None,
        decode_wrappers: Sequence[BatchDecodeWithPagedKVCacheWrapper],
        encoder_lens: Tensor | None = None,
        encoder_lens_cpu: Sequence[int] | None = None,
    ) -> None:
        """Plan for requests of these lengths, each with one query token, which the lengths count."""
        self.slots.check(seq_lens_cpu)
        entries = total(seq_lens, seq_lens_cpu, seq_lens_sum)
        tables = self.slots.tables(req_pool_indices, seq_lens, entries, encoder_lens, encoder_lens_cpu)
        for wrapper, pages in zip(decode_wrappers, tables, strict=True):
            plan(wrapper, pages, self.heads, self.q_dtype, self.kv_dtype)


class IndicesUpdaterPrefill:
    """Plans prefill wrappers: those of target-verify at once, those of extend steps when layers ask for them."""

    def __init__(
        self, slots: Slots, heads: Heads, q_dtype: torch.dtype, kv_dtype: torch.dtype, workspace: Tensor
    ) -> None:
        self.slots, self.heads, self.q_dtype, self.kv_dtype = slots, heads, q_dtype, kv_dtype
        self._workspace = workspace
        self._spare: dict[tuple[str, Any], Any] = {}

    def spare(self, kind: str, which: Any, wrapper: type) -> Any:
        """A wrapper for what only few models need, kept for later steps."""
        if (kind, which) not in self._spare:
            self._spare[kind, which] = wrapper(self._workspace)
        return self._spare[kind, which]

    def extend(self, batch: Any, wrappers: list[BatchPrefillWithPagedKVCacheWrapper], ragged: Any) -> PrefillMetadata:
        """The metadata of an extend step (see `ForwardBatch`), of which nothing is planned yet."""
        prefixes, counts = batch.extend_prefix_lens_cpu, getattr(batch, "extend_seq_lens_cpu", None)
        if batch.extend_prefix_lens is None:
            raise ValueError("extend_prefix_lens is None: extend needs each request's tokens before the new ones")
        self.slots.check(batch.seq_lens_cpu)
        known = getattr(batch, "extend_num_tokens", None)
        known = sum(counts) if counts is not None else known or 0
        none = prefixes is not None and not any(prefixes)
        return PrefillMetadata(wrappers, True, none, known, step=ExtendStep(self, batch, wrappers, ragged))

    def verify(
        self,
        metadata: PrefillMetadata,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
        seq_lens_sum: int | None,
        draft_token_num: int,
        custom_mask: Tensor | None,
        encoder_lens: Tensor | None = None,
        encoder_lens_cpu: Sequence[int] | None = None,
    ) -> None:
        """Plan for requests that draft so many tokens each, which seq_lens do not count."""
        self.slots.check(seq_lens_cpu)
        batch_size, device = len(seq_lens), seq_lens.device
        entries = total(seq_lens, seq_lens_cpu, seq_lens_sum)
        entries = None if entries is None else entries + batch_size * draft_token_num
        lengths = seq_lens.int() + draft_token_num
        ends = batch_size * draft_token_num + 1
        qo_indptr = torch.arange(0, ends, draft_token_num, dtype=torch.int32, device=device)
        packed = None
        if custom_mask is not None:
            area = None if entries is None else entries * draft_token_num
            packed = pack_mask(self.sized(custom_mask, area), qo_indptr.diff(), lengths)
        tables = self.slots.tables(req_pool_indices, lengths, entries, encoder_lens, encoder_lens_cpu)
        for i, (wrapper, pages) in enumerate(zip(metadata.prefill_wrappers, tables, strict=True)):
            self.plan(wrapper, pages, qo_indptr, i, packed, draft_token_num)

    def sized(self, mask: Tensor, area: int | None) -> Tensor:
        """A custom mask of so many entries, if that is known."""
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
        longest: int | None = None,
    ) -> None:
        """Plan one of the wrappers over all of the requests' pages. longest: the most query tokens of a request."""
        cross = index == 1 and self.slots.reason is WrapperDispatch.CROSS_ATTENTION
        options: dict[str, Any] = {"causal": not cross, "packed_custom_mask": None if cross else mask}
        options["max_token_per_sequence"] = longest
        plan(wrapper, pages, self.heads, self.q_dtype, self.kv_dtype, qo_indptr, **options)


class ExtendStep:
    """An extend step: its tables, and wrappers planned for it when a layer first asks for them.

    Args:
        updater: whose step it is.
        batch: see `ForwardBatch`.
        paged, ragged: the wrappers over pages, and the one over rows.
    """

    def __init__(self, updater: IndicesUpdaterPrefill, batch: Any, paged: list[Any], ragged: Any) -> None:
        self._updater, self._batch, self._paged, self._ragged = updater, batch, paged, ragged
        self._planned: dict[Any, Any] = {}

    def paged(self, index: int) -> BatchPrefillWithPagedKVCacheWrapper:
        """Over all tokens of the requests, new ones too (or over all of their encoders')."""
        if ("paged", index) not in self._planned:
            wrapper = self._planned["paged", index] = self._paged[index]
            self._updater.plan(wrapper, self._tables[index], self._qo_indptr, index)
        return self._planned["paged", index]

    def ragged(self, causal: bool) -> BatchPrefillWithRaggedKVCacheWrapper:
        """Over the new tokens' rows."""
        if ("ragged", causal) not in self._planned:
            wrapper = self._ragged
            if not causal:
                wrapper = self._updater.spare("ragged", causal, BatchPrefillWithRaggedKVCacheWrapper)
            h, dtype = self._updater.heads, self._updater.q_dtype
            counts = (h.num_qo_heads, h.num_kv_heads, h.head_dim_qk, h.head_dim_vo)
            wrapper.plan(self._qo_indptr, self._qo_indptr, *counts, causal=causal, q_data_type=dtype)
            self._planned["ragged", causal] = wrapper
        return self._planned["ragged", causal]

    def prefix(self, window_left: int) -> BatchPrefillWithPagedKVCacheWrapper:
        """Over the tokens before the new ones, as far as a window reaches from each of these. Windows need
        extend_prefix_lens_cpu and extend_seq_lens_cpu: without, this waits for the device.
        """
        if ("prefix", window_left) not in self._planned:
            wrapper = self._updater.spare("prefix", window_left, BatchPrefillWithPagedKVCacheWrapper)
            pages, mask = self._prefix_pages(window_left)
            u = self._updater
            plan(wrapper, pages, u.heads, u.q_dtype, u.kv_dtype, self._qo_indptr, packed_custom_mask=mask)
            self._planned["prefix", window_left] = wrapper
        return self._planned["prefix", window_left]

    @cached_property
    def _new(self) -> Tensor:
        """int32 [batch_size]: new tokens of each request."""
        given = getattr(self._batch, "extend_seq_lens", None)
        return (self._batch.seq_lens - self._batch.extend_prefix_lens if given is None else given).int()

    @cached_property
    def _qo_indptr(self) -> Tensor:
        return RaggedLayout.from_lengths(self._new).indptr

    @cached_property
    def _tables(self) -> list[PageTable]:
        b = self._batch
        entries = total(b.seq_lens, b.seq_lens_cpu, b.seq_lens_sum)
        encoder = (getattr(b, "encoder_lens", None), getattr(b, "encoder_lens_cpu", None))
        return self._updater.slots.tables(b.req_pool_indices, b.seq_lens, entries, *encoder)

    def _prefix_pages(self, window_left: int) -> tuple[PageTable, Tensor | None]:
        """The pages before the new tokens, and which new tokens see them if there is a window."""
        b, slots = self._batch, self._updater.slots
        lengths, starts, mask = b.extend_prefix_lens.int(), None, None
        if slots.reason is WrapperDispatch.CROSS_ATTENTION:
            starts = slots.encoder(b.encoder_lens)
        entries = total(lengths, b.extend_prefix_lens_cpu)
        if window_left >= 0:
            before, new = _on_host(b.extend_prefix_lens_cpu, lengths), _on_host(b.extend_seq_lens_cpu, self._new)
            tails = before.clamp(max=window_left)
            entries, count, area = (int(x.sum()) for x in (tails, new, tails * new))
            last = lengths.clamp(max=window_left)
            starts = lengths - last if starts is None else starts + lengths - last
            mask = prefix_window_mask(self._new, last, window_left, count, area)
            mask, lengths = pack_mask(mask, self._new, last), last
        return slots.pages(b.req_pool_indices, lengths, entries, starts), mask


def _on_host(values: Sequence[int] | None, on_device: Tensor) -> Tensor:
    return on_device.cpu().long() if values is None else torch.as_tensor(values, dtype=torch.int64)
