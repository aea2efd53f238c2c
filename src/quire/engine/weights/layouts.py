"""What all formats of quantized weights become: a matrix of codes with a scale for each block of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.steps import MIDDLE, dequantize

Kind = Literal["fp8", "int8", "int4", "mxfp4"]

# The standard deviations of the numbers of random codes.
_SIZES = {"fp8": 100.0, "int8": 73.0, "int4": 4.6, "mxfp4": 2.9}


@dataclass(frozen=True)
class Matrix:
    """A quantized weight: (code - zero) * scale, where the scale and the zero point are those of the code's block.

    Attributes:
        kind: "fp8": codes are float8_e4m3fn. "int8": they are int8. "int4": uint8 from 0 to 15, of which 8 is zero if
            there are no zero points. "mxfp4": uint8 from 0 to 15, the bits of an E2M1 number.
        codes: [..., out_features, in_features].
        scale: [..., out_features / rows, in_features / columns], rounded up, of a floating-point dtype, or
            float8_e8m0fnu, the exponent of a power of two.
        block: the rows and the columns of a block.
        zero: of int8 and int4, codes of the shape of `scale` and the dtype of `codes`.
        order: int64 [in_features], the input of each column of codes; None: column i is of input i.
    """

    kind: Kind
    codes: Tensor
    scale: Tensor
    block: tuple[int, int]
    zero: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def random(
        cls, kind: Kind, shape: Sequence[int], block: tuple[int, int], device: torch.device, zeros: bool = False
    ) -> Matrix:
        """A random weight whose numbers have a standard deviation of about 0.02.

        Args:
            shape: [..., out_features, in_features].
            block: as in `Matrix`.
            device: of the tensors.
            zeros: whether there are zero points.
        """
        blocks = *shape[:-2], *(-(-size // part) for size, part in zip(shape[-2:], block, strict=True))
        size = _SIZES[kind]
        if kind == "fp8":
            # torch before 2.13 converts numbers above 448 to NaN.
            codes = torch.randn(*shape, device=device).mul_(size).clamp_(-448, 448).to(torch.float8_e4m3fn)
        elif kind == "int8":
            codes = torch.randint(-127, 128, tuple(shape), dtype=torch.int8, device=device)
        else:
            codes = torch.randint(16, tuple(shape), dtype=torch.uint8, device=device)
        scale = torch.full(blocks, 0.02 / size, device=device)
        if kind != "fp8":
            scale = scale.to(torch.float8_e8m0fnu if kind == "mxfp4" else torch.float16)
        zero = None
        if zeros:
            zero = torch.full(blocks, MIDDLE if kind == "int4" else 0, dtype=codes.dtype, device=device)
        return cls(kind, codes, scale, block, zero)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [..., out_features, in_features], computed in float32 and rounded to dtype once."""
        scale = self.scale.view(torch.uint8) if self.kind == "mxfp4" else self.scale
        weight = dequantize(self.codes, scale, self.zero, self.kind, self.block, dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(-1, self.order, weight)
