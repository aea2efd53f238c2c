"""Copies of tensors of mapped files to a GPU.

A copy from memory that is not pinned passes through one buffer of the driver: a thread of the host fills it at some 7
GiB/s, and other threads wait. Here each thread fills pinned memory of its own, so that the host's memory is read by
several of them, and none of them waits for the copy to the GPU before.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20


class PinnedCopies:
    """Copies to one GPU, from any threads. Each thread has two buffers, which it fills in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        """The copy of x, when the current stream of this thread has written it; x may change after the return."""
        out = torch.empty(x.shape, dtype=x.dtype, device=self._device)
        source, target = (t.view(-1).view(torch.uint8) for t in (x.contiguous(), out))
        stream = torch.cuda.current_stream(self._device)
        for start in range(0, len(source), CHUNK_BYTES):
            part, into = (t[start : start + CHUNK_BYTES] for t in (source, target))
            buffer, copied = self._next()
            copied.synchronize()
            pinned = buffer[: len(part)]
            # torch would start threads for each copy.
            np.copyto(pinned.numpy(), part.numpy())
            into.copy_(pinned, non_blocking=True)
            copied.record(stream)
        return out

    def _next(self) -> tuple[Tensor, torch.cuda.Event]:
        """The buffer of this thread that it filled longer ago, and the event of its last copy."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = [
                (torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
        self._local.buffers.reverse()
        pair: tuple[Tensor, torch.cuda.Event] = self._local.buffers[0]
        return pair
