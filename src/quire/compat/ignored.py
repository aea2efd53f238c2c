"""Functions of FlashInfer that tune, trace and log its operations. They are accepted, without effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["autotune", "fi_trace", "flashinfer_api"]


def autotune(*args: Any, **options: Any) -> AbstractContextManager[None]:
    """A context without effect: kernels are chosen when a layer is planned."""
    return nullcontext()


def fi_trace(func_or_method: Callable[..., Any], save_dir: Any = None, **options: Any) -> dict[str, Any]:
    """An empty description of a call; no file is written."""
    return {}


def flashinfer_api(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator, with or without options, that returns the function itself: calls are not logged."""
    return func if func is not None else lambda func: func
