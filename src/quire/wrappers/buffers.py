"""The buffers that callers give wrappers, and the tables that wrappers keep: in such buffers, or as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.definition.masks import PackedMask
from quire.definition.pages import LengthTable, PageTable, RaggedLayout, table
from quire.definition.spec import check


def check_workspace(buffer: Tensor | None, name: str) -> None:
    """Refuse a workspace that is no tensor, or whose address is not a multiple of 16."""
    if buffer is None:
        return
    if not isinstance(buffer, Tensor):
        raise ValueError(f"{name} is a {type(buffer).__name__}: a tensor is needed")
    if buffer.numel() and buffer.data_ptr() % 16:
        raise ValueError(f"{name} must be 16-byte aligned")


def check_buffers(mode: str, batch_from: str, **buffers: Tensor | None) -> None:
    """Refuse buffers of a CUDA-graph wrapper that cannot hold its plans' tables: an int32 vector each, those named
    "indptr" one longer than the batch and those named "last_page_len" as long.

    Args:
        mode: what FlashInfer's messages call a CUDA graph in this wrapper.
        batch_from: the name of the buffer that tells the batch size.
    """
    for name, x in buffers.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} should be a torch.Tensor in {mode} mode")
        check(table(x, name) is x, f"{name}.dtype", x.dtype, "torch.int32, which kernels read")
        check(x.is_contiguous(), f"{name}.stride()", x.stride(), "contiguous")
    sizes = {name: len(x) - ("indptr" in name) for name, x in buffers.items() if x is not None}
    for name, size in sizes.items():
        if size != sizes[batch_from] and "indices" not in name:
            wanted = "batch_size + 1" if "indptr" in name else "batch_size"
            noun = "size" if mode == "cudagraph" else "length"
            raise ValueError(f"The {noun} of {name} should be {wanted}: the batch has {sizes[batch_from]} requests")


def fitting(buffer: Tensor | None, values: Tensor, name: str) -> Tensor:
    """The buffer that a CUDA-graph wrapper was given for a table; it must hold the table, and be of its dtype."""
    if buffer is None:
        raise ValueError(f"{name} is needed with use_cuda_graph=True")
    check(buffer.dtype == values.dtype, f"{name}.dtype", buffer.dtype, f"{values.dtype}, which kernels read")
    if len(values) > len(buffer):
        raise ValueError(f"{name} holds {len(buffer)} entries: this plan needs {len(values)}")
    return buffer


def same(x: object, other: Tensor) -> bool:
    """Whether two tensors are views of equal shape of the same memory."""
    if x is other:
        return True
    if type(x) is not Tensor or x.data_ptr() != other.data_ptr() or x.dtype != other.dtype or x.device != other.device:
        return False
    return x.shape == other.shape and x.stride() == other.stride()


def fixed_batch(buffer: Tensor | None, name: str, batch_size: int, extra: int = 0) -> None:
    """Refuse a batch of another size than the buffers of a CUDA-graph wrapper were made for."""
    if buffer is None:
        raise ValueError(f"{name} is needed with use_cuda_graph=True")
    fixed = len(buffer) - extra
    if batch_size != fixed:
        raise ValueError(f"the batch has {batch_size} requests: {name} was made for {fixed}, and a CUDA graph is fixed")


class TableBuffers:
    """Where a wrapper keeps the tables of its plan: in the buffers that it was given for CUDA graphs, or as they came.

    Engines read these tables from the attributes in which FlashInfer has them, which are those named here.
    """

    _qo_buffer: ClassVar[str] = "_qo_indptr_buf"
    _kv_buffers: ClassVar[tuple[str, ...]] = (
        "_paged_kv_indptr_buf",
        "_paged_kv_indices_buf",
        "_paged_kv_last_page_len_buf",
    )
    _custom_mask_buf: Tensor | None
    _mask_indptr_buf: Tensor | None
    device: torch.device
    checking: bool
    _use_cuda_graph: bool
    _current: Any  # Plan | None
    _qo_indptr_buf: Tensor | None

    def _together(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Tables on one device: on the host, to be checked, if all lie there or checks are asked for."""
        host = self.checking or all(x.is_cpu for x in tables)
        return [x.cpu() if host else x.to(self.device, non_blocking=True) for x in tables]

    def _pages(self, tables: Sequence[Tensor], page_size: int) -> PageTable:
        """A page table of (indptr, indices, last_page_len), int32 vectors. Its contents are checked if they lie on the
        host or if checks are asked for.
        """
        indptr, indices, last_page_len = tables
        on_host = all(x.is_cpu for x in tables)
        if self.checking or on_host:
            checked = PageTable(indptr.cpu(), indices.cpu(), last_page_len.cpu(), page_size)
            if on_host:
                return checked
        indptr, indices, last_page_len = (x.to(self.device, non_blocking=True) for x in tables)
        return PageTable(indptr, indices, last_page_len, page_size)

    def _rows(self, indptr: Tensor) -> RaggedLayout:
        """Ragged rows of an int32 indptr, whose contents are checked as those of `_pages`."""
        if self.checking:
            RaggedLayout(indptr.cpu())
        return RaggedLayout(indptr)

    def _equal_rows(self, batch_size: int, q_len: int) -> RaggedLayout:
        """The rows of requests that have q_len query tokens each: those of the last plan where they are equal, since
        captured graphs read them.
        """
        plan = self._current
        if plan is not None and plan.max_q_len == q_len and plan.qo.batch_size == batch_size:
            return plan.qo
        rows = torch.arange(0, batch_size * q_len + 1, q_len, dtype=torch.int32, device=self.device)
        self._qo_indptr_buf = rows
        return RaggedLayout(rows)

    def _hold(self, name: str, values: Tensor, non_blocking: bool) -> Tensor:
        """A table on the wrapper's device, kept in the attribute `name`: in the buffer there, or as it is."""
        if self._use_cuda_graph:
            buffer = fitting(getattr(self, name), values, name.removeprefix("_"))
            if buffer is not values:
                buffer[: len(values)].copy_(values, non_blocking=non_blocking)
            return buffer
        if values.device != self.device or not values.is_contiguous():
            values = values.to(self.device, non_blocking=non_blocking).contiguous()
        setattr(self, name, values)
        return values

    def _hold_rows(self, rows: RaggedLayout, name: str, non_blocking: bool) -> RaggedLayout:
        """Ragged rows whose indptr is kept in the attribute `name`."""
        held = self._hold(name, rows.indptr, non_blocking)
        return rows if held is rows.indptr else RaggedLayout(held)

    def _hold_keys(self, kv: PageTable | RaggedLayout, non_blocking: bool) -> PageTable | RaggedLayout:
        """A page table, or ragged rows of keys, whose tables are kept in the attributes `_kv_buffers`."""
        if isinstance(kv, RaggedLayout):
            return self._hold_rows(kv, self._kv_buffers[0], non_blocking)
        tables = (kv.indptr, kv.indices, kv.per_request)
        indptr, indices, per_request = (
            self._hold(name, x, non_blocking) for name, x in zip(self._kv_buffers, tables, strict=True)
        )
        if indptr is tables[0] and indices is tables[1] and per_request is tables[2]:
            return kv
        if isinstance(kv, LengthTable):
            return LengthTable.of(indptr, indices, per_request, kv.page_size, "kv_len_arr")
        return PageTable(indptr, indices, per_request, kv.page_size)

    def _hold_mask(self, mask: PackedMask) -> PackedMask:
        """Packed masks, in the buffers for CUDA graphs where there are such."""
        if not self._use_cuda_graph:
            return mask
        bits = fitting(self._custom_mask_buf, mask.bits, "custom_mask_buf")
        indptr = fitting(self._mask_indptr_buf, mask.indptr, "mask_indptr_buf")
        bits[: len(mask.bits)] = mask.bits
        indptr[: len(mask.indptr)] = mask.indptr
        return PackedMask(bits, indptr)
