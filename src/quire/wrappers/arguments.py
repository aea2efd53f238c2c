"""How wrappers read arguments: what is refused, and the scales and sinks of a run, which may come by position."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.definition.spec import check

Scale = float | Tensor


def refuse(**given: Any) -> None:
    """Refuse options of FlashInfer's that Quire does not have, where they are used."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported")


def takes_sink(jit_args: Any) -> bool:
    """Whether a kernel of the program's own is the one that Quire has: attention with a sink. Refuses any other."""
    if jit_args is None:
        return False
    variant = jit_args[11] if len(jit_args) > 11 else None
    check(variant == "AttentionSink", "jit_args", variant, "the variant AttentionSink, or none")
    return True


def product(a: Scale | None, b: Scale | None) -> Scale | None:
    """Two factors in one, either of which may be missing."""
    return b if a is None else a if b is None else a * b


def typed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments to compare with others. Equal ones of another type, 8.0 for 8, differ: they have not been checked."""
    return values, tuple(map(type, values))


def by_position(
    args: tuple[Any, ...],
    sink_by_position: bool,
    q_scale: Scale | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    sm_scale: float | None,
    sinks: Tensor | None,
) -> tuple[Scale | None, Scale | None, Scale | None, float | None, Tensor | None]:
    """The arguments of a run, of which `args` came by position: see `quire.wrappers.base.AttentionWrapper`."""
    most = 2 if sink_by_position else 4
    check(len(args) <= most, "arguments by position", len(args), f"at most {most} after the tensors")
    if sink_by_position:
        sinks = args[0] if args else sinks
        sm_scale = args[1] if len(args) > 1 else sm_scale
    elif args:
        q_more, k_more, v_more = (*args, None, None)[:3]
        q_scale, k_scale, v_scale = product(q_scale, q_more), product(k_scale, k_more), product(v_scale, v_more)
    return q_scale, k_scale, v_scale, sm_scale, sinks
