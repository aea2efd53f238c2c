"""The base of the prefill wrappers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.definition.block_tables import block_table, row_starts
from quire.definition.checks import check
from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout, table
from quire.definition.tensors import check_optional, check_tensors
from quire.wrappers.arguments import LayerArgs
from quire.wrappers.base import AttentionWrapper
from quire.wrappers.buffers import fixed_batch
from quire.wrappers.plan import longest_request


class PrefillWrapper(AttentionWrapper):
    """Query rows, custom masks and items of a batch: for prefill over pages and over ragged rows."""

    _qo_indptr_buf: Tensor | None

    def begin_forward(self, *args: Any, head_dim: int | None = None, **options: Any) -> None:
        """Deprecated: `plan`, whose head_dim_qk was called head_dim."""
        if head_dim is not None:
            options["head_dim_qk"] = head_dim
        self.plan(*args, **options)

    def _plan_lengths(
        self, layer: LayerArgs, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
    ) -> None:
        """Plan a batch over pages from the requests' lengths in tokens, as `quire.attention.BatchAttention.plan`."""
        if self._capture.captured:
            self._capture.begin_plan(type(self).__name__)
        if self._refresh_tables(layer, None, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            return
        check_tensors(kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        pages = self._pages_of_lengths(kv_indptr, kv_indices, kv_len_arr, layer.page_size, "kv_len_arr")
        qo = self._query_rows(table(qo_indptr, "qo_indptr", pages.batch_size + 1))
        self._commit(layer, qo, pages, max_q_len=longest_request(qo, None, self._use_cuda_graph, self.device))

    def _plan_block_tables(
        self,
        layer: LayerArgs,
        block_tables: Tensor,
        seq_lens: Tensor,
        qo_indptr: Tensor | None,
        max_q_len: int | None,
    ) -> None:
        """Plan a batch over the rows of a block table, as `quire.attention.BlockTableAttention.plan`."""
        if self.checking:
            check_tensors(block_tables=block_tables, seq_lens=seq_lens)
            block_tables, seq_lens = block_tables.cpu(), seq_lens.cpu()
        pages = block_table(block_tables, seq_lens, layer.page_size)
        if qo_indptr is None:
            qo_indptr, max_q_len = row_starts(self.device, pages.batch_size, layer.q_len), layer.q_len
        if self._refresh_tables(layer, max_q_len, qo_indptr, *pages.tables):
            return
        qo = self._rows(table(qo_indptr, "qo_indptr", pages.batch_size + 1))
        self._commit(layer, qo, pages, max_q_len=longest_request(qo, max_q_len, False, self.device))

    def _query_rows(self, qo_indptr: Tensor) -> RaggedLayout:
        """The query rows of a new plan; ValueError for another batch size than that of the buffers for CUDA graphs."""
        if self._use_cuda_graph:
            fixed_batch(self._qo_indptr_buf, "qo_indptr_buf", len(qo_indptr) - 1, extra=1)
        return self._rows(qo_indptr)

    def _pack_mask(
        self,
        custom_mask: Tensor | None,
        packed_custom_mask: Tensor | None,
        qo: RaggedLayout,
        kv: PageTable | RaggedLayout,
    ) -> PackedMask | None:
        """The requests' masks, packed; the packed form is used where both are given."""
        check_optional(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        if packed_custom_mask is not None:
            return PackedMask.from_packed(packed_custom_mask.to(self.device), qo.lengths(), kv.lengths())
        if custom_mask is not None:
            return PackedMask.from_bool(custom_mask.to(self.device), qo.lengths(), kv.lengths())
        return None

    def _items(
        self, prefix_lens: Tensor | None, positions: Tensor | None, length: int, mask: PackedMask | None
    ) -> Items | None:
        """The items of the requests' prompts (multi-item scoring)."""
        if prefix_lens is None and positions is None:
            return None
        if prefix_lens is None or positions is None:
            raise ValueError("prefix_len_ptr and token_pos_in_items_ptr belong together")
        check_tensors(prefix_len_ptr=prefix_lens, token_pos_in_items_ptr=positions)
        check(mask is None, "custom_mask", "given", "none with token_pos_in_items_ptr")
        return Items(prefix_lens.reshape(-1).to(self.device), positions.to(self.device), length)
