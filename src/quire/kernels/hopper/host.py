"""The family "hopper": kernels for Hopper GPUs (sm_90), written in Gluon.

`mla/` computes layers over latent caches; of all others `decode/` computes requests of few query rows, and of any
number if they are batch-invariant, and `prefill/` the rest. They share `schedule.py`, `mask.py`, `softmax.py` and
`epilogue.py`.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.family import BASIC, Family
from quire.kernels.gpu.launch import INTERPRETED, LaunchReplay, launch_into
from quire.kernels.hopper.decode import host as decode_host
from quire.kernels.hopper.mask import MASKS
from quire.kernels.hopper.mla import host as mla_host
from quire.kernels.hopper.prefill import host as prefill_host


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def _host(spec: AttentionSpec, max_q_len: int) -> ModuleType:
    """The host side of the kernel that computes a layer, or that says why none does."""
    if spec.latent:
        return mla_host
    return prefill_host if decode_host.declines(spec, max_q_len) and not spec.batch_invariant else decode_host


def _launch(call: Call, out: Tensor, lse: Tensor | None) -> LaunchReplay | None:
    replay: LaunchReplay | None = _host(call.spec, call.max_q_len).launch(call, out, lse, _processors(out.device))
    return replay


class _Hopper(Family):
    name = "hopper"
    # decode/, mla/ and prefill/ decline what one of them does not compute themselves.
    computes = BASIC | MASKS | frozenset({
        "items", "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta", "slopes", "sinks", "latent",
        "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
            return "it needs a Hopper GPU"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "it is for Hopper GPUs (sm_90)"
        reason: str | None = _host(spec, max_q_len).declines(spec, max_q_len)
        return reason

    def refuses(self, call: Call) -> str | None:
        reason: str | None = _host(call.spec, call.max_q_len).refuses(call)
        return reason

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        size: int = _host(spec, max_q_len).float_workspace_size(spec, _processors(device), max_q_len)
        return size

    def int_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return decode_host.int_workspace_size(spec, _processors(device), max_q_len, batch_size, kv_tokens)

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        return launch_into(_launch, call, out, lse)


FAMILY = _Hopper()
