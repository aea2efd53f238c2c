"""Descriptors of tensors that a kernel loads by TMA, the copy engine of Hopper GPUs and later ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from quire.kernels.gpu.triton_internals import descriptor_formats, descriptor_launch

# The most pairs of addresses that are kept. A model has one pair for each layer.
_MAX_KEPT = 1024


class TmaMatrix(NamedTuple):
    """A tensor as TMA reads it: rows of `columns` elements with a stride of `stride`, of which boxes of `box` rows and
    `width` columns are copied to shared memory. Elements of a box outside of the matrix are 0.
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
        launch: the function that takes these arguments, in place of the kernel's own launch function.
    """

    def __init__(self, compiled: Any, matrices: tuple[TmaMatrix, TmaMatrix]) -> None:
        self.launch = descriptor_launch(compiled)
        self._matrices = list(zip(descriptor_formats(compiled), matrices, strict=True))

    def __missing__(self, addresses: tuple[int, int]) -> tuple[Any, ...]:
        if len(self) >= _MAX_KEPT:
            self.clear()
        arguments: tuple[Any, ...] = ()
        for address, (kind, x) in zip(addresses, self._matrices, strict=True):
            shape, strides = (x.rows, x.columns), (x.stride, 1)
            arguments = (*arguments, kind.encode(address, shape, strides), *shape, *strides)
        self[addresses] = arguments
        return arguments


@lru_cache(maxsize=1024)
def descriptors(compiled: Any, matrices: tuple[TmaMatrix, TmaMatrix]) -> Descriptors:
    """The Descriptors of a compiled kernel."""
    return Descriptors(compiled, matrices)
