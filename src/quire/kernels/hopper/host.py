"""The family "hopper": decode kernels for Hopper GPUs (sm_90), written in Gluon.

`mla/` computes layers over latent caches, `decode/` all others, and prefill too if they are batch-invariant. Both share
`schedule.py`, `mask.py`, `softmax.py` and `epilogue.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call, Replay
from quire.kernels.family import BASIC, Family
from quire.kernels.gpu.launch import INTERPRETED, LaunchReplay, launch_into
from quire.kernels.hopper.decode import host as decode_host
from quire.kernels.hopper.mask import MASKS
from quire.kernels.hopper.mla import host as mla_host


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(call: Call, out: Tensor, lse: Tensor | None) -> LaunchReplay | None:
    return (mla_host if call.spec.latent else decode_host).launch(call, out, lse, _processors(out.device))


class _Hopper(Family):
    name = "hopper"
    # decode/ and mla/ decline items and position encodings, and what else one of them does not compute, themselves.
    computes = BASIC | MASKS | frozenset({
        "items", "logits_soft_cap", "pos_encoding", "rope_scale", "rope_theta", "slopes", "sinks", "latent",
        "batch_invariant",
    })  # fmt: skip

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
            return "it needs a Hopper GPU"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "it is for Hopper GPUs (sm_90)"
        return mla_host.declines(spec) if spec.latent else decode_host.declines(spec, max_q_len)

    def refuses(self, call: Call) -> str | None:
        return (mla_host if call.spec.latent else decode_host).refuses(call)

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return mla_host.float_workspace_size(spec, _processors(device), max_q_len) if spec.latent else 0

    def int_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return decode_host.int_workspace_size(spec, _processors(device), max_q_len, batch_size, kv_tokens)

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        return launch_into(_launch, call, out, lse)


FAMILY = _Hopper()
