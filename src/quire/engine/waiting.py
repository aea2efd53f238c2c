"""The queue of waiting requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice

from quire.engine.request import Request

# The most requests that are passed over at once, as each of them takes the host a moment in each step.
_MAX_PASSED_OVER = 512


class WaitingQueue:
    """Waiting requests, taken in turn from each group that has any, so that a group of many does not make others wait.

    A group is the requests of one call (`Request.group`), in the order of their arrival; a new group comes after those
    that wait. Requests that have run and were preempted come before all groups.

    Requests that cannot run yet are passed over. The first one of each group then comes before all groups, too, in the
    order in which they were passed over, so it runs as soon as it can.

    Attributes:
        num_changes: how often requests have come or gone.
    """

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        # By group, the request that has been passed over.
        self._passed_over: dict[object, Request] = {}
        # The first group is the next one.
        self._groups: dict[object, deque[Request]] = {}
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._passed_over) + sum(map(len, self._groups.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._passed_over or self._groups)

    def __iter__(self) -> Iterator[Request]:
        """Requests that were preempted, those that were passed over, and then those of one group after the other."""
        yield from self._preempted
        yield from self._passed_over.values()
        for group in self._groups.values():
            yield from group

    @property
    def num_passed_over(self) -> int:
        """The number of groups whose first request has been passed over."""
        return len(self._passed_over)

    def next(self, count: int) -> list[Request]:
        """Some of the requests that come next, at most `count`."""
        firsts = (group[0] for group in self._groups.values())
        return list(islice(chain(self._preempted, self._passed_over.values(), firsts), count))

    def append(self, request: Request) -> None:
        self._groups.setdefault(request.group, deque()).append(request)
        self.num_changes += 1

    def appendleft(self, request: Request) -> None:
        """Put a request first that was preempted."""
        self._preempted.appendleft(request)
        self.num_changes += 1

    def in_turn(self, is_ready: Callable[[Request], bool]) -> Iterator[Request]:
        """The requests that are ready, in the order in which they run. The caller takes each request before it asks for
        the next one, or stops. Requests that are not ready are passed over.
        """
        for request in (*self._preempted, *self._passed_over.values()):
            if is_ready(request):
                yield request
        while self._groups:
            request = next(iter(self._groups.values()))[0]
            if not is_ready(request):
                break
            yield request
        yield from self._passing_over(is_ready)

    def _passing_over(self, is_ready: Callable[[Request], bool]) -> Iterator[Request]:
        """The requests of `in_turn` that are in groups."""
        turns, left = deque(self._groups), _MAX_PASSED_OVER
        # How many requests at the front of each group have been passed over.
        skipped: dict[object, int] = {}
        while turns:
            key = turns.popleft()
            group, place = self._groups.get(key, deque()), skipped.get(key, 0)
            while place < len(group):
                request = group[place]
                if is_ready(request):
                    skipped[key] = place
                    turns.append(key)
                    yield request
                    break
                if left == 0:
                    return
                left -= 1
                if key in self._passed_over:
                    place += 1
                else:
                    self._passed_over[key] = request
                    self._remove_from_group(request)

    def take(self, request: Request) -> None:
        """Take a request; its group is the last one from then on, if it came in turn."""
        self.num_changes += 1
        if self._remove_early(request):
            return
        group = self._groups.pop(request.group)
        group.remove(request)
        if group:
            self._groups[request.group] = group

    def remove(self, request: Request) -> None:
        """Remove a request if it waits."""
        self.num_changes += 1
        if not self._remove_early(request):
            self._remove_from_group(request)

    def _remove_early(self, request: Request) -> bool:
        """Remove a request that comes before all groups; False if it is not one."""
        if request in self._preempted:
            self._preempted.remove(request)
            return True
        if self._passed_over.get(request.group) is not request:
            return False
        del self._passed_over[request.group]
        return True

    def _remove_from_group(self, request: Request) -> None:
        group = self._groups.get(request.group)
        if group is None or request not in group:
            return
        group.remove(request)
        if not group:
            del self._groups[request.group]

    def clear(self) -> None:
        self.num_changes += 1
        self._preempted.clear()
        self._passed_over.clear()
        self._groups.clear()
