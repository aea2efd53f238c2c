"""From the arguments of `plan` to a plan, and from the arguments of `run` to the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.definition.checks import check, is_int
from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import LengthTable, PageTable, RaggedLayout, check_pages, table
from quire.definition.spec import AttentionSpec
from quire.definition.tensors import split_cache
from quire.kernels import registry
from quire.kernels.family import Family
from quire.wrappers.arguments import LayerArgs
from quire.wrappers.buffers import fitting
from quire.wrappers.capture import CaptureGuard
from quire.wrappers.plan import Plan
from quire.wrappers.workspace import Workspace


class Planner:
    """Makes the plan of a wrapper, keeps its tables, and computes its runs.

    Tables are kept in the buffers that the wrapper was given for CUDA graphs, or as they came. Engines read them from
    the attributes in which FlashInfer has them, which are those named here.
    """

    _kv_buffers: ClassVar[tuple[str, ...]] = (
        "_paged_kv_indptr_buf",
        "_paged_kv_indices_buf",
        "_paged_kv_last_page_len_buf",
    )
    _custom_mask_buf: Tensor | None
    _mask_indptr_buf: Tensor | None
    device: torch.device
    checking: bool
    invariant: bool
    _kv_layout: str
    _family: str
    _use_cuda_graph: bool
    _qo_indptr_buf: Tensor | None
    _current: Plan | None
    _workspace: Workspace
    _capture: CaptureGuard

    @property
    def planned(self) -> Plan | None:
        """The plan that runs compute, a value that never changes; assigning an earlier plan returns to it. Where plans
        are kept in buffers for CUDA graphs, the tables of all plans are what the buffers hold by now.
        """
        return self._current

    @planned.setter
    def planned(self, plan: Plan | None) -> None:
        self._current = plan

    def require_plan(self) -> Plan:
        """The plan that runs compute; RuntimeError if there is none."""
        if self._current is None:
            raise RuntimeError(f"{type(self).__name__}: plan() must be called before this")
        return self._current

    def _together(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Tables on one device: on the host, to be checked, if all lie there or in checked mode."""
        host = self.checking or all(x.is_cpu for x in tables)
        return [x.cpu() if host else x.to(self.device, non_blocking=True) for x in tables]

    def _pages(self, tables: Sequence[Tensor], page_size: int) -> PageTable:
        """A page table of (indptr, indices, last_page_len), int32 vectors. Its contents are checked if they lie on the
        host, and in checked mode.
        """
        indptr, indices, last_page_len = tables
        on_host = all(x.is_cpu for x in tables)
        if self.checking or on_host:
            checked = PageTable(indptr.cpu(), indices.cpu(), last_page_len.cpu(), page_size)
            if on_host:
                return checked
        # `to` takes a microsecond even where there is nothing to do.
        here = self.device
        moved = [x if x.device == here else x.to(here, non_blocking=True) for x in tables]
        pages = PageTable(moved[0], moved[1], moved[2], page_size)
        check_pages(indptr, indices, last_page_len, page_size)
        return pages

    def _pages_of_lengths(
        self, indptr: Tensor, indices: Tensor, lengths: Tensor, page_size: int, name: str
    ) -> PageTable:
        """A page table made of the requests' lengths in tokens, as `PageTable.from_lengths`; its contents are checked
        as those of `_pages`. Kernels for GPUs read the lengths as they are.
        """
        indptr, indices, lengths = self._together((indptr, indices, table(lengths, name)))
        pages = PageTable.from_lengths(indptr, indices, lengths, page_size, name)
        if self.device.type == "cpu":
            return pages
        return LengthTable.of(pages.indptr, pages.indices, lengths, page_size, name)

    def _rows(self, indptr: Tensor) -> RaggedLayout:
        """Ragged rows of an int32 indptr, whose contents are checked as those of `_pages`."""
        if self.checking:
            RaggedLayout(indptr.cpu())
        return RaggedLayout(indptr)

    def _check_q_len(self, q_len_per_req: int) -> None:
        if not is_int(q_len_per_req) or q_len_per_req < 1:
            raise ValueError(f"q_len_per_req must be >= 1, an int, and is {q_len_per_req!r}")
        planned = q_len_per_req if self.planned is None else self.planned.max_q_len
        if self._use_cuda_graph and q_len_per_req != planned:
            raise ValueError(
                f"q_len_per_req = {q_len_per_req}: it was {planned} in an earlier plan, which made it part of the "
                "frozen cudagraph shape. Use another wrapper"
            )

    def _equal_rows(self, batch_size: int, q_len: int) -> RaggedLayout:
        """The rows of requests that have q_len query tokens each. Equal rows of the last plan are used again, since
        captured graphs read them.
        """
        plan = self._current
        if plan is not None and plan.max_q_len == q_len and plan.qo.batch_size == batch_size:
            return plan.qo
        rows = torch.arange(0, batch_size * q_len + 1, q_len, dtype=torch.int32, device=self.device)
        self._qo_indptr_buf = rows
        return RaggedLayout(rows)

    def _copy_to_buffer(self, name: str, values: Tensor, non_blocking: bool) -> Tensor:
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

    def _copy_rows_to_buffer(self, rows: RaggedLayout, name: str, non_blocking: bool) -> RaggedLayout:
        """Ragged rows whose indptr is kept in the attribute `name`."""
        held = self._copy_to_buffer(name, rows.indptr, non_blocking)
        return rows if held is rows.indptr else RaggedLayout(held)

    def _copy_keys_to_buffers(self, kv: PageTable | RaggedLayout, non_blocking: bool) -> PageTable | RaggedLayout:
        """A page table, or ragged rows of keys, whose tables are kept in the attributes `_kv_buffers`."""
        if isinstance(kv, RaggedLayout):
            return self._copy_rows_to_buffer(kv, self._kv_buffers[0], non_blocking)
        tables = kv.tables
        indptr, indices, per_request = (
            self._copy_to_buffer(name, x, non_blocking) for name, x in zip(self._kv_buffers, tables, strict=True)
        )
        if indptr is tables[0] and indices is tables[1] and per_request is tables[2]:
            return kv
        if isinstance(kv, LengthTable):
            return LengthTable.of(indptr, indices, per_request, kv.page_size, "kv_len_arr")
        return PageTable(indptr, indices, per_request, kv.page_size)

    def _copy_mask_to_buffers(self, mask: PackedMask) -> PackedMask:
        """Packed masks, in the buffers for CUDA graphs where there are such."""
        if not self._use_cuda_graph:
            return mask
        bits = fitting(self._custom_mask_buf, mask.bits, "custom_mask_buf")
        indptr = fitting(self._mask_indptr_buf, mask.indptr, "mask_indptr_buf")
        bits[: len(mask.bits)] = mask.bits
        indptr[: len(mask.indptr)] = mask.indptr
        return PackedMask(bits, indptr)

    def _refresh_tables(
        self, layer: LayerArgs, max_q_len: int | None, qo_indptr: Any, *tables: Any, non_blocking: bool = True
    ) -> bool:
        """Plan a batch that differs from the last one in its tables alone, as the steps of an engine do.

        Args:
            max_q_len: the most query tokens that a request has, which may differ, too; None: as many as are known.
            qo_indptr: of the query rows. It and the tables may be any object; host tensors are checked, and copied.
            tables: of the keys, in the order of `_kv_buffers`.

        Returns:
            False, and nothing is planned, if the batch differs in more than its tables, or a table must be converted.

        Raises:
            ValueError: a table on the host whose values are wrong.
        """
        plan = self._current
        if plan is None or layer is not plan.layer:
            return False
        kv, qo = plan.kv.with_tables(*tables, non_blocking=non_blocking), plan.qo
        if kv is None:
            return False
        if qo_indptr is not qo.indptr:
            qo = qo.with_tables(qo_indptr, non_blocking=non_blocking)  # type: ignore[assignment]
        if qo is None or qo.indptr.numel() != kv.indptr.numel():
            return False
        if max_q_len is None:
            max_q_len = qo.longest
        elif type(max_q_len) is not int or max_q_len < qo.longest:
            return False
        if max_q_len == plan.max_q_len:
            self._current = plan.with_tables(qo, kv)
        else:
            family = self._choose(plan.spec, max_q_len)
            longer = plan.with_tables(qo, kv)._replace(max_q_len=max_q_len, family=family)
            self._current = longer.with_memory(self._workspace)
        own, self._qo_indptr_buf = self.__dict__, qo.indptr
        # A strict zip would take longer.
        for name, x in zip(self._kv_buffers, kv.tables):  # noqa: B905
            own[name] = x
        return True

    def _commit(
        self,
        layer: LayerArgs,
        qo: RaggedLayout,
        kv: PageTable | RaggedLayout,
        mask: PackedMask | None = None,
        items: Items | None = None,
        max_q_len: int = 0,
        non_blocking: bool = True,
    ) -> None:
        """Check a batch's layer, keep its tables, take memory, and make the plan.

        Args:
            qo, kv, mask: as the caller gave them, on the host or on a device. Whether the layer is causal is up to the
                mask or the items, if there are any.
            max_q_len: the most query tokens that a request has, 0 if it is not known.

        Raises:
            ValueError: a layer that no family computes, or a buffer that is too small.
        """
        if mask is not None or items is not None:
            layer = layer._replace(causal=items is not None)
        spec = layer.spec(mask is not None, items is not None)
        family = self._choose(spec, max_q_len)
        qo = self._copy_rows_to_buffer(qo, "_qo_indptr_buf", non_blocking)
        kv = self._copy_keys_to_buffers(kv, non_blocking)
        mask = None if mask is None else self._copy_mask_to_buffers(mask)
        # With one of these, a plan depends on more than its layer, the longest request and the shapes of its tables.
        more = self.checking or self._use_cuda_graph or spec.batch_invariant or spec.mask.custom_mask or spec.mask.items
        plan = Plan(
            spec=spec,
            qo=qo,
            kv=kv,
            family=family,
            capture=self._capture,
            mask=mask,
            items=items,
            max_q_len=max_q_len,
            layer=None if more else layer,
            backend=self._family,
            check_pages=self.checking,
            launches={} if self._keeps_launches() else None,
        )
        self._current = plan.with_memory(self._workspace)

    def _keeps_launches(self) -> bool:
        """Whether runs can be repeated without their checks."""
        return self.device.type == "cuda" and not self.checking

    def _choose(self, spec: AttentionSpec, max_q_len: int) -> Family:
        """The kernel family of a plan; ValueError if none computes the layer."""
        return registry.choose(spec, self.device, self._family, max_q_len)

    def _replan(self, **changes: Any) -> None:
        """Change the plan's layer by the arguments that the deprecated forward() repeats; None is the default."""
        self._current = self.require_plan().replace(**changes)

    def _split_cache(self, cache: Any) -> tuple[Tensor, Tensor]:
        """K and V pages of a cache in any layout, as views [pages, page_size, heads, head_dim]."""
        k, v = split_cache(cache, self._kv_layout)
        size = self.require_plan().kv.page_size  # type: ignore[union-attr]
        check(k.shape[1] == size, "page size of the cache", k.shape[1], lambda: f"{size}, as planned")
        return k, v
