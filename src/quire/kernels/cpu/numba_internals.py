"""Private internals of Numba. No other file reads any.

They are those of KNOWN_VERSIONS. `tests/kernels/cpu/test_numba_internals.py` tries them with the installed version, and
fails on others until somebody has compared this file with Numba's code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba.core import event
from numba.core.cgutils import get_or_insert_function, unpack_tuple

__all__ = ["KNOWN_VERSIONS", "get_or_insert_function", "on_compile", "set_source_stamp", "unpack_tuple"]

KNOWN_VERSIONS = ("0.68",)


def set_source_stamp(compiled: Any, stamp: str) -> None:
    """Let Numba recompile a function that it keeps on disk if `stamp` has changed, in place of the time and the size of
    the file that the function is in.
    """
    compiled._cache._cache_file._source_stamp = stamp


class _CompileListener(event.Listener):
    """Calls a function before a kernel is compiled."""

    def __init__(self, compiled: Any, callback: Callable[[], None]) -> None:
        self._compiled, self._callback = compiled, callback

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is self._compiled:
            self._callback()

    def on_end(self, event: Any) -> None:
        pass


def on_compile(compiled: Any, callback: Callable[[], None]) -> AbstractContextManager[None]:
    """A context in which `callback` is called before Numba compiles a function, but not where it loads it from disk."""
    listening: AbstractContextManager[None] = event.install_listener(
        "numba:compile", _CompileListener(compiled, callback)
    )
    return listening
