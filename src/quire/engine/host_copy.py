"""Results of a step on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors to the host, which the constructor starts and `wait` waits for.

    Args:
        tensors: of one device, whose contents may change after the call.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event = None
        if not tensors[0].is_cuda:
            self._host = [x.clone() for x in tensors]
            return
        self._host = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    def __len__(self) -> int:
        return len(self._host)

    def wait(self) -> list[Tensor]:
        """The copies, once the device has computed the tensors."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host
