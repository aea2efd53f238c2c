"""The classes of `flashinfer.trace`, by which programs describe their own operations. Quire ignores them."""

from __future__ import annotations

from typing import Any

__all__ = ["Const", "Scalar", "Tensor", "TraceTemplate", "Var"]


class _Description:
    """A description, which stores its arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


class Var(_Description):
    """An axis whose size differs from call to call."""


class Const(_Description):
    """An axis whose size a model fixes."""


class Tensor(_Description):
    """A tensor argument."""


class Scalar(_Description):
    """An argument that is not a tensor."""


class TraceTemplate(_Description):
    """An operation."""
