"""Picks who computes: the first family that supports a layer on a device, and why the others declined.

A family is a module with these functions:

- ``declines(spec, device, max_q_len) -> str | None``: the reason why it cannot compute such a layer for requests of at
  most so many query tokens (0: any number), None if it can;
- ``attend(call, out, lse) -> Repeat | None``: attention over pages or ragged rows, into `out` and, unless None, `lse`;
- ``refuses(call) -> str | None``, if there are calls of such layers that it cannot compute: the reason why. With
  "auto" the next family computes them, and a warning says so;
- ``scratch(spec, device, max_q_len, batch_size, keys) -> int``, if it needs any: bytes of scratch memory for a batch
  with at most so many query tokens in a request (0: any number), and so many keys in all;
- ``zeros(spec, device, max_q_len, batch_size, keys) -> int``, if 8 MiB are not always enough: bytes of zeros for such a
  batch of a batch-invariant layer.

"reference", the definition in float64, is correct anywhere and slow: it computes only where asked for by name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import LengthTable, PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec

FAMILIES = {
    "cpu": "quire.kernels.cpu.host",
    "hopper": "quire.kernels.hopper.host",
    "triton": "quire.kernels.triton.host",
    "reference": "quire.kernels.reference",
}
# FlashInfer's names for its own kernels all ask for "the best we have".
_FLASHINFER = {"fa2", "fa3", "cuda", "cudnn", "cutlass", "trtllm-gen", "cute-dsl", "cutile", "xqa"}
_FLASHINFER |= {"cute-dsl-modular", "cute-dsl-monolithic"}


@dataclass(slots=True, eq=False)
class Call:
    """One call of attention, checked: what kernels need to know, besides where the results go.

    Attributes:
        q: [tokens, num_qo_heads, head_dim_qk].
        k, v: [pages, page_size, num_kv_heads, head_dim] with a page table, [tokens, num_kv_heads, head_dim] with
            ragged rows; any strides with the last one 1.
        qo, kv: whose rows of q, and whose keys.
        sinks: float32 [num_qo_heads], one more logit per head in the denominator.
        q_scale, k_scale, v_scale: factors of the stored numbers; a number, or float32 [heads] of q or of k and v.
        q_pe, k_pe: with spec.latent, the second part of queries, [tokens, num_qo_heads, 64], and of keys, [pages,
            page_size, 1, 64]; q and k are then the first, and v is k. pe_gain: a factor of the second part alone,
            besides q_scale and k_scale, for fp8 caches.
        max_q_len: the most query tokens that a request has, 0 if nobody knows.
        scratch, zeros: memory of the caller's that no other call uses meanwhile, float32 as much as the family asks for
            and 8 MiB or more of int32 zeros, which are zeros again afterwards; kernels take their own where there is
            none.
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
    items: Items | None = None
    q_pe: Tensor | None = None
    k_pe: Tensor | None = None
    pe_gain: float = 1.0
    max_q_len: int = 0
    scratch: Tensor | None = None
    zeros: Tensor | None = None

    def scratch_for(self, size: int) -> Tensor:
        """Memory for `size` float32 numbers: the caller's, or new."""
        if self.scratch is None or self.scratch.numel() < size:
            return torch.empty(size, dtype=torch.float32, device=self.q.device)
        return self.scratch

    def zeros_for(self, size: int, least: int = 0) -> Tensor:
        """`size` int32 zeros: the caller's, which may be fewer, if they are `least`, or new."""
        if self.zeros is None or self.zeros.numel() < least:
            return torch.zeros(size, dtype=torch.int32, device=self.q.device)
        return self.zeros

    def table(self) -> tuple[int, Tensor, Tensor, bool, int]:
        """The page size, int32 page ids, lengths of last pages or, if the bool says so, of whole requests, and how many
        ids kernels may read. Of ragged rows the page size is 0, nothing is to be read but kv.indptr: it counts rows.
        """
        kv, pool = self.kv, self.k.shape[0]
        if isinstance(kv, PageTable):
            by_length, entries = isinstance(kv, LengthTable), kv.indices.shape[0] if pool else 0
            return kv.page_size, kv.indices, kv.per_request, by_length, entries
        return 0, kv.indptr, kv.indptr, False, pool

    def paged(self) -> tuple[Tensor, Tensor, PageTable]:
        """k, v and their table, ragged rows as pages of size 1."""
        if isinstance(self.kv, PageTable):
            return self.k, self.v, self.kv
        return self.k.unsqueeze(1), self.v.unsqueeze(1), PageTable.from_ragged(self.kv, len(self.k))

    def plain(self) -> Call:
        """The same for kernels that know no items (they become a mask) and no latent cache (it is copied whole)."""
        if self.items is None and self.q_pe is None:
            return self
        q, k, spec, mask = self.q, self.k, self.spec, self.mask
        if self.items is not None:
            mask = self.items.packed(self.qo.lengths(), self.kv.lengths())
            spec = spec.but(items=False, custom_mask=True)
        if self.q_pe is not None and self.k_pe is not None:
            q_pe = self.q_pe
            if self.pe_gain != 1.0:  # what a product with the gain would lose in halves counts in the oracle
                q, q_pe = q.float(), q_pe.float() * self.pe_gain
            q, k = torch.cat([q, q_pe], -1), torch.cat([k, self.k_pe], -1)
            spec = spec.but(latent=False, q_dtype=q.dtype)
        scales = (self.q_scale, self.k_scale, self.v_scale)
        return Call(q, k, self.v, self.qo, self.kv, spec, mask, self.sinks, *scales)


