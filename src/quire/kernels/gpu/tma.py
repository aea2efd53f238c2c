"""Descriptors of tensors that a kernel loads by TMA, the copy engine of Hopper GPUs and later ones."""

from __future__ import annotations

from functools import lru_cache
from inspect import getclosurevars
from typing import Any, NamedTuple

import triton
from torch import Tensor

_MOST_KEPT = 1024  # pairs of addresses; models have one for each layer


class Matrix(NamedTuple):
    """A tensor as TMA reads it: rows of `columns` elements with a stride of `stride`, of which boxes of `box` rows and
    `width` columns are copied to shared memory. What a box has beyond the matrix is 0.
    """

    rows: int
    columns: int
    stride: int
    box: int
    width: int

    def descriptor(self, x: Tensor) -> Any:
        """What Triton's own launch path takes for a tensor at x's address."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        block = [self.box, self.width]
        layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(x.dtype).removeprefix("torch.")))
        return TensorDescriptor(x, [self.rows, self.columns], [self.stride, 1], block, layout)


class Descriptors(dict[tuple[int, int], tuple[Any, ...]]):
    """The arguments for k and v of launches of a compiled kernel by address: descriptors, each with the shape and the
    strides after it, by the addresses of k and v. Triton encodes them anew for each launch, which takes longer than the
    launch; here they are encoded when they are first looked up.

    Attributes:
        launch: the function to which Triton 3.6's launch function passes descriptors after it has encoded them.
    """

    def __init__(self, compiled: Any, matrices: tuple[Matrix, Matrix]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        self.launch = getclosurevars(compiled.run.launch).nonlocals["launcher"]
        self._kinds = [
            ((x.rows, x.columns), (x.stride, 1), tuple(of["block_size"]), of["swizzle"], of["elem_size"],
             TMA_DTYPE_DEVICE_TO_HOST[of["elem_type"]])
            for x, of in zip(matrices, compiled.metadata.tensordesc_meta, strict=True)
        ]  # fmt: skip

    def __missing__(self, addresses: tuple[int, int]) -> tuple[Any, ...]:
        if len(self) >= _MOST_KEPT:
            self.clear()
        fill = triton.runtime.driver.active.utils.fill_tma_descriptor
        arguments: tuple[Any, ...] = ()
        for address, (shape, strides, block, swizzle, size, dtype) in zip(addresses, self._kinds, strict=True):
            descriptor = fill(address, swizzle, size, dtype, block, shape, strides, 0)
            arguments = (*arguments, descriptor, *shape, *strides)
        self[addresses] = arguments
        return arguments


@lru_cache(maxsize=1024)
def descriptors(compiled: Any, matrices: tuple[Matrix, Matrix]) -> Descriptors:
    """The Descriptors of a compiled kernel."""
    return Descriptors(compiled, matrices)
