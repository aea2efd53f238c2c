"""Checks of what callers of `quire.engine.LLM` pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral

import torch

from quire.engine.params import SamplingParams

Prompt = str | Sequence[int]


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError that names a size which is not a positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} = {value!r}: it must be a positive integer")


def default_device() -> str:
    """The device that "auto" means."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str | torch.device) -> torch.device:
    """The device, with its index; ValueError if this machine cannot use it."""
    device = default_device() if device == "auto" else device
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"device = {str(device)!r} can't be used: {error}") from None


def default_batched_tokens(device: torch.device, max_num_seqs: int, batch_invariant: bool) -> int:
    """The tokens of the largest step. Large steps compute prompts faster, and make decoding requests wait longer; those
    of a batch-invariant engine all cost as much as the largest.
    """
    if batch_invariant:
        return max(max_num_seqs, 256) if device.type == "cuda" else 64
    return 8192 if device.type == "cuda" else 2048


def invariant_backend(backend: str, device: torch.device) -> str:
    """The kernel family of batch-invariant attention; ValueError for one whose bits depend on how a prompt is cut into
    chunks, since that depends on the other requests.
    """
    if backend == "hopper":
        what = "its bits depend on the chunks of a prompt, and these on the other requests; use triton"
        raise ValueError(f"backend = 'hopper' is not supported with batch_invariant: {what}")
    return "triton" if backend == "auto" and device.type == "cuda" else backend


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


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts; ValueError if a list of them has another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise ValueError(f"params = {params!r}: they must be SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(f"there are {len(params)} params for {count} prompts: give one, or one each")
    return list(params)
