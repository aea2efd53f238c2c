"""The parts of a weight that ranks keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.weights.modules import QuantizedWeight, can_join, joined


@dataclass(frozen=True, slots=True)
class WeightShard:
    """What each rank keeps of a weight [..., outputs, inputs]: some outputs, or some inputs.

    Attributes:
        dim: -2 for outputs, -1 for inputs.
        features: the outputs, or inputs, of all ranks.
        parts: the number of different parts. With fewer of them than ranks, neighbours have the same.
        halves: 2 for a weight that has a part of each half of its outputs, as that of two joined layers; otherwise 1.
        num_ranks: the number of ranks.

    Raises:
        ValueError: the parts are not equal.
    """

    dim: int
    features: int
    parts: int
    halves: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.features % (self.parts * self.halves):
            raise ValueError(f"its {self.features} features are not divisible by it")

    @classmethod
    def of(cls, weight: Any, dim: int, parts: int, num_ranks: int, halves: int = 1) -> WeightShard:
        """The parts of a weight, which may be quantized."""
        if isinstance(weight, QuantizedWeight):
            features = weight.columns if dim == -1 else weight.rows
        else:
            features = weight.shape[dim]
        return cls(dim, features, parts, halves, num_ranks)

    @property
    def size(self) -> int:
        """The number of outputs, or inputs, that a rank keeps."""
        return self.features // self.parts

    def starts(self, rank: int) -> tuple[int, ...]:
        """The first output, or input, of a rank in each half."""
        half = self.features // self.halves
        first = rank * self.parts // self.num_ranks * (half // self.parts)
        return tuple(first + index * half for index in range(self.halves))

    def weight_of(self, rank: int, weight: Any, device: torch.device) -> Any:
        """A copy of a rank's part of a weight on a device; ValueError if it has no whole blocks of a quantized one."""
        if not isinstance(weight, QuantizedWeight):
            return nn.Parameter(self.tensor_of(rank, weight.detach(), self.dim, device), requires_grad=False)
        # Codes of 4 bits are unpacked for a part of the inputs, which takes long on a CPU.
        weight, count = weight.on(device), self.size // self.halves
        parts = [weight.part(self.dim, start, count) for start in self.starts(rank)]
        if len(parts) == 1:
            return parts[0]
        if not can_join(parts):
            raise ValueError(f"{count} of its rows are not whole blocks of {weight.block[0]}")
        return joined(parts)

    def tensor_of(self, rank: int, x: Tensor, dim: int, device: torch.device | None = None) -> Tensor:
        """A copy of a tensor's elements that are a rank's in a dimension, on a device; None: that of the tensor."""
        count = self.size // self.halves
        return torch.cat([x.narrow(dim, start, count).to(device) for start in self.starts(rank)], dim)
