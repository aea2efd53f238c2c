"""What programs import from `flashinfer.trace` to describe operations of their own: descriptions that nobody reads."""

from __future__ import annotations

from typing import Any

__all__ = ["Const", "Scalar", "Tensor", "TraceTemplate", "Var"]


class _Description:
    """Keeps what it is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


class Var(_Description):
    """An axis whose size differs from call to call."""


class Const(_Description):
    """An axis whose size a model fixes."""


class Tensor(_Description):
    """A tensor argument."""


class Scalar(_Description):
    """Another argument."""


class TraceTemplate(_Description):
    """An operation."""
