"""Chooses who computes: the first kernel family that computes a layer on a device, and why the others decline.

"reference", the definition in float64, is correct anywhere and slow: it computes only where `backend` names it.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module

import torch

from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call
from quire.kernels.family import Family

FAMILIES = {
    "cpu": "quire.kernels.cpu.host",
    "hopper": "quire.kernels.hopper.host",
    "triton": "quire.kernels.triton.host",
    "reference": "quire.kernels.reference",
}
# FlashInfer's names of its own kernels all ask for the fastest kernels that there are.
_FLASHINFER = {"fa2", "fa3", "cuda", "cudnn", "cutlass", "trtllm-gen", "cute-dsl", "cutile", "xqa"}
_FLASHINFER |= {"cute-dsl-modular", "cute-dsl-monolithic"}


def canonical(backend: str) -> str:
    """A backend name as "auto" or the name of a family.

    Raises:
        ValueError: a name that neither Quire nor FlashInfer has.
    """
    if backend in FAMILIES or backend == "auto":
        return backend
    if backend in _FLASHINFER:
        return "auto"
    raise ValueError(f"backend = {backend!r} is unknown: auto, {', '.join(FAMILIES)}, or a name of FlashInfer's")


@lru_cache(maxsize=len(FAMILIES))
def family(name: str) -> Family:
    """A family by its name; ImportError where a package that it needs is not installed."""
    found: Family = import_module(FAMILIES[name]).FAMILY
    return found


def why_not(name: str, spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    """Why a family cannot compute a layer on a device, as `Family.why_not`, or cannot be imported; None if it can."""
    try:
        return family(name).why_not(spec, device, max_q_len)
    except ImportError as error:
        return f"not installed ({error})"


@lru_cache(maxsize=1024)
def choose(
    spec: AttentionSpec, device: torch.device, backend: str = "auto", max_q_len: int = 0, but: tuple[str, ...] = ()
) -> Family:
    """The family that computes a layer for requests of at most max_q_len query tokens (0: any number). For "auto",
    families in `but` do not count.

    Raises:
        ValueError: no family can, or the named one cannot; it says why each declined.
    """
    backend = canonical(backend)
    names = [name for name in FAMILIES if name not in ("reference", *but)] if backend == "auto" else [backend]
    reasons = {}
    for name in names:
        reason = why_not(name, spec, device, max_q_len)
        if reason is None:
            return family(name)
        reasons[name] = reason
    refusals = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no kernels for this attention on {device}: {refusals}")


def admit(call: Call, backend: str = "auto", chosen: Family | None = None) -> Family:
    """The family that computes a call: the one that `backend` names or, for "auto", the first that can.

    Args:
        chosen: the family, if it was chosen before for such layers and requests. Another one computes the call if this
            one refuses it.

    Raises:
        ValueError: no family can, or the named one cannot.
    """
    but: tuple[str, ...] = ()
    found = chosen or choose(call.spec, call.q.device, backend, call.max_q_len)
    while (reason := found.refuses(call)) is not None:
        if canonical(backend) != "auto":
            raise ValueError(f"no kernels for this call: {found.name}: {reason}")
        warnings.warn(f"{found.name} does not compute a call, another kernel family does: {reason}", stacklevel=2)
        but += (found.name,)
        found = choose(call.spec, call.q.device, backend, call.max_q_len, but)
    return found
