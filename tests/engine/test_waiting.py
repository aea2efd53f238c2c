"""The order of waiting requests: in turn from the calls that have any."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from quire.engine import LLM, SamplingParams
from quire.engine.waiting import WaitingQueue


class Waiting:
    """A request with a group, as far as the queue reads it."""

    def __init__(self, group):
        self.group = group


def waiting(*groups):
    """Requests with these groups, and a queue of them in this order."""
    requests = [Waiting(group) for group in groups]
    queue = WaitingQueue()
    for request in requests:
        queue.append(request)
    return requests, queue


def take(queue, is_ready=lambda request: True):
    """Take the first request that is ready, None if none is."""
    count, request = len(queue), next(queue.in_turn(is_ready), None)
    assert len(queue) == count == len(list(queue))
    if request is not None:
        assert request in list(queue)
        queue.take(request)
        assert len(queue) == count - 1 == len(list(queue))
    assert bool(queue) == bool(len(queue))
    return request


def drained(queue):
    """All requests of a queue, in its order."""
    return [take(queue) for _ in range(len(queue))]


def test_waiting_queue_groups_are_served_in_turn_and_each_in_its_order():
    requests, queue = waiting("a", "a", "a", "b", "b", "c")
    assert drained(queue) == [requests[i] for i in (0, 3, 5, 1, 4, 2)]


def test_waiting_queue_group_that_arrives_later_waits_for_one_of_each_other_group():
    requests, queue = waiting(*"aaaa", *"bbb")
    assert take(queue) is requests[0]
    late = Waiting("c")
    queue.append(late)
    assert [take(queue) for _ in range(4)] == [requests[4], requests[1], late, requests[5]]


def test_waiting_queue_preempted_request_comes_first_and_takes_no_turn():
    requests, queue = waiting("a", "a", "b")
    assert take(queue) is requests[0]
    queue.appendleft(requests[0])
    assert drained(queue) == [requests[0], requests[2], requests[1]]


@pytest.mark.parametrize("gone", range(4))
def test_waiting_queue_removed_request_is_not_served(gone):
    requests, queue = waiting("a", "a", "b", "a")
    queue.remove(requests[gone])
    queue.remove(requests[gone])
    queue.remove(Waiting("z"))
    left = [r for i, r in enumerate(requests) if i != gone]
    assert sorted(map(id, drained(queue))) == sorted(map(id, left))


def test_waiting_queue_random_arrivals_never_wait_for_more_than_one_of_each_other_group(rng):
    """Each group's turns are never further apart than the number of groups that wait, and a group keeps its order."""
    for _ in range(200):
        queue, order = WaitingQueue(), {}
        turns = {}
        for turn in range(rng.randint(1, 60)):
            for _ in range(rng.choice((0, 1, 1, 7))):
                request = Waiting(rng.randrange(4))
                if request.group not in order or not order[request.group]:
                    turns[request.group] = turn
                order.setdefault(request.group, deque()).append(request)
                queue.append(request)
            if not queue:
                continue
            request = take(queue)
            assert order[request.group].popleft() is request
            assert turn - turns[request.group] <= len(order)
            turns[request.group] = turn


def test_waiting_queue_in_turn_yields_what_one_take_after_the_other_gives():
    requests, queue = waiting(*"aaabcb")
    order = []
    for request in queue.in_turn(lambda request: True):
        queue.take(request)
        order.append(request)
    assert order == [requests[i] for i in (0, 3, 4, 1, 5, 2)]
    assert not queue


def test_waiting_queue_request_that_is_passed_over_keeps_its_turn():
    requests, queue = waiting(*"aaabb")
    blocked = {requests[0], requests[1]}
    order = [take(queue, lambda r: r not in blocked) for _ in range(2)]
    assert order == [requests[2], requests[3]], "others go on, also those of the same group"
    assert take(queue, lambda r: r not in (*blocked, requests[4])) is None
    late = Waiting("c")
    queue.append(late)
    queue.appendleft(requests[3])
    assert queue.next(9) == [requests[3], requests[0], requests[4], requests[1], late]
    assert queue.next(2) == [requests[3], requests[0]]
    # The first request of each group comes before all groups; the next one of its group has to wait for its turn.
    assert drained(queue) == [requests[3], requests[0], requests[4], requests[1], late]


def test_waiting_queue_removes_requests_that_were_passed_over():
    requests, queue = waiting(*"aab")
    assert take(queue, lambda r: False) is None
    for request in (requests[0], requests[2], requests[0]):
        queue.remove(request)
    assert drained(queue) == [requests[1]]
    queue.append(requests[0])
    take(queue, lambda r: False)
    queue.clear()
    assert (list(queue), len(queue), bool(queue)) == ([], 0, False)


@pytest.mark.slow
def test_waiting_queue_looks_at_a_bounded_number_of_requests_that_are_not_ready():
    requests, queue = waiting(*range(5000))
    looked = []

    def is_ready(request):
        looked.append(request)
        return False

    assert take(queue, is_ready) is None
    assert take(queue, is_ready) is None
    assert len(looked) < 2500
    assert drained(queue) == requests


def test_waiting_queue_random_readiness_takes_ready_requests_once_and_none_out_of_its_group_while_all_are_ready(rng):
    for _ in range(100):
        requests, queue = waiting(*(rng.randrange(3) for _ in range(rng.randint(1, 30))))
        taken, ready = [], set()
        while queue:
            ready |= {r for r in queue if rng.random() < 0.3}
            before = list(queue)
            request = take(queue, ready.__contains__)
            assert (request is None) == ready.isdisjoint(before)
            if request is not None:
                taken.append(request)
        assert sorted(map(id, taken)) == sorted(map(id, requests))


def test_llm_a_call_does_not_wait_for_all_requests_of_an_earlier_call():
    order, done = [], threading.Event()

    def sink(name):
        def end(index, part):
            if part.finish_reason:
                order.append(name)
                if len(order) == 41:
                    done.set()

        return end

    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    with LLM(num_pages=64, page_size=8, max_num_seqs=2) as llm:
        llm.start([[1 + i, 2, 3] for i in range(40)], params, sink("many"))
        llm.start([50, 2, 3], params, sink("one"))
        assert done.wait(60)
    assert order.index("one") < 20
