"""A kernel family: kernels for one kind of machine, behind the interface that all families share."""

from __future__ import annotations

from dataclasses import MISSING, fields

import torch
from torch import Tensor

from quire.definition.masks import MaskSpec
from quire.definition.spec import MASK_FIELDS, AttentionSpec
from quire.kernels.call import Call, Replay

# Fields that every family computes: they have no neutral default.
BASIC = frozenset({"head_dim_vo", "q_dtype", "kv_dtype", "o_dtype", "sm_scale"})
_DEFAULTS = {
    f.name: f.default for f in (*fields(AttentionSpec), *fields(MaskSpec)) if f.init and f.default is not MISSING
}
_DEFAULTS.pop("mask")


class Family:
    """What computes attention on one kind of machine.

    A family is an object named `FAMILY` in the module that `quire.kernels.registry.FAMILIES` names. It overrides
    `declines` and `attend`, and the other methods where the defaults do not fit.

    Attributes:
        name: as in `registry.FAMILIES`.
        computes: the fields of `AttentionSpec`, and of its `mask`, that its kernels take into account. A layer that
            sets another field to something other than the field's default is declined, so that a field which is added
            to the spec is declined by every family until the family computes it.
    """

    name: str
    computes: frozenset[str]

    def why_not(self, spec: AttentionSpec, device: torch.device, max_q_len: int = 0) -> str | None:
        """The reason why this family cannot compute a layer on a device for requests of at most max_q_len query tokens
        (0: any number); None if it can.
        """
        for name, default in _DEFAULTS.items():
            if name not in self.computes and getattr(spec.mask if name in MASK_FIELDS else spec, name) != default:
                return f"it does not compute {name}"
        return self.declines(spec, device, max_q_len)

    def declines(self, spec: AttentionSpec, device: torch.device, max_q_len: int) -> str | None:
        """The reason why this family cannot compute a layer whose fields are all in `computes`; None if it can."""
        raise NotImplementedError

    def refuses(self, call: Call) -> str | None:
        """The reason why this family cannot compute one call of a layer that it computes otherwise, for instance
        because of how tensors are aligned; None if it can.
        """
        return None

    def float_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        """Bytes of `Call.float_workspace` that a batch needs whose requests have at most max_q_len query tokens (0: any
        number) and kv_tokens keys together; the last two arguments count for batch-invariant layers alone.
        """
        return 0

    def int_workspace_size(
        self, spec: AttentionSpec, device: torch.device, max_q_len: int, batch_size: int, kv_tokens: int
    ) -> int:
        """Bytes of `Call.int_workspace` that a batch of a batch-invariant layer needs; others need at most 8 MiB."""
        return 0

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        """Compute a call into out and, unless it is None, lse. Returns what replays the call, if it can be replayed."""
        raise NotImplementedError
