"""Registration of torch operations, `torch.ops.quire.*`, which torch.compile and export see as single nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def env_flag(variable: str) -> bool:
    """Whether an environment variable is set to anything but 0 or nothing."""
    return os.environ.get(variable, "0") not in ("", "0")


def on_triton(device: torch.device) -> bool:
    """Whether operations other than attention, which has kernel families, run Triton kernels on a device."""
    return device.type == "cuda" or env_flag("TRITON_INTERPRET")


def traced(x: object) -> bool:
    """Whether a call with this tensor is traced by torch.compile or export, rather than computed."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


def operation(name: str, *mutates: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as ``torch.ops.quire.<name>``.

    The function returns None and writes to no arguments but those that `mutates` names, so that its fake
    implementation is empty. Its first argument is a tensor, and all tensors are passed by position. Outside of a trace,
    the function is called without torch's dispatcher, which would take longer than the rest of a call.

    Autograd does not see the operation: tensors that require grad are detached, and inference tensors may be written to
    outside of inference mode. Operations whose outputs users expect to have gradients refuse tensors that require grad
    beforehand (`quire.definition.tensors.refuse_grad`).
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
            elif torch.is_inference_mode_enabled():
                # Entering inference mode takes microseconds.
                compute(*args, **kwargs)
            else:
                with torch.inference_mode():
                    compute(*args, **kwargs)

        return call

    return register
