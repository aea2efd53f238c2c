"""Checks of arguments, and records of settings whose fields say what they accept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from numbers import Real
from typing import Any

import torch


def check(ok: bool, name: str, value: object, allowed: str | Callable[[], str]) -> None:
    """Raise a ValueError that names an argument, its value and what is allowed, unless `ok`.

    `allowed` is a function where torch.compile may trace the check and the text contains sizes: sizes may be symbols
    then, which cannot be formatted, and the text is only needed if the check fails.
    """
    if not ok:
        raise ValueError(f"{name} = {value!r} is not supported: {allowed if isinstance(allowed, str) else allowed()}")


def is_int(value: object) -> bool:
    """Whether an argument is an int; booleans and NumPy integers are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether an argument is a finite number of Python or NumPy. A tensor is not: its value may change later."""
    return isinstance(value, Real) and math.isfinite(value)


def as_dtype(dtype: str | torch.dtype, name: str = "dtype") -> torch.dtype:
    """A torch dtype, from a torch dtype or its name ("float16", "bfloat16", "float8_e4m3fn", ...)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} = {dtype!r} is not supported: a torch.dtype or its name")
    return found


def setting(
    default: Any,
    cast: Callable[[Any], Any],
    fits: Callable[[Any], bool] | None = None,
    allowed: str = "",
    name: str = "",
) -> Any:
    """A field of a record of settings, which `check_settings` checks.

    Args:
        default: the value of a field that is missing or None, or a function that computes it from the record. MISSING:
            the field must be given.
        cast: makes a value that fits one of the field's type, so that equal records have equal text.
        fits: whether a value is supported; None: any value is. allowed: the supported values, as the error names them.
        name: the argument that the error names, by default the field.
    """
    metadata = {"default": default, "cast": cast, "fits": fits, "allowed": allowed, "name": name}
    return field(default=None if callable(default) else default, metadata=metadata)


def check_settings(record: Any) -> None:
    """Give the fields of a frozen dataclass their defaults where they are None, check and cast them, in their order.

    Raises:
        ValueError: a value that does not fit, named with the field and what is allowed.
    """
    for f in fields(record):
        if not f.metadata:
            continue
        value, default = getattr(record, f.name), f.metadata["default"]
        fits = f.metadata["fits"]
        if value is None and default is not MISSING:
            value = default(record) if callable(default) else default
        check(fits is None or fits(value), f.metadata["name"] or f.name, value, f.metadata["allowed"])
        object.__setattr__(record, f.name, f.metadata["cast"](value))