class Repeat(Protocol):
    """A call that is repeated with other tensors of the same shapes, strides, dtypes and devices."""

    def __call__(
        self,
        q: int,
        q_pe: int | None,
        k: int,
        v: int,
        k_pe: int | None,
        out: int,
        lse: int | None,
        sinks: int | None,
        stream: int,
    ) -> bool:
        """Do it on a stream, with tensors at these addresses; False, and nothing done, if it does not go for them."""

    def moved(self, table: PageTable, other: PageTable) -> Repeat | None:
        """The same over another page table of as many requests, if it can be."""


class Family(Protocol):
    __name__: str

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None: ...

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Repeat | None: ...


def canonical(backend: str) -> str:
    """A backend name as ours: "auto" or a family; ValueError for one that nobody knows."""
    if backend in FAMILIES or backend == "auto":
        return backend
    if backend in _FLASHINFER:
        return "auto"
    raise ValueError(f"backend = {backend!r} is unknown: auto, {', '.join(FAMILIES)}, or a name of FlashInfer's")


@lru_cache(maxsize=len(FAMILIES))
def family(name: str) -> Any:
    return import_module(FAMILIES[name])


def why_not(name: str, spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    """Why a family cannot compute such a layer on a device; None if it can."""
    try:
        module: Family = family(name)
    except ImportError as error:
        return f"not installed ({error})"
    return module.declines(spec, device, max_q_len)


@lru_cache(maxsize=1024)
def choose(
    spec: AttentionSpec, device: torch.device, backend: str = "auto", max_q_len: int = 0, but: tuple[str, ...] = ()
) -> str:
    """The name of the family that computes a layer, for requests of at most so many query tokens (0: any number). For
    "auto", families in `but` do not count.

    Raises:
        ValueError: no family can, or the one asked for can't; it says why each declined.
    """
    backend = canonical(backend)
    names = [name for name in FAMILIES if name not in ("reference", *but)] if backend == "auto" else [backend]
    reasons = {}
    for name in names:
        reason = why_not(name, spec, device, max_q_len)
        if reason is None:
            return name
        reasons[name] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no kernels for this attention on {device}: {told}")


def scratch(spec: AttentionSpec, device: torch.device, backend: str, max_q_len: int, batch_size: int, keys: int) -> int:
    """Bytes of scratch memory that calls of a layer need.

    Raises:
        ValueError: as `choose`.
    """
    module = family(choose(spec, device, backend, max_q_len))
    return module.scratch(spec, device, max_q_len, batch_size, keys) if hasattr(module, "scratch") else 0


def zeros(spec: AttentionSpec, device: torch.device, backend: str, max_q_len: int, batch_size: int, keys: int) -> int:
    """Bytes of zeros that calls of a batch-invariant layer need, if 8 MiB are not enough, or less.

    Raises:
        ValueError: as `choose`.
    """
    module = family(choose(spec, device, backend, max_q_len))
    return module.zeros(spec, device, max_q_len, batch_size, keys) if hasattr(module, "zeros") else 0


@lru_cache(maxsize=4096, typed=True)
def layer(
    spec: AttentionSpec, window_left: int | None, logits_soft_cap: float | None, sm_scale: float | None, sinks: bool
) -> AttentionSpec:
    """A planned layer with what one run says otherwise."""
    given = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
    return spec.but(sinks=sinks, **{name: value for name, value in given.items() if value is not None})


def attend(call: Call, out: Tensor, lse: Tensor | None, backend: str = "auto") -> Repeat | None:
    """Compute a call with the family that `backend` names or, for "auto", with the first that can.

    Returns:
        where the family can, what repeats the call with other tensors of the same kinds.

    Raises:
        ValueError: no family can, or the one asked for can't.
    """
    but: tuple[str, ...] = ()
    while True:
        name = choose(call.spec, call.q.device, backend, call.max_q_len, but)
        module = family(name)
        reason = module.refuses(call) if hasattr(module, "refuses") else None
        if reason is None:
            repeat: Repeat | None = module.attend(call, out, lse)
            return repeat
        if canonical(backend) != "auto":
            raise ValueError(f"no kernels for this call: {name}: {reason}")
        warnings.warn(f"{name} does not compute a call, another kernel family does: {reason}", stacklevel=2)
        but += (name,)
