"""Decode for Hopper GPUs, written in Gluon. `decode.py`, `tile.py` and `parts.py` have the kernel for most layers,
with `units.py` instead of `parts.py` where layers are batch-invariant, prefill too; `latent.py` and `latent_parts.py`
have that for latent caches (MLA). All are over `line.py` and `results.py`; `decode_call.py` and `latent_call.py` lie
between calls and kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.family import BASIC, Family
from quire.kernels.gpu.launch import INTERPRETED, LaunchReplay, launch_into
from quire.kernels.hopper.decode import host as decode_call
from quire.kernels.hopper.mla import host as latent_call


def declines(spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return "it needs a Hopper GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper GPUs (sm_90)"
    return latent_call.declines(spec) if spec.latent else decode_call.declines(spec, max_q_len)


def refuses(call: Call) -> str | None:
    return (latent_call if call.spec.latent else decode_call).refuses(call)


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def scratch(spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, keys: int) -> int:
    return latent_call.scratch(spec, _processors(device), max_q_len) if spec.latent else 0


def zeros(spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, keys: int) -> int:
    return decode_call.zeros(spec, _processors(device), max_q_len, batch_size, keys)


def attend(call: Call, out: Tensor, lse: Tensor | None) -> LaunchReplay | None:
    return launch_into(_launch, call, out, lse)


def _launch(call: Call, out: Tensor, lse: Tensor | None) -> LaunchReplay | None:
    return (latent_call if call.spec.latent else decode_call).launch(call, out, lse, _processors(out.device))


class _Hopper(Family):
    name = "hopper"
    computes = BASIC | frozenset({
        "causal", "window_left", "custom_mask", "items", "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta",
        "slopes", "sinks", "latent", "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        return declines(spec, device, max_q_len)

    def refuses(self, call: Call) -> str | None:
        return refuses(call)

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return scratch(spec, device, max_q_len, batch_size, kv_tokens)

    def int_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return zeros(spec, device, max_q_len, batch_size, kv_tokens)

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        return attend(call, out, lse)


FAMILY = _Hopper()
