"""A store for values that processes exchange under keys with a number, which each process counts from its start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]


class NumberedStore(Store):
    """A store that subtracts the number in its first key from the number in each key. Torch puts a counter of the
    process into the keys by which ranks exchange symmetric memory. Without this store, a process that has made such
    memory before would wait for other keys than a new process sets.

    Args:
        store: the store that holds the values. This object keeps it alive; a `PrefixStore` does not keep this object.
    """

    _NUMBER = re.compile(r"(?<=/)\d+(?=/|$)")

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renamed(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renamed(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._renamed(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._renamed(key) for key in keys])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get([self._renamed(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._renamed(key) for key in keys], *(() if timeout is None else (timeout,)))

    def _renamed(self, key: str) -> str:
        found = self._NUMBER.search(key)
        if found is None:
            return key
        if self._first is None:
            self._first = int(found[0])
        return f"{key[: found.start()]}{int(found[0]) - self._first}{key[found.end() :]}"
