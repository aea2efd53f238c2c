"""Which adapters are on the device, and which requests wait for theirs, without a model and without a device."""

from __future__ import annotations

import torch

from quire.engine.adapters.adapter import Adapter
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.params import SamplingParams
from quire.engine.request import Request
from quire.engine.scheduler import Scheduler


def adapter(name, num_pages=1):
    return Adapter(name, 16 * num_pages, num_pages, torch.zeros(0, dtype=torch.int32), [])


class Device:
    """Loads adapters on a command, or at once."""

    def __init__(self, num_slots, num_pages, at_once=True):
        self.at_once, self.loaded, self.loads = at_once, set(), []
        self.num_slots, self.num_pages = num_slots, num_pages
        self.slots = AdapterSlots(num_slots, num_pages, self.load)

    def load(self, resident):
        key = (resident.adapter.digest, resident.slot)
        self.loads.append(resident.adapter.digest)
        if self.at_once:
            self.loaded.add(key)
        resident.is_loaded = lambda: key in self.loaded

    def finish(self):
        """End all copies."""
        for each in self.slots._residents.values():
            self.loaded.add((each.adapter.digest, each.slot))

    def names(self):
        return set(self.slots._residents)

    def check(self, holders):
        """Each slot and page is free or of one adapter, and holders are those of running requests."""
        residents = list(self.slots._residents.values())
        assert all(each in residents for each in self.slots._loading)
        used = sorted(r.slot for r in residents) + sorted(self.slots._free_slots)
        assert sorted(used) == list(range(self.num_slots))
        pages = [page for r in residents for page in r.pages] + self.slots._free_pages
        assert sorted(pages) == list(range(self.num_pages))
        assert {d: r.holders for d, r in self.slots._residents.items() if r.holders} == holders
        assert self.slots.num_held == sum(holders.values())


def asked(slots, *adapters):
    """Whether each adapter is ready, in one pass."""
    slots.begin_pass()
    return [slots.is_ready(each) for each in adapters]


def test_slots_without_room_evict_the_least_recently_used():
    device, (a, b, c) = Device(2, 9), map(adapter, "abc")
    slots = device.slots
    assert asked(slots, a, b) == [True, True]
    assert slots.hold(b) != slots.hold(a)
    slots.release(a)
    slots.release(b)
    assert asked(slots, c) == [True]
    assert device.names() == {"b", "c"}
    assert asked(slots, a) == [True]
    assert device.names() == {"c", "a"}
    device.check({})


def test_slots_evict_as_many_adapters_as_the_rank_pages_need():
    device, large = Device(8, 4), adapter("large", 3)
    small = [adapter(name) for name in "abcd"]
    assert all(asked(device.slots, *small))
    assert asked(device.slots, large) == [True]
    assert device.names() == {"d", "large"}
    assert device.slots.num_free_pages == 0
    assert asked(device.slots, small[0]) == [True]
    assert len(device.slots) == 2
    device.check({})


def test_slots_of_running_requests_stay_and_are_drained_for_the_first_that_waits():
    device, (a, b, c, d) = Device(2, 9), map(adapter, "abcd")
    slots = device.slots
    assert asked(slots, a, b) == [True, True]
    for each in (a, a, b):
        slots.hold(each)
    # b has fewer requests than a, so it gets no more, and a goes on. d does not take the room that c waits for.
    assert asked(slots, c, a, b, d) == [False, True, False, False]
    # A request that comes before the one that waits is not held up.
    assert asked(slots, b, c, a) == [True, False, False]
    slots.release(b)
    assert asked(slots, d, c, a) == [True, False, False]
    slots.hold(d)
    device.check({"a": 2, "d": 1})


def test_slots_of_adapters_that_earlier_requests_wait_for_are_not_evicted():
    device, (a, b, c) = Device(2, 9, at_once=False), map(adapter, "abc")
    assert asked(device.slots, a, b, c) == [False, False, False]
    assert asked(device.slots, a, b, c) == [False, False, False]
    assert device.loads == ["a", "b"]
    device.finish()
    assert asked(device.slots, a, b, c) == [True, True, False]
    # Where nobody waits for a any more, it goes.
    assert asked(device.slots, b, c) == [True, False]
    assert device.loads == ["a", "b", "c"]
    assert device.slots.num_loads == 3


