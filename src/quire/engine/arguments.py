"""Checks of what callers of `quire.engine.LLM` pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral

import torch

from quire.engine.params import SamplingParams

Prompt = str | Sequence[int]


def default_device() -> str:
    """The device that "auto" means."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str | torch.device) -> torch.device:
    """The device, with its index; ValueError if this machine cannot use it."""
    device = default_device() if device == "auto" else device
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        # Torch without CUDA asserts.
        raise ValueError(f"device = {str(device)!r} can't be used: {error}") from None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list of prompts; ValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, memoryview, Mapping, Set)) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise ValueError(f"prompts is of type {kind}: it must be a string, a list of token ids, or a list of either")
    listed = list(prompts)
    if listed and all(isinstance(p, Integral) for p in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def adapter_of_each(adapter: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """The name of the adapter of each of `count` prompts; ValueError if a list of them has another length."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if not isinstance(adapter, Sequence):
        raise ValueError(f"adapter = {adapter!r}: it must be the name of an adapter, a list of names, or None")
    if len(adapter) != count:
        raise ValueError(f"there are {len(adapter)} adapters for {count} prompts: give one, or one each")
    return list(adapter)


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts; ValueError if a list of them has another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise ValueError(f"params = {params!r}: they must be SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(f"there are {len(params)} params for {count} prompts: give one, or one each")
    return list(params)
