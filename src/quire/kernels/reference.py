"""The oracle as a family: float64, any device that torch has, slow. Computes only where asked for by name."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition import oracle
from quire.definition.spec import AttentionSpec
from quire.kernels.registry import Call


def declines(spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    return None


def attend(call: Call, out: Tensor, lse: Tensor | None) -> None:
    call = call.plain()
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
