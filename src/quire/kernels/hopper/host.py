"""The family "hopper": kernels for Hopper GPUs (sm_90), written in Gluon.

`mla/` computes layers over latent caches; of all others `decode/` computes requests of few query rows, and `prefill/`
the rest. They share `schedule.py`, `mask.py`, `softmax.py` and `epilogue.py`.

One kernel computes a batch, the one for its longest request; where that is not known, prefill. Batch-invariant layers
are the exception: each request is computed by the kernel for its own length, so that its bits do not depend on the
others. Where there may be long and short requests, both kernels are launched, and each leaves out the other's requests.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
import triton
from torch import Tensor

from quire.definition.spec import AttentionSpec
from quire.definition.versions import untested
from quire.kernels.call import Call, Replay
from quire.kernels.family import BASIC
from quire.kernels.gpu.launch import GpuFamily
from quire.kernels.gpu.triton_internals import INTERPRETED
from quire.kernels.hopper.decode import host as decode_host
from quire.kernels.hopper.mask import MASKS
from quire.kernels.hopper.mla import host as mla_host
from quire.kernels.hopper.prefill import host as prefill_host
from quire.kernels.hopper.schedule import decode_tokens


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def _hosts(spec: AttentionSpec, max_q_len: int) -> tuple[ModuleType, ...]:
    """The host sides of the kernels that a layer must suit. Those of a batch-invariant layer do not depend on
    max_q_len, so that its requests are all computed by one family.
    """
    if spec.latent:
        return (mla_host,)
    if spec.batch_invariant:
        return prefill_host, decode_host
    return (prefill_host,) if decode_host.declines(spec, max_q_len) else (decode_host,)


@lru_cache(maxsize=1024)
def _launched(spec: AttentionSpec, max_q_len: int) -> tuple[ModuleType, ...]:
    """Those of `_hosts` whose kernels are launched, in their order: prefill, which takes longer, works while the host
    prepares the launch of decode.
    """
    hosts = _hosts(spec, max_q_len)
    if len(hosts) > 1 and 0 < max_q_len <= decode_tokens(spec):
        return (decode_host,)
    if len(hosts) > 1 and decode_tokens(spec) == 0:
        return (prefill_host,)
    return hosts


class _Hopper(GpuFamily):
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
        # Releases of Triton rename parts of Gluon, so that kernels may not compile with another one.
        if found := untested({"triton": triton.__version__}):
            return f"it was not tested with {found[0]}"
        reasons = [host.declines(spec, max_q_len) for host in _hosts(spec, max_q_len)]
        return next((reason for reason in reasons if reason), None)

    def refuses(self, call: Call) -> str | None:
        reasons = [host.refuses(call) for host in _hosts(call.spec, call.max_q_len)]
        return next((reason for reason in reasons if reason), None)

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        processors = _processors(device)
        sizes = [host.float_workspace_size(spec, processors, max_q_len) for host in _hosts(spec, max_q_len)]
        return max(sizes)

    def int_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        return decode_host.int_workspace_size(spec, _processors(device), max_q_len, batch_size, kv_tokens)

    def launch(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        processors = _processors(out.device)
        replays = [host.launch(call, out, lse, processors) for host in _launched(call.spec, call.max_q_len)]
        first, second = replays[0], replays[-1]
        if first is None or second is None or len(replays) == 1:
            return first and second
        # Both launches check the alignment of the same addresses, so that either both run or none does.
        return lambda addresses, stream: first(addresses, stream) and second(addresses, stream)


FAMILY = _Hopper()
