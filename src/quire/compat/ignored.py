"""Functions of FlashInfer that tune, trace and log its operations. They are accepted, without effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

__all__ = [
    "AutoTuner",
    "autotune",
    "autotune_v2",
    "autotune_v2_reload",
    "fi_trace",
    "flashinfer_api",
    "get_autotune_process_group",
    "set_autotune_process_group",
]


class AutoTuner:
    """FlashInfer's record of the fastest kernel of each operation and shape. It is empty here: Quire measures nothing,
    and a layer's kernels follow from its shapes when it is planned.
    """

    _only: AutoTuner | None = None

    @classmethod
    def get(cls) -> AutoTuner:
        """The one tuner of the process."""
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def clear_cache(self) -> None:
        """Does nothing: there are no records."""

    def load_configs(self, path: str) -> bool:
        """True, which means that the file fits. No file is read, since there is nothing to choose."""
        return True

    def save_configs(self, path: str) -> None:
        """Write a record without entries, as JSON."""
        Path(path).write_text("{}")


def autotune(*args: Any, **options: Any) -> AbstractContextManager[None]:
    """A context without effect: kernels are chosen when a layer is planned."""
    return nullcontext()


autotune_v2 = autotune


def autotune_v2_reload(*args: Any, **options: Any) -> None:
    """Nothing: there are no records to read again."""


def set_autotune_process_group(group: Any) -> None:
    """Nothing: processes that run one model choose the same kernels, because they plan the same layers."""


def get_autotune_process_group() -> None:
    """None: processes need not agree on what they measured."""


def fi_trace(func_or_method: Callable[..., Any], save_dir: Any = None, **options: Any) -> dict[str, Any]:
    """An empty description of a call; no file is written."""
    return {}


def flashinfer_api(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator, with or without options, that returns the function itself: calls are not logged."""
    return func if func is not None else lambda func: func
