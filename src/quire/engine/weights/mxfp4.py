"""GPT-OSS's experts in MXFP4: 4-bit floating-point codes, with a power of two for each 32 of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.engine.weights.format import Format, Tensors, check_dtype, check_shape, required, unpack_nibbles
from quire.engine.weights.layouts import Matrix

GROUP = 32
# The exponent that stands for "not a number".
_NAN = 255


@dataclass(frozen=True)
class Mxfp4(Format):
    """For each projection of the experts, `_blocks` uint8 [experts, out_features, in_features / 32, 16] and `_scales`
    uint8 [experts, out_features, in_features / 32].
    """

    method: ClassVar[str] = "mxfp4"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: (f"{name}_blocks", f"{name}_scales") for name in ("gate_up_proj", "down_proj")
    }

    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        name = next(name.rpartition("_")[0] for name in tensors if name.endswith(("_blocks", "_scales")))
        blocks, exponents = required(tensors, prefix, f"{name}_blocks", f"{name}_scales")
        check_shape(f"{prefix}{name}_blocks", blocks, (*exponents.shape, GROUP // 2))
        return mxfp4_matrix(blocks.flatten(-2), exponents, (f"{prefix}{name}_blocks", f"{prefix}{name}_scales"))

    def random(self, shape: Sequence[int], device: torch.device) -> Matrix:
        return Matrix.random("mxfp4", shape, (1, GROUP), device)


def mxfp4_matrix(packed: Tensor, exponents: Tensor, names: tuple[str, str]) -> Matrix:
    """A weight of MXFP4.

    Args:
        packed: uint8 [..., out_features, in_features / 2], the code of the even column in the lower half.
        exponents: uint8 [..., out_features, in_features / 32], of powers of two, plus 127.
        names: of both, for messages.
    """
    for name, tensor in zip(names, (packed, exponents), strict=True):
        check_dtype(name, tensor, torch.uint8)
    check_shape(names[1], exponents, (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP))
    if (exponents == _NAN).any():
        at = (exponents == _NAN).nonzero()[0].tolist()
        raise ValueError(f"{names[1]} is nan at {at}: scales must be finite and positive")
    return Matrix("mxfp4", unpack_nibbles(packed), exponents.view(torch.float8_e8m0fnu), (1, GROUP))


def read(settings: Mapping[str, Any]) -> Mxfp4:
    """The format that a `quantization_config` describes."""
    return Mxfp4()
