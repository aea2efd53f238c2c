"""How operations become torch's: `torch.ops.quire.*`, which torch.compile and export see as one node each."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def asked(variable: str) -> bool:
    """Whether an environment variable is set to something other than 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def on_triton(device: torch.device) -> bool:
    """Whether operations other than attention, whose families decline by themselves, go to kernels in Triton there."""
    return device.type == "cuda" or asked("TRITON_INTERPRET")


def traced(x: object) -> bool:
    """Whether a call with this tensor is being traced, rather than computed."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


def operation(name: str, *mutates: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as ``torch.ops.quire.<name>``.

    It returns nothing and writes only into the arguments that `mutates` names, so that its fake does nothing. Its
    first argument is a tensor, and its tensors are given by position. Called on plain tensors outside of a trace it
    runs as it is: torch's dispatcher would cost more than all the rest of a call.

    Autograd sees none of it: tensors that require grad are read, and written to, as if they were detached, and
    inference tensors are written to outside of inference mode, too. Operations whose results would be expected to have
    gradients refuse such tensors before (`quire.definition.tensors.refuse_grad`).
    """

    def register(compute: Callable[P, None]) -> Callable[P, None]:
        op = torch.library.custom_op(f"quire::{name}", compute, mutates_args=mutates)
        op.register_fake(lambda *args, **kwargs: None)

        @wraps(compute)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if torch.is_grad_enabled():
                args = tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in args)  # type: ignore[assignment]
            if traced(args[0]):
                op(*args, **kwargs)
            elif torch.is_inference_mode_enabled():  # entering it again would take microseconds
                compute(*args, **kwargs)
            else:
                with torch.inference_mode():
                    compute(*args, **kwargs)

        return call

    return register
