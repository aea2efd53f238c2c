"""How a command starts and ends: imports without pauses for garbage, and what Ctrl-C does meanwhile and later.

Python raises KeyboardInterrupt wherever the main thread happens to be. In the middle of an import, or of a callback,
that is swallowed, or shown as a traceback of somebody else's code.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the exit code, as shells have it


def _end(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed, or in the middle of a write
            stream.flush()
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


@contextmanager
def _on_interrupt(handler: Any, for_good: bool = False) -> Iterator[None]:
    """Inside (and, `for_good`, ever after), Ctrl-C calls `handler`; but not where it is ignored, as it is under nohup,
    nor from another thread than the main one, which alone may set this.
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
    """Inside, Ctrl-C ends the process with exit code 130."""
    return _on_interrupt(_end, for_good)


def raises_once() -> Any:
    """Inside, the first Ctrl-C raises KeyboardInterrupt, so that what runs can end in order; a second ends at once."""
    return _on_interrupt(_raise)


@contextmanager
def loading() -> Iterator[None]:
    """For imports and models: Ctrl-C ends at once, and no garbage is looked for, neither now nor later, among what is
    loaded. Importing torch and Transformers makes a million objects that stay; to go through them again and again, and
    once more at the end, takes a quarter of the time of a short command.
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