def test_slots_adapter_without_a_name_goes_with_its_last_request():
    device, (a, b, c) = Device(3, 9), map(adapter, "abc")
    slots = device.slots
    assert asked(slots, a, b, c) == [True] * 3
    slots.hold(a)
    slots.is_named = lambda each: each is c
    for each in (a, b, c, adapter("unknown")):
        slots.discard(each)
    assert device.names() == {"a", "c"}
    assert asked(slots, a) == [True]
    slots.hold(a)
    for left in ({"a", "c"}, {"c"}):
        slots.release(a)
        slots.discard(a)
        assert device.names() == left
    device.check({})


def test_slots_a_load_that_raises_leaves_the_place_free():
    device = Device(1, 2)

    def fail(resident):
        raise MemoryError

    device.slots._load = fail
    device.slots.begin_pass()
    try:
        device.slots.is_ready(adapter("a", 2))
    except MemoryError:
        device.check({})
    else:
        raise AssertionError("the error is lost")


def request(rng, adapters):
    prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    chosen = rng.choice([None, *adapters])
    params = SamplingParams(max_tokens=rng.randint(1, 12))
    made = Request(prompt, params, None, frozenset(), lambda update: None, adapter=chosen)
    made.group = rng.choice((made, 0, 1))
    return made


def run_step(scheduler, device, written, rng):
    """Write the chunks' tokens by their adapters, and look at what each chunk attends to; sample at random."""
    chunks, size = scheduler.schedule(), scheduler.page_size
    for chunk in chunks:
        of = chunk.request
        assert (of.slot >= 0) == (of.adapter is not None)
        if of.adapter is not None:
            assert device.slots._residents[of.adapter.digest].slot == of.slot
            assert (of.adapter.digest, of.slot) in device.loaded
        for i in range(chunk.start, chunk.start + chunk.count):
            written[of.pages[i // size], i % size] = of.namespace, of.tokens[i]
    for chunk in chunks:
        of, end = chunk.request, chunk.start + chunk.count
        seen = [written[of.pages[i // size], i % size] for i in range(end)]
        assert seen == [(of.namespace, token) for token in of.tokens[:end]]
        of.num_computed_tokens = end
        if chunk.samples:
            of.num_total_tokens += 1
            of.push([rng.randrange(3)])
            if of.finish_reason:
                scheduler.remove(of)
    holders = {}
    for each in scheduler.running:
        if each.adapter is not None:
            holders[each.adapter.digest] = holders.get(each.adapter.digest, 0) + 1
    device.check(holders)
    return len(chunks)


def test_schedule_of_random_requests_with_adapters_ends_all_and_leaks_nothing(rng):
    """Adapters arrive late, are dropped and come again, requests are cancelled and preempted."""
    preemptions = loads = 0
    for _ in range(60):
        device = Device(rng.randint(1, 4), rng.randint(3, 6), at_once=rng.random() < 0.3)
        adapters = [adapter(str(i), rng.randint(1, 3)) for i in range(rng.randint(1, 7))]
        size = rng.choice((1, 2, 4))
        num_pages = -(-24 // size) + rng.randint(0, 8)
        scheduler = Scheduler(num_pages, size, rng.randint(1, 8), rng.choice((2, 16, 99)), adapters=device.slots)
        named = set(adapters)
        device.slots.is_named = named.__contains__
        requests = [request(rng, adapters) for _ in range(25)]
        arriving, written, idle = list(requests), {}, 0
        while arriving or scheduler.running or scheduler.waiting:
            for _ in range(rng.choice((0, 1, 5))):
                if arriving:
                    scheduler.add(arriving.pop())
            alive = [*scheduler.running, *scheduler.waiting]
            if alive and rng.random() < 0.05:
                gone = rng.choice(alive)
                gone.fail("cancelled")
                scheduler.remove(gone)
            if rng.random() < 0.1:
                named ^= {rng.choice(adapters)}
                for each in adapters:
                    device.slots.discard(each)
            if rng.random() < 0.5:
                device.finish()
            idle = 0 if run_step(scheduler, device, written, rng) else idle + 1
            assert idle < 100
        assert all(r.finish_reason in ("length", "cancelled") for r in requests)
        assert scheduler.allocator.num_pages - scheduler.allocator.num_free == len(scheduler.tree)
        assert device.names() <= {each.digest for each in named}
        preemptions, loads = preemptions + scheduler.stats.preemptions, loads + device.slots.num_loads
        scheduler.tree.clear()
        assert scheduler.tree.namespaces == []
    assert preemptions > 0
    assert loads > 60


def step(scheduler):
    """The requests of a step, each of which gets a token."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        chunk.request.num_computed_tokens += chunk.count
        if chunk.samples:
            chunk.request.num_total_tokens += 1
            chunk.request.push([1])
            if chunk.request.finish_reason:
                scheduler.remove(chunk.request)
    return [chunk.request for chunk in chunks]


def made(name, length, tokens):
    params = SamplingParams(max_tokens=tokens)
    of = None if name is None else adapter(name)
    return Request([1] * length, params, None, frozenset(), lambda update: None, adapter=of)


def test_schedule_while_an_adapter_is_copied_lets_others_go_on():
    device = Device(2, 2, at_once=False)
    scheduler = Scheduler(100, 4, 8, 100, adapters=device.slots)
    first, base, other = made("a", 3, 9), made(None, 3, 9), made("b", 3, 9)
    for each in (first, base, other):
        scheduler.add(each)
    assert step(scheduler) == [base]
    assert device.loads == ["a", "b"]
    assert scheduler.snapshot().passed_over == 2
    device.loaded.add(("b", device.slots._residents["b"].slot))
    assert step(scheduler) == [base, other]
    assert scheduler.snapshot().passed_over == 1
    device.finish()
    assert step(scheduler) == [base, other, first]
    assert scheduler.snapshot().passed_over == 0


def test_snapshot_counts_adapters_on_the_device_and_copies():
    device, requests = Device(3, 5), [made(name, 3, tokens) for name, tokens in (("a", 2), ("a", 4), ("b", 4))]
    scheduler = Scheduler(100, 4, 8, 100, adapters=device.slots)
    for each in requests:
        scheduler.add(each)
    for on_device, held in ((2, 2), (2, 2), (2, 2), (2, 0)):
        step(scheduler)
        stats = scheduler.snapshot()
        assert (stats.device_adapters, stats.held_adapters) == (on_device, held)
        assert (stats.free_rank_pages, stats.adapter_copies) == (3, 2)
    # Three others need all slots: c takes the free one, d and e those of a and b.
    for name in "cde":
        scheduler.add(made(name, 3, 2))
    step(scheduler)
    stats = scheduler.snapshot()
    assert (stats.device_adapters, stats.held_adapters, stats.adapter_copies) == (3, 3, 5)


def test_schedule_while_nothing_changes_asks_no_waiting_request_again():
    device = Device(1, 1, at_once=False)
    scheduler = Scheduler(200, 4, 8, 100, adapters=device.slots)
    scheduler.add(made(None, 3, 90))
    for name in "abc":
        scheduler.add(made(name, 3, 4))
    asked_for, is_ready = [], device.slots.is_ready

    def noted(adapter):
        asked_for.append(adapter.digest)
        return is_ready(adapter)

    device.slots.is_ready = noted
    for _ in range(3):
        step(scheduler)
    asked_for.clear()
    assert len(step(scheduler)) == 1
    assert asked_for == []
    device.finish()
    assert [r.namespace for r in step(scheduler)] == [None, "a"]
    for _ in range(20):
        step(scheduler)
        device.finish()
    assert device.loads == ["a", "b", "c"]
    assert not scheduler.waiting
    asked_for.clear()
    step(scheduler)
    assert asked_for == []


def test_schedule_of_a_stream_of_requests_does_not_starve_another_adapter():
    """Two adapters have all slots, and their requests never end arriving; a third one comes."""
    device = Device(2, 2)
    scheduler = Scheduler(100, 4, 8, 100, adapters=device.slots)
    late = made("late", 3, 4)
    for i in range(40):
        for name in "ab":
            scheduler.add(made(name, 3, 6))
        if i == 5:
            scheduler.add(late)
        step(scheduler)
        if late.finish_reason:
            break
    assert late.finish_reason == "length"
    assert i < 40 - 1


def test_schedule_with_all_requests_running_copies_the_adapter_of_the_next_one():
    device = Device(2, 2)
    scheduler = Scheduler(100, 4, 1, 100, adapters=device.slots)
    for name in "ab":
        scheduler.add(made(name, 3, 6))
    step(scheduler)
    assert (len(scheduler.running), device.loads) == (1, ["a", "b"])


def test_schedule_preempted_request_gives_its_adapter_back():
    device = Device(2, 2)
    scheduler = Scheduler(6, 4, 8, 100, adapters=device.slots)
    requests = [made(name, 4, 12) for name in "aab"]
    for each in requests:
        scheduler.add(each)
    while not all(each.finish_reason for each in requests):
        step(scheduler)
        holders = {}
        for each in scheduler.running:
            holders[each.adapter.digest] = holders.get(each.adapter.digest, 0) + 1
        device.check(holders)
    assert scheduler.stats.preemptions > 0
    device.check({})
