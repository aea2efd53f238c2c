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


def drained(queue):
    """All requests of a queue, in its order."""
    order = []
    while queue:
        count, first = len(queue), queue.first
        assert set(map(id, queue)) >= {id(first)}
        order.append(queue.popleft())
        assert order[-1] is first
        assert len(queue) == count - 1 == len(list(queue))
    return order


def test_waiting_queue_groups_are_served_in_turn_and_each_in_its_order():
    requests, queue = waiting("a", "a", "a", "b", "b", "c")
    assert drained(queue) == [requests[i] for i in (0, 3, 5, 1, 4, 2)]


def test_waiting_queue_group_that_arrives_later_waits_for_one_of_each_other_group():
    requests, queue = waiting(*"aaaa", *"bbb")
    assert queue.popleft() is requests[0]
    late = Waiting("c")
    queue.append(late)
    assert [queue.popleft() for _ in range(4)] == [requests[4], requests[1], late, requests[5]]


def test_waiting_queue_preempted_request_comes_first_and_takes_no_turn():
    requests, queue = waiting("a", "a", "b")
    assert queue.popleft() is requests[0]
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
            request = queue.popleft()
            assert order[request.group].popleft() is request
            assert turn - turns[request.group] <= len(order)
            turns[request.group] = turn


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
