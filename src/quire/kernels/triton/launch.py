"""Starting compiled kernels: Triton's own way looks at each of fifty arguments, and takes longer than small kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _nothing():
    pass


INTERPRETED = isinstance(_nothing, InterpretedFunction)  # TRITON_INTERPRET=1: on the CPU, slowly


class Launcher:
    """Launches of one kernel with one set of constants.

    Triton compiles a kernel for the kinds of its arguments, for whether addresses are multiples of 16 bytes, and for
    strides that are. So what it compiled for given strides and aligned addresses is kept, and launched with addresses;
    anything else goes Triton's way.
    """

    def __init__(self, kernel: Any, constants: Any, **options: int) -> None:
        self._kernel, self._constants, self._options = kernel, constants, options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        aligned: tuple[Tensor | None, ...],
        pointers: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
        strides: tuple[int, ...],
        kinds: tuple[Any, ...],
    ) -> None:
        """Launch on the device of the first tensor. The kernel's arguments are the first four tuples and the constants.

        Args:
            aligned: tensors whose alignment the kernel is compiled for; pointers: others.
            numbers: what the kernel is not compiled for; strides: what it is.
            kinds: whatever else tells kinds of arguments apart.
        """
        device = aligned[0].device.index  # type: ignore[union-attr]
        if not INTERPRETED and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, aligned, pointers, numbers, strides, kinds)
            return
        first = [None if x is None else x.data_ptr() for x in aligned]
        low = 0
        for address in first:
            low |= address or 0
        key = (low & 15, device, strides, kinds)
        compiled = self._compiled.get(key)
        if compiled is not None:
            rest = [None if x is None else x.data_ptr() for x in pointers]
            compiled[(programs, 1, 1)](*first, *rest, *numbers, *strides, self._constants)
            return
        arguments = (*aligned, *pointers, *numbers, *strides, self._constants)
        compiled = self._kernel[(programs,)](*arguments, **self._options)
        if low & 15 == 0 and compiled is not None:
            self._compiled[key] = compiled
