"""Picks who computes: the first family that supports a layer on a device, and why the others declined.

A family is a module with these functions:

- ``declines(spec, device) -> str | None``: the reason why it cannot compute such a layer, None if it can;
- ``attend(call, out, lse)``: attention over pages or ragged rows, into `out` and, unless None, `lse`.

"reference" is the definition in float64. It is correct anywhere and slow, so it computes only where asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.masks import PackedMask
from quire.attention.pages import PageTable, RaggedLayout
from quire.attention.spec import AttentionSpec

FAMILIES = {
    "cpu": "quire.kernels.cpu",
    "triton": "quire.kernels.triton",
    "reference": "quire.kernels.reference",
}
# FlashInfer's names for its own kernels all ask for "the best we have".
_FLASHINFER = ("fa2", "fa3", "cuda", "cudnn", "cutlass", "trtllm-gen", "cute-dsl", "cutile", "xqa")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of attention, checked: what kernels need to know, besides where the results go.

    Attributes:
        q: [tokens, num_qo_heads, head_dim_qk].
        k, v: [pages, page_size, num_kv_heads, head_dim] with a page table, [tokens, num_kv_heads, head_dim] with
            ragged rows; any strides with the last one 1.
        qo, kv: whose rows of q, and whose keys.
        q_scale, k_scale, v_scale: factors of the stored numbers; a number, or float32 [heads] of q or of k and v.
        sinks: float32 [num_qo_heads], one more logit per head in the denominator.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qo: RaggedLayout
    kv: PageTable | RaggedLayout
    spec: AttentionSpec
    mask: PackedMask | None = None
    sinks: Tensor | None = None
    q_scale: float | Tensor = 1.0
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0

    def paged(self) -> tuple[Tensor, Tensor, PageTable]:
        """k, v and their table, ragged rows as pages of size 1."""
        if isinstance(self.kv, PageTable):
            return self.k, self.v, self.kv
        return self.k.unsqueeze(1), self.v.unsqueeze(1), PageTable.from_ragged(self.kv, len(self.k))


class Family(Protocol):
    __name__: str

    def declines(self, spec: AttentionSpec, device: torch.device) -> str | None: ...

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> None: ...


def canonical(backend: str) -> str:
    """A backend name as ours: "auto" or a family; ValueError for one that nobody knows."""
    if backend in FAMILIES or backend == "auto":
        return backend
    if backend in _FLASHINFER:
        return "auto"
    raise ValueError(f"backend = {backend!r} is unknown: auto, {', '.join(FAMILIES)}, or a name of FlashInfer's")


def family(name: str) -> Family:
    return import_module(FAMILIES[name])


def why_not(name: str, spec: AttentionSpec, device: torch.device) -> str | None:
    """Why a family cannot compute such a layer on a device; None if it can."""
    try:
        module = family(name)
    except ImportError as error:
        return f"not installed ({error})"
    return module.declines(spec, device)


@lru_cache(maxsize=1024)
def choose(spec: AttentionSpec, device: torch.device, backend: str = "auto") -> str:
    """The name of the family that computes a layer.

    Raises:
        ValueError: no family can, or the one asked for can't; it says why each declined.
    """
    backend = canonical(backend)
    names = [name for name in FAMILIES if name != "reference"] if backend == "auto" else [backend]
    reasons = {}
    for name in names:
        reason = why_not(name, spec, device)
        if reason is None:
            return name
        reasons[name] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no kernels for this attention on {device}: {told}")


def attend(call: Call, out: Tensor, lse: Tensor | None, backend: str = "auto") -> None:
    """Compute a call with the family that `backend` names or, for "auto", with the first that can."""
    family(choose(call.spec, call.q.device, backend)).attend(call, out, lse)
