"""Compiling the CPU kernels once, onto disk and with a message, and launching them in processes that can run them."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import torch

from quire.kernels.cpu.numba_internals import on_compile, set_source_stamp

# Kernels run one at a time, each on all threads, because concurrent ones abort Numba's workqueue threading layer.
_one_at_a_time = threading.Lock()
_compiled: set[tuple[str, str]] = set()
# A process that was forked from one whose kernels ran in threads of GNU OpenMP lacks these threads.
_lost_threads = False


def _after_fork() -> None:
    """In a forked child: note which threads its parent used, and release the lock, which the fork acquired."""
    global _lost_threads
    try:
        layer = numba.threading_layer()
    except ValueError:
        # No kernel has run yet, so the child starts threads of its own.
        layer = "none"
    _lost_threads = _lost_threads or (layer == "omp" and sys.platform == "linux")
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for a kernel that another thread runs or compiles, because the child would inherit it unfinished.
    os.register_at_fork(
        before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release, after_in_child=_after_fork
    )


@lru_cache(maxsize=1)
def _digest() -> str:
    """A digest of every file that compiled code comes from."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


# The decorator of functions that kernels call. Wrappers for callers in Python would take half as long again to compile.
function = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


def kernel(body: Callable[..., None]) -> Callable[..., None]:
    """The decorator of kernels: Numba compiles them for all threads and keeps the result on disk.

    Numba recompiles a kernel if the file that it is in has changed. A kernel is also stale if a function that it calls
    has changed, so the digest of all files replaces Numba's stamp.
    """
    compiled = numba.njit(parallel=True, cache=True)(body)
    set_source_stamp(compiled, _digest())
    return compiled


def num_threads() -> int:
    """The number of threads that kernels run in: what torch.set_num_threads was given in the calling thread, but at
    most NUMBA_NUM_THREADS, which is the number of cores by default.
    """
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


@lru_cache(maxsize=1)
def _load_threading_layer() -> None:
    """Load Numba's threading layer in a thread of its own. The layer of OpenMP calls omp_set_num_threads, which sets
    the number of threads of torch, too, in the thread that loads the layer.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(numba.get_num_threads).result()


def launch(compiled: Any, dtypes: str, *args: Any) -> None:
    """Run a kernel, in `num_threads()` threads. `dtypes` says for which dtypes it is compiled, once for each value.

    Raises:
        RuntimeError: the process was forked from one whose kernels ran in threads of GNU OpenMP, which a fork loses.
    """
    if _lost_threads:
        raise RuntimeError(
            "attention on the CPU was computed before this process was forked, in threads of GNU OpenMP, which a "
            "forked process cannot use. Start processes by spawn or forkserver, or fork before attention is computed; "
            "or choose a threading layer of Numba's that can be forked: install tbb, or set "
            "NUMBA_THREADING_LAYER=workqueue, which is slower"
        )
    with _one_at_a_time:
        _load_threading_layer()
        own = numba.get_num_threads()
        numba.set_num_threads(num_threads())
        try:
            _run(compiled, dtypes, args)
        finally:
            numba.set_num_threads(own)


def _run(compiled: Any, dtypes: str, args: tuple[Any, ...]) -> None:
    """Call a kernel. What it is compiled for is printed to stderr, unless Numba finds it on disk."""
    key = (compiled.__name__, dtypes)
    if key in _compiled:
        compiled(*args)
        return
    message = f"quire: compiling the CPU kernel {key[0]} for {dtypes} (once; kept on disk for later runs) ..."
    with on_compile(compiled, lambda: print(message, file=sys.stderr, flush=True)):
        compiled(*args)
    _compiled.add(key)
