"""The adapters on a device: rank pages, the tables of slots, and copies from the host's memory.

A rank page has 16 rows of the factors of all products of the network, one product after the other. So the contiguous
parts of an adapter are long, and a few copies bring it to the device, into any free rank pages. On a GPU, copies run on
a stream of their own, beside the steps, and an adapter is ready when its copies have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.engine.adapters.adapter import Adapter, Values
from quire.engine.adapters.hooks import AdapterHook, AdapterSwitch, hook_module
from quire.engine.adapters.peft import AdapterTensors, Factors
from quire.engine.adapters.seen import seen_targets
from quire.engine.adapters.slots import AdapterSlots, Resident
from quire.engine.adapters.step import AdaptedProduct, AdapterTables
from quire.engine.adapters.targets import Target
from quire.engine.model import Model
from quire.engine.projections import Merged
from quire.engine.request import Request
from quire.steps import RANK_PAGE

if TYPE_CHECKING:
    from quire.engine.parallel.leader import Leader

# Factors begin at multiples of this many elements of a page.
_ALIGNMENT = 64


class AdapterPool:
    """The adapters of a model on its device.

    Args:
        model: the model, whose modules are changed so that they add what adapters compute.
        num_slots: the most adapters on the device.
        num_rank_pages: the rank pages there.
        max_rank: the largest rank of an adapter.
        num_ranks: the processes that compute the model, of which each has such a pool for its part.

    Attributes:
        leader: of this process, which has the other ranks copy the adapters that it copies; None: it has none.
        targets: the modules that adapters may change, by their paths.
        slots: which adapters are on the device.
        tables: what steps read.

    Raises:
        ValueError: the device has no memory for the rank pages.
    """

    leader: Leader | None = None

    def __init__(self, model: Model, num_slots: int, num_rank_pages: int, max_rank: int, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self.targets = targets = seen_targets(model)
        self.max_rank = max_rank
        self.num_rank_pages, self._device = num_rank_pages, model.device
        merged = [part for part in model.replacements if isinstance(part, Merged) and part.on]
        groups = _groups(model, targets, merged)
        self._memory = self._new_memory(sum(sum(_sizes(group, targets)) for group in groups), model.dtype)
        products: list[AdaptedProduct] = []
        for group in groups:
            products.append(_product(self._memory, group, targets, products[-1].end if products else 0))
        width = min(-(-max_rank // RANK_PAGE), num_rank_pages)
        options: Any = {"dtype": torch.int32, "device": model.device}
        self.tables = AdapterTables(
            products=products,
            head_has_rows=model.chooses_rows,
            rank_pages=torch.zeros(num_slots, width, **options),
            # Launches cost less if tables start at multiples of 16 bytes. The padding aligns each product's row.
            num_rank_pages=torch.zeros(len(products), -(-num_slots // 4) * 4, **options)[:, :num_slots],
            switch=AdapterSwitch(),
        )
        self.slots = AdapterSlots(num_slots, num_rank_pages, self.load)
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        # The requests of the last step that was asked for, and whether any of them has an adapter.
        self._requests: Sequence[Request] = ()
        self._found = False
        _hook(model, products, merged, self.tables.switch)

    def _new_memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Rank pages of `elements` elements each. No product reads a page before an adapter has been copied to it."""
        try:
            return torch.empty(self.num_rank_pages, elements, dtype=dtype, device=self._device)
        except RuntimeError as error:
            size = self.num_rank_pages * elements * dtype.itemsize / 2**30
            what = f"they take {size:.1f} GiB, and {self._device} does not have as much free memory"
            raise ValueError(f"adapter_rank_pages = {self.num_rank_pages}: {what}") from error

    def pack(self, tensors: AdapterTensors) -> Adapter:
        """The adapter of these factors, as rank pages in the host's memory; for any thread.

        Raises:
            ValueError: it needs a larger rank, or more rank pages, than there are.
        """
        rank, count = tensors.rank, -(-tensors.rank // RANK_PAGE)
        if rank > self.max_rank:
            raise ValueError(f"its rank is {rank}: max_adapter_rank = {self.max_rank} is the largest")
        if count > self.num_rank_pages:
            what = f"its rank of {rank} needs {count} rank pages of {RANK_PAGE}"
            raise ValueError(f"{what}: adapter_rank_pages = {self.num_rank_pages} is all that there are")
        ranks = [
            max((len(tensors.factors[path][0]) for path in product.paths if path in tensors.factors), default=0)
            for product in self.tables.products
        ]
        pages = torch.tensor([-(-rank // RANK_PAGE) for rank in ranks], dtype=torch.int32)
        # Ranks that have the whole model have equal contents.
        num_parts = self._num_ranks if any(target.shard is not None for target in self.targets.values()) else 1
        parts = (self._factors_of(part, tensors) for part in range(num_parts))
        contents = [self._contents(count, pages.tolist(), factors) for factors in parts]
        others = contents[1:] if num_parts > 1 else contents * (self._num_ranks - 1)
        return Adapter(tensors.digest, rank, count, self._pinned(pages), contents[0], others)

    def _factors_of(self, rank: int, tensors: AdapterTensors) -> Factors:
        """The factors of a rank's part of the model."""
        return {path: self.targets[path].factors_of_rank(rank, a, b) for path, (a, b) in tensors.factors.items()}

    def _contents(self, count: int, pages: Sequence[int], factors: Factors) -> list[Values]:
        """The elements of an adapter's `count` rank pages; `pages` has how many of them each product uses."""
        return [values for page in range(count) for values in self._packed(page, pages, factors)]

    def _packed(self, page: int, pages: Sequence[int], factors: Factors) -> list[Values]:
        """The elements of one of an adapter's rank pages; `pages` is as for `_contents`."""
        runs: list[list[AdaptedProduct]] = []
        for product, count in zip(self.tables.products, pages, strict=True):
            if count <= page:
                continue
            if runs and runs[-1][-1].end == product.start:
                runs[-1].append(product)
            else:
                runs.append([product])
        return [Values(page, run[0].start, self._filled(run, page, factors)) for run in runs]

    def _filled(self, run: Sequence[AdaptedProduct], page: int, factors: Factors) -> Tensor:
        """The elements of neighbouring products in a rank page."""
        on_gpu = self._stream is not None
        values = torch.zeros(run[-1].end - run[0].start, dtype=self._memory.dtype, pin_memory=on_gpu)
        rows = slice(page * RANK_PAGE, (page + 1) * RANK_PAGE)
        for product in run:
            place = product.start - run[0].start
            a, b = (
                _part(values, start, x.shape[1:])
                for start, x in ((place, product.a), (place + product.start_b - product.start, product.b))
            )
            starts = [0, *product.part_ends]
            for part, path in enumerate(product.paths):
                if path not in factors:
                    continue
                own_a, own_b = factors[path]
                own_a, own_b = own_a[rows], own_b[:, rows].T
                a[part, : len(own_a)] = own_a
                b[: len(own_b), starts[part] : starts[part + 1]] = own_b
        return values

    def _pinned(self, x: Tensor) -> Tensor:
        return x if self._stream is None else x.pin_memory()

    def load(self, resident: Resident) -> None:
        """Begin to copy an adapter to its rank pages."""
        if self.leader is not None:
            self.leader.load_adapter(resident)
        if self._stream is None:
            self._copy(resident)
            resident.is_loaded = lambda: True
            return
        # Launched steps may still compute with the adapter that had these pages, or this slot.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._copy(resident)
            copied.record(self._stream)
        resident.is_loaded = copied.query

    @torch.inference_mode()
    def _copy(self, resident: Resident) -> None:
        """Copy an adapter to its rank pages, and their numbers to the tables, without waiting for that."""
        adapter, tables = resident.adapter, self.tables
        for values in adapter.contents:
            end = values.start + len(values.elements)
            self._memory[resident.pages[values.page], values.start : end].copy_(values.elements, non_blocking=True)
        pages = self._pinned(torch.tensor(resident.pages, dtype=torch.int32))
        tables.rank_pages[resident.slot, : len(pages)].copy_(pages, non_blocking=True)
        # The column is contiguous on the host and strided in the table, so it is copied to the device first.
        numbers = adapter.product_pages.to(self._device, non_blocking=True)
        tables.num_rank_pages[:, resident.slot] = numbers

    def are_in(self, requests: Sequence[Request]) -> bool:
        """Whether any request of a step has an adapter. If the list is that of the last step, the last result is
        returned.
        """
        if requests is not self._requests:
            self._requests, self._found = requests, any(request.slot >= 0 for request in requests)
        return self._found


def _groups(model: Model, targets: Mapping[str, Target], merged: Sequence[Merged]) -> list[list[str]]:
    """The paths of the modules of each product: one module, or several that are merged."""
    paths = {id(module): path for path, module in model.network.named_modules()}
    together = [[paths[id(linear)] for linear in each.linears] for each in merged]
    group_of = {path: group for group in together if targets.keys() >= set(group) for path in group}
    groups = {id(group): group for group in (group_of.get(path, [path]) for path in targets)}
    # Every group is kept, so that none has the id of another.
    return list(groups.values())


def _sizes(group: Sequence[str], targets: Mapping[str, Target]) -> tuple[int, int]:
    """The elements of A and of B of a product in a rank page."""
    columns = sum(targets[path].shape_of_rank[1] for path in group)
    sizes = (len(group) * targets[group[0]].shape_of_rank[0], columns)
    size_a, size_b = (-(-RANK_PAGE * size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return size_a, size_b


def _product(memory: Tensor, group: list[str], targets: Mapping[str, Target], start: int) -> AdaptedProduct:
    """The product of these modules, which begins there in each rank page."""
    of = [targets[path] for path in group]
    size_a, size_b = _sizes(group, targets)
    ends = [sum(target.shape_of_rank[1] for target in of[: i + 1]) for i in range(len(of))]
    return AdaptedProduct(
        kind=of[0].kind,
        paths=group,
        part_ends=ends,
        start=start,
        start_b=start + size_a,
        end=start + size_a + size_b,
        a=_part(memory, start, (len(of), RANK_PAGE, of[0].shape_of_rank[0])),
        b=_part(memory, start + size_a, (RANK_PAGE, ends[-1])),
    )


def _part(memory: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """The elements from `start` on of each row of memory, or of one row, in this shape."""
    return memory.narrow(-1, start, prod(shape)).unflatten(-1, tuple(shape))


def _hook(model: Model, products: Sequence[AdaptedProduct], merged: Sequence[Merged], switch: AdapterSwitch) -> None:
    """Let the modules of the products add what adapters compute."""
    group_of = {id(linear): each for each in merged for linear in each.linears}
    for index, product in enumerate(products):
        module = model.network.get_submodule(product.paths[0])
        hook = AdapterHook(switch, index)
        if len(product.paths) == 1:
            hook_module(module, hook)
        else:
            group_of[id(module)].hook = hook
