"""The oracle as a family: float64, any device that torch has, slow. It computes only where `backend` names it."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from quire.definition import oracle
from quire.definition.masks import MaskSpec
from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.family import Family


def declines(spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    return None


def attend(call: Call, out: Tensor, lse: Tensor | None) -> None:
    call = call.expanded()
    k, v, table = call.paged()
    exact, exact_lse = oracle.attend_batch(
        call.q,
        k,
        v,
        call.qo,
        table,
        call.spec,
        mask=call.mask,
        sinks=call.sinks,
        q_scale=call.q_scale,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
    )
    out.copy_(exact)
    if lse is not None:
        lse.copy_(exact_lse)


class _Reference(Family):
    name = "reference"
    # The oracle defines every field of AttentionSpec and MaskSpec.
    computes = frozenset(f.name for record in (AttentionSpec, MaskSpec) for f in fields(record) if f.init) - {"mask"}

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        return declines(spec, device, max_q_len)

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        attend(call, out, lse)
        return None


FAMILY = _Reference()
