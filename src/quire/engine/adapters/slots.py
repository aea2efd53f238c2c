"""Which adapters are on the device, in which slots and rank pages, and which of them are evicted for others.

A running request holds its adapter. An adapter that no request holds stays until its memory is needed, and the least
recently used one is evicted first. If running requests hold all adapters, those with the fewest holders are drained: no
further request with such an adapter is admitted until the adapter that waits for room has got it. So no adapter waits
for ever, and requests with other adapters go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.adapters.adapter import Adapter


@dataclass(eq=False, slots=True)
class Resident:
    """An adapter that has a slot.

    Attributes:
        slot: its index in the tables of a step.
        pages: its rank pages.
        is_loaded: whether its copy to the device has ended.
        holders: the number of running requests that have it.
    """

    adapter: Adapter
    slot: int
    pages: list[int]
    is_loaded: Callable[[], bool] = lambda: False
    holders: int = 0


@dataclass(slots=True)
class _Pass:
    """What one pass over the waiting requests has found, in their order.

    Attributes:
        wanted: the digests of adapters that requests wait for. They are not evicted for later requests.
        drained: the digests of adapters that get no further requests.
        lacks_room: whether a request waits for room, which later requests must not take.
    """

    wanted: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    lacks_room: bool = False


class AdapterSlots:
    """The adapters on the device; for use in the engine's thread.

    Args:
        num_slots: the most adapters on the device.
        num_pages: the rank pages there; no adapter needs more.
        load: begins to copy an adapter to the device.

    Attributes:
        is_named: returns whether requests can still name an adapter; by default always True.
        num_held: how many running requests have an adapter.
        num_loads: how many copies to the device have begun.
    """

    def __init__(self, num_slots: int, num_pages: int, load: Callable[[Resident], None]) -> None:
        self._load = load
        self.is_named: Callable[[Adapter], bool] = lambda adapter: True
        self._free_slots, self._free_pages = list(range(num_slots))[::-1], list(range(num_pages))[::-1]
        # By digests, least recently used first.
        self._residents: OrderedDict[str, Resident] = OrderedDict()
        # The adapters whose copies had not ended at the last `poll`.
        self._loading: list[Resident] = []
        self._pass, self._num_changes = _Pass(), 0
        self.num_held = self.num_loads = 0

    def __len__(self) -> int:
        """The number of adapters on the device."""
        return len(self._residents)

    @property
    def num_held_adapters(self) -> int:
        """The number of adapters that running requests have; for any thread."""
        # The values are copied, since the engine's thread may change the dictionary meanwhile.
        return sum(resident.holders > 0 for resident in list(self._residents.values()))

    @property
    def num_free_pages(self) -> int:
        """Rank pages without an adapter."""
        return len(self._free_pages)

    def poll(self) -> int:
        """A number that changes when an adapter that was not ready may have become ready."""
        if self._loading:
            self._loading = [each for each in self._loading if not self._has_loaded(each)]
        return self._num_changes

    def _has_loaded(self, resident: Resident) -> bool:
        has_loaded = resident.is_loaded()
        self._num_changes += has_loaded
        return has_loaded

    def begin_pass(self) -> None:
        """Begin to ask for the adapters of the waiting requests, the first one's first."""
        self._pass = _Pass()

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether a waiting request with this adapter may run. If the adapter is not on the device, and there is room
        that no earlier request waits for, begin to copy it.
        """
        current, resident = self._pass, self._residents.get(adapter.digest)
        if resident is None:
            if current.lacks_room or not self._make_room(adapter):
                current.lacks_room = True
                return False
            resident = self._place(adapter)
        elif adapter.digest in current.drained:
            return False
        current.wanted.add(adapter.digest)
        return resident.is_loaded()

    def hold(self, adapter: Adapter) -> int:
        """Let one more running request have an adapter that is ready; return its slot."""
        resident = self._residents[adapter.digest]
        self._residents.move_to_end(adapter.digest)
        resident.holders += 1
        self.num_held += 1
        return resident.slot

    def release(self, adapter: Adapter) -> None:
        """End the hold of one running request. Launched steps may still compute with the adapter."""
        resident = self._residents[adapter.digest]
        self._residents.move_to_end(adapter.digest)
        resident.holders -= 1
        self.num_held -= 1
        self._num_changes += 1

    def discard(self, adapter: Adapter) -> None:
        """Evict an adapter if neither a name nor a running request refers to it any more."""
        resident = self._residents.get(adapter.digest)
        if resident is not None and not resident.holders and not self.is_named(adapter):
            self._evict(resident)

    def _place(self, adapter: Adapter) -> Resident:
        pages = [self._free_pages.pop() for _ in range(adapter.num_pages)]
        resident = Resident(adapter, self._free_slots.pop(), pages)
        self._residents[adapter.digest] = resident
        self.num_loads += 1
        self._num_changes += 1
        self._loading.append(resident)
        try:
            self._load(resident)
        except BaseException:
            self._evict(resident)
            raise
        return resident

    def _evict(self, resident: Resident) -> None:
        del self._residents[resident.adapter.digest]
        if resident in self._loading:
            self._loading.remove(resident)
        self._free_slots.append(resident.slot)
        self._free_pages += resident.pages
        self._num_changes += 1

    def _make_room(self, adapter: Adapter) -> bool:
        """Evict adapters until there is room for this one. If requests hold or wait for them, drain them and return
        False.
        """
        victims = self._victims(adapter)
        if all(each.holders == 0 and each.adapter.digest not in self._pass.wanted for each in victims):
            for each in victims:
                self._evict(each)
            return True
        self._pass.drained.update(each.adapter.digest for each in victims)
        return False

    def _victims(self, adapter: Adapter) -> list[Resident]:
        """The adapters whose place this one needs."""
        pages = adapter.num_pages - len(self._free_pages)
        victims: list[Resident] = []
        if self._free_slots and pages <= 0:
            return victims
        wanted = self._pass.wanted
        # The sort is stable: adapters with equal keys stay in the order of their last use.
        for each in sorted(self._residents.values(), key=lambda r: (r.adapter.digest in wanted, r.holders)):
            victims.append(each)
            pages -= len(each.pages)
            if pages <= 0:
                break
        return victims
