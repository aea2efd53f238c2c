"""Startup and interruption of a command: imports without garbage collection, and handlers of Ctrl-C.

Python raises KeyboardInterrupt wherever the main thread is. During an import or a callback, the exception is swallowed,
or printed as a traceback of other people's code.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from types import FrameType
from typing import Any, TypeVar

from quire.engine.config import EngineConfig

_T = TypeVar("_T")
# Shells use this exit code for SIGINT.
INTERRUPTED = 130


def _end(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or in the middle of a write.
        with suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


@contextmanager
def on_interrupt(handler: Any, for_good: bool = False) -> Iterator[None]:
    """A context in which Ctrl-C calls `handler`, which stays installed if `for_good`. It has no effect if
    SIGINT is ignored, as under nohup, nor in other threads than the main one, which cannot install handlers.
    """
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if not for_good:
            signal.signal(signal.SIGINT, before)


def ends_at_once(for_good: bool = False) -> Any:
    """A context in which Ctrl-C ends the process with exit code 130."""
    return on_interrupt(_end, for_good)


def raises_once() -> Any:
    """A context in which Ctrl-C raises KeyboardInterrupt, for an orderly end, and a second Ctrl-C ends at once."""
    return on_interrupt(_raise)


@contextmanager
def loading() -> Iterator[None]:
    """A context for imports and models: Ctrl-C ends the process at once, and garbage collection is off, and later skips
    the objects that were loaded. Importing torch and Transformers allocates a million objects that stay alive; to scan
    them repeatedly would take a quarter of the time of a short command.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with ends_at_once():
            yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the arguments of a command give."""
    return config_of(EngineConfig, args)


def config_of(kind: type[_T], args: argparse.Namespace) -> _T:
    """The dataclass whose fields are given by the arguments of a command; lists become tuples."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(args).items() if name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
