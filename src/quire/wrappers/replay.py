"""Runs that repeat an earlier one: the same kernel is launched again, at other addresses, without checking the call
again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from quire.definition.tensors import outputs
from quire.kernels.call import Keys, Replay
from quire.wrappers.capture import CaptureGuard
from quire.wrappers.plan import Plan

Result = Tensor | tuple[Tensor, Tensor]
Key = tuple[Any, ...]
# (replay, whether the output has q's shape and dtype, bytes from k to v in memory, the keys that the launch reads)
Entry = tuple[Replay, bool, int, Keys]


class ReplayCache:
    """The runs of a plan that can be replayed.

    A replayed run skips all checks of the call, which take most of a run's time on the host. The rules:

    - A run is found by the shapes, strides, dtypes and devices of its tensors and by all its other arguments, with
      their types. Two runs with equal keys differ in addresses alone.
    - Only runs on a GPU are kept, and only where the kernel family says that its launch may be repeated. Runs that
      torch.compile traces, that would need gradients, that check the contents of tables, or whose device is not the
      current one go through all checks.
    - A new plan forgets all runs (`forget`), unless it differs from the last in its tables alone (`move`). Then the
      runs of one plan are kept, and a launch is changed to read the new tables when it is next found.
    - A launch is not repeated at addresses that are not aligned as the kernel was compiled for: `lookup` then finds
      nothing, and the run is computed and kept anew.
    """

    def __init__(self, device: torch.device, enabled: bool, capture: CaptureGuard) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._index, self._capture = device.index, capture
        self.forget()

    def forget(self) -> None:
        """Forget all runs."""
        self.current: dict[Key, Entry] = {}  # runs of the last plan
        self.earlier: dict[Key, Entry] = {}  # runs of a plan before it, which read other tables

    def move(self) -> None:
        """Keep the runs for a plan that has other tables. Those of a plan before it, which were not found again, are
        forgotten: their queries may have had another shape in each plan.
        """
        if self.current:
            self.earlier, self.current = self.current, {}

    def lookup(
        self,
        plan: Plan | None,
        q: Tensor,
        cache: Any,
        out: Tensor | None,
        lse: Tensor | None,
        sinks: Tensor | None,
        return_lse: bool,
        options: tuple[Any, ...] | None,
        q_pe: Tensor | None = None,
        k_pe: Tensor | None = None,
    ) -> tuple[Key | None, Result | None]:
        """Launch a run again, if there was an equal one.

        Args:
            cache: k and v as the caller gave them, one tensor or a pair.
            options: all other arguments of the run; None if the caller gave none, as is usual.
            q_pe, k_pe: the rotary parts of a latent layer's queries and keys.

        Returns:
            (key, result): result is None if the run has to be computed, and then `remember` may keep it under the key;
            the key is None if it must not be kept.
        """
        k, v = cache if isinstance(cache, tuple) and len(cache) == 2 else (cache, cache)
        if not self.enabled or type(q) is not Tensor or is_compiling():
            return None, None
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            return None, None
        if torch._C._cuda_getDevice() != self._index:  # a launch needs its device to be the current one
            return None, None
        try:
            if torch.is_grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (q_pe is not None and q_pe.requires_grad) or (k_pe is not None and k_pe.requires_grad)
                or (out is not None and out.requires_grad) or (lse is not None and lse.requires_grad)
            ):  # fmt: skip
                return None, None  # the checks refuse the run
            key = (
                q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                None if v is k else (v.shape, v.stride(), v.dtype, v.device), None if out is None else _kind(out),
                None if lse is None else _kind(lse), None if sinks is None else _kind(sinks), return_lse,
                options and (options, tuple(map(type, options))),
                None if q_pe is None else _kind(q_pe), None if k_pe is None else _kind(k_pe),
            )  # fmt: skip
            found = None if plan is None else self.current.get(key) or self._moved(key, plan)
        except (AttributeError, TypeError):  # not a tensor, or a value without a hash: the checks refuse the run
            return None, None
        if found is None or plan is None:
            return key, None
        return key, self._launch(found, plan, q, k, v, out, lse, sinks, return_lse, q_pe, k_pe)

    def _moved(self, key: Key, plan: Plan) -> Entry | None:
        """A run of an earlier plan, changed to read the tables of this one."""
        found = self.earlier.pop(key, None)
        if found is None:
            return None
        replay, alike, v_offset, kv = found
        if not replay.move(kv, plan.qo, plan.kv):
            return None
        entry = self.current[key] = replay, alike, v_offset, plan.kv
        return entry

    def _launch(
        self,
        entry: Entry,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        sinks: Tensor | None,
        return_lse: bool,
        q_pe: Tensor | None,
        k_pe: Tensor | None,
    ) -> Result | None:
        replay, alike, v_offset, _kv = entry
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream:  # the default stream cannot be captured
            self._capture.note()
        if out is None:
            out = torch.empty_like(q) if alike else outputs(len(q), plan.spec, q.device, None, None, False)[0]
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        k_address = k.data_ptr()
        launched = replay(
            q.data_ptr(),
            None if q_pe is None else q_pe.data_ptr(),
            k_address,
            k_address + v_offset if v is k else v.data_ptr(),
            None if k_pe is None else k_pe.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            stream,
        )
        if not launched:
            return None
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def remember(
        self, key: Key | None, replay: Replay | None, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Keep a computed run, if it has a key and can be replayed. k and v are those that kernels read."""
        if key is not None and replay is not None:
            alike = out.shape == q.shape and out.dtype == q.dtype and q.is_contiguous()
            self.current[key] = replay, alike, v.data_ptr() - k.data_ptr(), plan.kv


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device
