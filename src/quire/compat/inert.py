"""What programs call of FlashInfer around its operations: it is accepted, and has nothing to do here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["autotune", "fi_trace", "flashinfer_api"]


def autotune(*args: Any, **options: Any) -> AbstractContextManager[None]:
    """A context in which nothing is tuned: kernels are chosen when a layer is planned."""
    return nullcontext()


def fi_trace(func_or_method: Callable[..., Any], save_dir: Any = None, **options: Any) -> dict[str, Any]:
    """An empty description of a call; nothing is written."""
    return {}


def flashinfer_api(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The function as it is, with or without options: calls are not logged."""
    return func if func is not None else lambda func: func
