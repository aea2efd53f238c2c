"""How the CPU's kernels are compiled: once, onto disk, and not in silence."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba

from quire.plan import schedule

# Kernels run one at a time, each on all threads: Numba's simplest threading layer ends the process otherwise.
_one_at_a_time = threading.Lock()
_compiled: set[tuple[str, str]] = set()


@lru_cache(maxsize=1)
def _digest() -> str:
    """A stamp of every file that compiled code comes from."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(schedule.__file__)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


# What kernels call. No wrappers for callers in Python: they took a third of the time to compile.
function = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


def kernel(body: Callable) -> Callable:
    """Compile with Numba over all threads, and keep the result on disk.

    Numba's own stamp is the age of the one file that a kernel is in. A kernel is stale as well when a function that it
    calls has changed, so the stamp becomes a digest of all of them.
    """
    compiled = numba.njit(parallel=True, cache=True)(body)
    compiled._cache._cache_file._source_stamp = _digest()
    return compiled


@contextmanager
def _announce(what: str) -> Iterator[None]:
    """Say on stderr what is being compiled if it takes more than a second."""
    message = f"quire: compiling the CPU kernel {what} (once; kept on disk for later runs) ..."
    timer = threading.Timer(1.0, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def launch(compiled: Any, storage: str, *args: Any) -> None:
    """Run a kernel; `storage` names the cache's dtype, for which a kernel is compiled on its own."""
    with _one_at_a_time:
        key = (compiled.__name__, storage)
        if key in _compiled:
            compiled(*args)
            return
        with _announce(f"{compiled.__name__} for {storage}"):
            compiled(*args)
        _compiled.add(key)
