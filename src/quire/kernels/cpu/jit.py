"""How the CPU's kernels are compiled: once, onto disk, and not in silence; and in which processes they run."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event

# Kernels run one at a time, each on all threads: Numba's simplest threading layer ends the process otherwise.
_one_at_a_time = threading.Lock()
_compiled: set[tuple[str, str]] = set()
_lost_threads = False  # whether this process was forked from one whose kernels ran in GNU OpenMP's threads


def _after_fork() -> None:
    """In a forked child: see which threads it was forked from, and let go of the lock, which `fork` took."""
    global _lost_threads
    try:
        layer = numba.threading_layer()
    except ValueError:  # no kernel has run yet: the child starts threads of its own
        layer = "none"
    _lost_threads = _lost_threads or (layer == "omp" and sys.platform == "linux")
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for the kernel that another thread runs or compiles: its child would find all that half done.
    os.register_at_fork(
        before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release, after_in_child=_after_fork
    )


@lru_cache(maxsize=1)
def _digest() -> str:
    """A stamp of every file that compiled code comes from."""
    files = sorted(Path(__file__).parent.glob("*.py"))
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


class _Announcement(event.Listener):
    """Says on stderr that a kernel is being compiled; not where Numba finds it on disk."""

    def __init__(self, compiled: Any, storage: str) -> None:
        self._compiled, self._storage = compiled, storage

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is self._compiled:
            what = f"{self._compiled.__name__} for {self._storage}"
            message = f"quire: compiling the CPU kernel {what} (once; kept on disk for later runs) ..."
            print(message, file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


def launch(compiled: Any, storage: str, *args: Any) -> None:
    """Run a kernel; `storage` names the dtypes that a kernel is compiled for on its own.

    Raises:
        RuntimeError: the process was forked from one whose kernels ran in GNU OpenMP's threads, which do not survive
            that.
    """
    if _lost_threads:
        raise RuntimeError(
            "attention on the CPU was computed before this process was forked, in threads of GNU OpenMP, which a "
            "forked process cannot use. Start processes by spawn or forkserver, or fork before attention is computed; "
            "or choose a threading layer of Numba's that can be forked: install tbb, or set "
            "NUMBA_THREADING_LAYER=workqueue, which is slower"
        )
    with _one_at_a_time:
        key = (compiled.__name__, storage)
        if key in _compiled:
            compiled(*args)
            return
        with event.install_listener("numba:compile", _Announcement(compiled, storage)):
            compiled(*args)
        _compiled.add(key)
