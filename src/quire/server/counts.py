"""The numbers of a server that may consist of several processes, each of which can report those of all."""

from __future__ import annotations

import mmap
import os
import tempfile
import time

# Numbers of a process: those of one page of memory, so that no two processes write in the same cache line.
_ROW = 512
_BYTES = 8


class Cells:
    """Numbers of one meaning: those of this process, and those of all.

    Args:
        rows: of each process, float64.
        index: of this process.

    Attributes:
        local: those of this process, which nobody else writes.
    """

    def __init__(self, rows: list[memoryview[float]], index: int) -> None:
        self._rows, self.local = rows, rows[index]

    def add(self, amount: float) -> None:
        """Add to the first number."""
        self.local[0] += amount

    @property
    def total(self) -> int:
        """The first number, of all processes together."""
        return int(sum(row[0] for row in self._rows))

    def totals(self) -> list[float]:
        """All numbers, each of all processes together."""
        return [sum(column) for column in zip(*self._rows, strict=True)]

    def others(self) -> list[float]:
        """The first number of each other process."""
        return [row[0] for row in self._rows if row is not self.local]


class Counts:
    """Numbers of each process of a server, in memory that all of them read. Nothing is locked: each process writes its
    own numbers only, from one thread, and a processor writes and reads a number at once.

    Args:
        processes: of the server.
        index: of this one.
        descriptor: of the memory, if another process has made it.

    Attributes:
        processes: as given.
        descriptor: of the memory, for other processes; None if there is one process.
    """

    def __init__(self, processes: int = 1, index: int = 0, descriptor: int | None = None) -> None:
        self.processes, self._index = processes, index
        self.descriptor = descriptor
        size = processes * _ROW * _BYTES
        buffer: bytearray | mmap.mmap = bytearray(size) if processes == 1 else self._shared(size)
        numbers = memoryview(buffer).cast("d")
        self._rows = [numbers[i * _ROW : (i + 1) * _ROW] for i in range(processes)]
        self._num_allocated = 0
        first = self.allocate()
        if descriptor is None:
            first.local[0] = time.time()
        self._started = self._rows[0]

    @property
    def started(self) -> float:
        """When the server was started, in seconds since 1970."""
        return self._started[0]

    def allocate(self, size: int = 1) -> Cells:
        """The next numbers, which are 0. All processes must take the same ones, in the same order."""
        part = slice(self._num_allocated, self._num_allocated + size)
        if part.stop > _ROW:
            raise ValueError(f"size = {size}: {_ROW - self._num_allocated} numbers are left")
        self._num_allocated = part.stop
        return Cells([row[part] for row in self._rows], self._index)

    def close(self) -> None:
        """Close the descriptor, when all processes have it. The numbers stay."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _shared(self, size: int) -> mmap.mmap:
        if self.descriptor is None:
            self.descriptor = _anonymous_file()
            os.ftruncate(self.descriptor, size)
        return mmap.mmap(self.descriptor, size)


def _anonymous_file() -> int:
    """The descriptor of a file without a name, which is gone with the last process that has it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-counts")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
