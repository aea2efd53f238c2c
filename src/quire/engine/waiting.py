"""The queue of waiting requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from quire.engine.request import Request


class WaitingQueue:
    """Waiting requests, taken in turn from each group that has any, so that a group of many does not make others wait.

    A group is the requests of one call (`Request.group`), in the order of their arrival; a new group comes after those
    that wait. Requests that have run and were preempted come before all groups.
    """

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        # The first group is the next one.
        self._groups: dict[object, deque[Request]] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._groups.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._groups)

    def __iter__(self) -> Iterator[Request]:
        """Preempted requests, and then those of one group after the other."""
        yield from self._preempted
        for group in self._groups.values():
            yield from group

    @property
    def first(self) -> Request:
        """The request that `popleft` takes."""
        return self._preempted[0] if self._preempted else next(iter(self._groups.values()))[0]

    def append(self, request: Request) -> None:
        self._groups.setdefault(request.group, deque()).append(request)

    def appendleft(self, request: Request) -> None:
        """Put a request first that was preempted."""
        self._preempted.appendleft(request)

    def popleft(self) -> Request:
        """Take the first request; its group is the last one from then on."""
        if self._preempted:
            return self._preempted.popleft()
        key = next(iter(self._groups))
        group = self._groups.pop(key)
        request = group.popleft()
        if group:
            self._groups[key] = group
        return request

    def remove(self, request: Request) -> None:
        """Remove a request if it waits."""
        if request in self._preempted:
            self._preempted.remove(request)
            return
        group = self._groups.get(request.group)
        if group is None or request not in group:
            return
        group.remove(request)
        if not group:
            del self._groups[request.group]

    def clear(self) -> None:
        self._preempted.clear()
        self._groups.clear()
