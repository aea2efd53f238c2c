"""AWQ: 4-bit codes with zero points, packed along the rows of the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quire.engine.weights.format import (
    Format,
    Tensors,
    check_dtype,
    check_scale,
    check_shape,
    group_size,
    required,
    unpack,
)
from quire.engine.weights.layouts import Matrix

# The place, among the eight codes of a word, of each of eight neighbouring rows of the weight.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Format):
    """`qweight` int32 [in_features, out_features / 8], `qzeros` int32 [groups, out_features / 8] and `scales` [groups,
    out_features], the layout of AWQ's "gemm" kernels.
    """

    group: int

    method: ClassVar[str] = "awq"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("weight", "qweight", "qzeros", "scales")}

    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        words, zero_words, scale = required(tensors, prefix, "qweight", "qzeros", "scales")
        for name, tensor in (("qweight", words), ("qzeros", zero_words)):
            check_dtype(f"{prefix}{name}", tensor, torch.int32)
        (columns, packed_rows), groups = words.shape, len(scale)
        check_shape(f"{prefix}scales", scale, (groups, packed_rows * 8))
        check_shape(f"{prefix}qzeros", zero_words, (groups, packed_rows))
        check_scale(f"{prefix}scales", scale)
        size = group_size(f"{prefix}scales", columns, groups, self.group)
        codes, zero = (_unpacked(x) for x in (words, zero_words))
        return Matrix("int4", codes.T.contiguous(), scale.T.contiguous(), (1, size), zero.T.contiguous())

    def random(self, shape: Sequence[int], device: torch.device) -> Matrix:
        group = shape[-1] if self.group == -1 else self.group
        return Matrix.random("int4", shape, (1, group), device, zeros=True)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """The codes of words in the order of the weight's rows."""
    return unpack(words, 4).unflatten(-1, (-1, 8))[..., list(_PLACES)].flatten(-2)


def read(settings: Mapping[str, Any]) -> Awq:
    """The format that a `quantization_config` describes.

    Raises:
        ValueError: it is another format of AWQ.
    """
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    if bits != 4:
        raise ValueError(f"bits = {bits} is not supported: 4 is")
    if version != "gemm":
        raise ValueError(f"version = {version!r} is not supported: 'gemm' is")
    return Awq(settings.get("group_size", settings.get("q_group_size", 128)))
