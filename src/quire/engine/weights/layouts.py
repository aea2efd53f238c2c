"""What all formats of quantized weights become: a matrix of codes with a scale for each block of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "int8", "int4", "mxfp4"]

# The numbers of a 4-bit code of MXFP4, whose highest bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The code of 0 in a 4-bit weight without zero points.
MIDDLE = 8


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

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [..., out_features, in_features], computed in float32 and rounded to dtype once."""
        weight = self._numbers().mul_(self._spread(self.scale.float())).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(-1, self.order, weight)

    def _numbers(self) -> Tensor:
        """Codes less their zero points, in float32."""
        if self.kind == "mxfp4":
            numbers = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=self.codes.device)
            return numbers[self.codes.int()]
        numbers = self.codes.float()
        if self.zero is not None:
            return numbers.sub_(self._spread(self.zero.float()))
        return numbers.sub_(MIDDLE) if self.kind == "int4" else numbers

    def _spread(self, values: Tensor) -> Tensor:
        """The value of each element's block; dimensions of one block are broadcast."""
        for dim, size in zip((-2, -1), self.block, strict=True):
            if values.shape[dim] > 1:
                values = values.repeat_interleave(size, dim).narrow(dim, 0, self.codes.shape[dim])
        return values
