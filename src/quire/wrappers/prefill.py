"""What the wrappers of prefill share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import check
from quire.definition.tensors import check_optional, check_tensors
from quire.wrappers.base import AttentionWrapper
from quire.wrappers.buffers import fitting, fixed_batch


class PrefillWrapper(AttentionWrapper):
    """What prefill over pages and over ragged rows share: query rows, custom masks, their CUDA-graph buffers."""

    _qo_indptr_buf: Tensor | None
    _custom_mask_buf: Tensor | None
    _mask_indptr_buf: Tensor | None

    def begin_forward(self, *args: Any, head_dim: int | None = None, **options: Any) -> None:
        """Deprecated: `plan`, whose head_dim_qk was called head_dim."""
        if head_dim is not None:
            options["head_dim_qk"] = head_dim
        self.plan(*args, **options)

    def _plan_queries(self, qo_indptr: Tensor, non_blocking: bool) -> RaggedLayout:
        """The query rows, in the wrapper's buffer or as given."""
        self._begin_plan()
        if self._use_cuda_graph:
            fixed_batch(self._qo_indptr_buf, "qo_indptr_buf", len(qo_indptr) - 1, extra=1)
        return self._hold_rows("qo_indptr_buf", qo_indptr, non_blocking)

    def _hold_rows(self, name: str, indptr: Tensor, non_blocking: bool) -> RaggedLayout:
        """An indptr, an int32 vector, checked where that is free or asked for, then held."""
        rows = RaggedLayout(indptr.cpu() if self._checking else indptr)
        (held,) = self._hold({name: indptr}, non_blocking)
        return rows if held is rows.indptr else RaggedLayout(held)

    def _plan_mask(
        self,
        custom_mask: Tensor | None,
        packed_custom_mask: Tensor | None,
        qo: RaggedLayout,
        kv: PageTable | RaggedLayout,
    ) -> PackedMask | None:
        """The requests' masks, packed; the packed form wins where both are given."""
        check_optional(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        if packed_custom_mask is not None:
            mask = PackedMask.from_packed(packed_custom_mask.to(self.device), qo.lengths(), kv.lengths())
        elif custom_mask is not None:
            mask = PackedMask.from_bool(custom_mask.to(self.device), qo.lengths(), kv.lengths())
        else:
            return None
        if not self._use_cuda_graph:
            return mask
        bits = fitting(self._custom_mask_buf, mask.bits, "custom_mask_buf")
        indptr = fitting(self._mask_indptr_buf, mask.indptr, "mask_indptr_buf")
        bits[: len(mask.bits)] = mask.bits
        indptr[: len(mask.indptr)] = mask.indptr
        return PackedMask(bits, indptr)

    def _plan_items(
        self, prefix_lens: Tensor | None, positions: Tensor | None, length: int, mask: PackedMask | None
    ) -> Items | None:
        """The items of prompts, of multi-item scoring."""
        if prefix_lens is None and positions is None:
            return None
        if prefix_lens is None or positions is None:
            raise ValueError("prefix_len_ptr and token_pos_in_items_ptr belong together")
        check_tensors(prefix_len_ptr=prefix_lens, token_pos_in_items_ptr=positions)
        check(mask is None, "custom_mask", "given", "none with token_pos_in_items_ptr")
        return Items(prefix_lens.reshape(-1).to(self.device), positions.to(self.device), length)
