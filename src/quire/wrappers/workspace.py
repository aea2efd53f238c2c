"""The memory that kernels keep partial states and counters in while they run."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.wrappers.buffers import check_workspace

# The size of the int workspace on a GPU, as in FlashInfer.
INT_BYTES = 8 << 20


class Workspace:
    """The float and the int workspace of a wrapper.

    The float workspace is the caller's buffer, or the wrapper's own memory where the caller gave None or an empty
    tensor. The int workspace has zeros before and after each run; the wrapper makes it, and makes a larger one where a
    batch-invariant plan needs more. What the wrapper has made stays allocated as long as the wrapper lives, also where
    a later plan needs more or none: captured graphs of earlier plans may still use it.
    """

    def __init__(self, float_buffer: Tensor | None, device: torch.device) -> None:
        self.device, self.float_buffer = device, float_buffer
        # The least number of bytes of the int workspace.
        self.min_int_bytes = INT_BYTES if device.type == "cuda" else 16
        self.int_buffer = torch.zeros(self.min_int_bytes, dtype=torch.uint8, device=device)
        self.zeros = self.int_buffer.view(torch.int32)
        # Workspaces that larger ones have replaced.
        self.outgrown: list[Tensor] = []
        # The wrapper's own float workspace.
        self._own: Tensor | None = None
        # The memory that the last plan took, of `_own` or of the caller's buffer.
        self._floats: Tensor | None = None
        # The size and the buffer that _floats was made for.
        self._floats_of: tuple[int, Tensor | None] = (0, None)

    def reset(self, float_buffer: Tensor, int_buffer: Tensor, int_size: int) -> None:
        """Replace both buffers; `int_size` bytes of the second are in use. It is zeroed.

        Raises:
            ValueError: a buffer that is no tensor, lies elsewhere, is too small, or is not aligned to 16 bytes.
        """
        self._check("float", float_buffer)
        self.reset_ints(int_buffer, int_size)
        self.float_buffer = float_buffer

    def reset_ints(self, buffer: Tensor, size: int) -> None:
        """Replace the int workspace, as `reset`."""
        self._check("int", buffer)
        given = buffer.nbytes
        check(given >= size, "int_workspace_buffer", f"{given} bytes", f"at least {size} bytes")
        self.int_buffer = buffer.zero_()
        self.zeros = buffer.view(-1).view(torch.uint8)[: given // 4 * 4].view(torch.int32)

    def _check(self, kind: str, buffer: Tensor) -> None:
        name = f"{kind}_workspace_buffer"
        check(buffer is not None, name, None, "a tensor is needed")
        check_workspace(buffer, name)
        check(buffer.device == self.device, f"{name}.device", str(buffer.device), str(self.device))

    def take(self, floats: int, ints: int) -> tuple[Tensor | None, Tensor | None]:
        """At least `floats` bytes of the float workspace (None for 0) and `ints` bytes of the int workspace.

        Raises:
            ValueError: the caller's float buffer is too small.
        """
        return self._take_floats(floats), self._take_zeros(ints)

    def _take_floats(self, size: int) -> Tensor | None:
        buffer, floats = self.float_buffer, self._floats
        if size == self._floats_of[0] and buffer is self._floats_of[1]:
            return floats
        if not size:
            floats = None
        elif buffer is not None and buffer.numel():
            check(buffer.nbytes >= size, "float_workspace_buffer", f"{buffer.nbytes} bytes", f"{size} bytes are needed")
            floats = buffer.view(-1).view(torch.uint8)[: size // 4 * 4].view(torch.float32)
        else:
            if self._own is None or self._own.nbytes < size:
                self.outgrown += [] if self._own is None else [self._own]
                self._own = torch.empty(size // 4, device=self.device)
            floats = self._own
        self._floats, self._floats_of = floats, (size, buffer)
        return floats

    def _take_zeros(self, size: int) -> Tensor:
        if size > self.zeros.nbytes:
            self.outgrown.append(self.zeros)
            size = max(size, 2 * self.zeros.nbytes)
            self.int_buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self.zeros = self.int_buffer.view(torch.int32)
        return self.zeros


class WorkspaceSizes(Workspace):
    """A workspace without memory, which counts what plans take."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device)
        self.sizes = 16, self.min_int_bytes

    def take(self, floats: int, ints: int) -> tuple[None, None]:
        """Count these numbers of bytes."""
        self.sizes = max(floats, self.sizes[0]), max(ints, self.sizes[1])
        return None, None
