"""What a reader of a format of quantized weights has, and what readers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from quire.engine.weights.layouts import Matrix

Tensors = Mapping[str, Tensor]
# The ends of the names of tensors that quantize activations statically, which nothing uses.
OF_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")


class Format(ABC):
    """How a checkpoint stores quantized weights.

    Attributes:
        method: its name in config.json.
        names: for each parameter of a model that may be quantized, by the end of its name, the ends of the names of the
            tensors that a checkpoint has for it.
    """

    method: ClassVar[str]
    names: ClassVar[Mapping[str, tuple[str, ...]]]

    @abstractmethod
    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        """The weight that tensors of a checkpoint are.

        Args:
            tensors: by the ends of their names, all of one weight.
            prefix: what precedes these ends, for messages.

        Raises:
            ValueError: a tensor is missing, has another shape or dtype than the format has, or has scales that are NaN,
                infinite or negative.
        """

    def random(self, shape: Sequence[int], device: torch.device) -> Matrix:
        """A random weight [..., out_features, in_features] on a device.

        Raises:
            ValueError: no random weights are made in the format.
        """
        raise ValueError(f"load_format = 'dummy' is not supported with weights of quant_method {self.method!r}")


def required(tensors: Tensors, prefix: str, *names: str) -> list[Tensor]:
    """The tensors of these names; ValueError if one is missing."""
    missing = next((name for name in names if name not in tensors), None)
    if missing is not None:
        others = ", ".join(f"{name} {list(tensor.shape)} ({tensor.dtype})" for name, tensor in tensors.items())
        raise ValueError(f"{prefix}{missing} is missing in the checkpoint, which has {others}")
    return [tensors[name] for name in names]


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise a ValueError if a tensor has another dtype than these."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and the format has {expected}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise a ValueError if a tensor of a checkpoint has another shape than the weight's shape and format ask for."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} is {list(tensor.shape)}, and {list(expected)} by the weight's shape and format")


def check_scale(name: str, scale: Tensor) -> None:
    """Raise a ValueError if a scale is NaN, infinite or negative."""
    values = scale.float()
    wrong = ~(values.isfinite() & (values >= 0))
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} is {values[tuple(at)].item()} at {at}: scales must be finite and positive")


def group_size(name: str, columns: int, groups: int, configured: int | None = None) -> int:
    """The number of columns of a group, if rows of `columns` columns have `groups` groups.

    Args:
        name: of the scales, for messages.
        configured: the size by config.json, -1 for all columns, with which the last group may have fewer columns. A
            tensor may have groups of another size, which must be a power of two then.

    Raises:
        ValueError: the groups are not of one size.
    """
    if configured is not None:
        size = columns if configured == -1 else configured
        if size > 0 and -(-columns // size) == groups:
            return size
    if not 0 < groups <= columns or columns % groups:
        raise ValueError(f"{name} has {groups} groups for each row, which do not divide the {columns} columns evenly")
    size = columns // groups
    if configured is not None and groups > 1 and size & (size - 1):
        what = f"{groups} groups for each row of {columns} columns"
        raise ValueError(f"{name} has {what}, which do not fit group_size = {configured}")
    return size


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes that 32-bit words hold, lowest bits first: int32 [..., n] as uint8 [..., n * 32 / bits], for 4 or 8
    bits.
    """
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else unpack_nibbles(codes)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The 4-bit codes of bytes, the low half first: uint8 [..., n] as uint8 [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def integers(bits: int, codes: Tensor, scale: Tensor, size: int, zero: Tensor | None, order: Tensor | None) -> Matrix:
    """A weight of unsigned codes, of which the middle one means 0 if there are no zero points.

    Args:
        bits: of a code, 4 or 8.
        codes: uint8 [out_features, in_features].
        scale: [out_features, groups].
        size: the columns of a group.
        zero: uint8 [out_features, groups].
        order: as `Matrix` has it.
    """
    if bits == 4:
        return Matrix("int4", codes, scale, (1, size), zero, order)
    return Matrix("int8", signed(codes), scale, (1, size), None if zero is None else signed(zero), order)


def signed(codes: Tensor) -> Tensor:
    """8-bit codes whose zero is 128 as int8."""
    return (codes ^ 128).view(torch.int8)
