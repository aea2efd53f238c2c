"""fp8 weights as Transformers has them (`quant_method` fp8): a scale for each block of 128 x 128, or for the tensor.
AutoFP8 writes the same `quant_method` with other names of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quire.engine.moe import PROJECTIONS
from quire.engine.weights.format import Format, Tensors, check_dtype, check_scale, check_shape, required
from quire.engine.weights.layouts import Matrix

BLOCK = 128


@dataclass(frozen=True)
class Fp8(Format):
    """Weights of float8_e4m3fn. Despite its name, `weight_scale_inv` is what numbers are multiplied by, as AutoFP8's
    `weight_scale` is. A static scale of activations is not used: each token has its own.
    """

    blocks: bool

    method: ClassVar[str] = "fp8"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        # Those of all experts of a mixture in one tensor. They are first, since a name may have the end of another.
        **{name: (name, f"{name}_scale_inv", f"{name}_activation_scale") for name in PROJECTIONS},
        "weight": ("weight", "weight_scale_inv", "activation_scale", "weight_scale", "input_scale"),
    }

    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        name = next(name for name, ends in self.names.items() if not tensors.keys().isdisjoint(ends))
        scale_name = "weight_scale" if "weight_scale" in tensors else f"{name}_scale_inv"
        weight, scale = required(tensors, prefix, name, scale_name)
        return fp8_matrix(weight, scale, BLOCK if self.blocks else None, (f"{prefix}{name}", f"{prefix}{scale_name}"))

    def random(self, shape: Sequence[int], device: torch.device) -> Matrix:
        block = (BLOCK, BLOCK) if self.blocks else (shape[-2], shape[-1])
        return Matrix.random("fp8", shape, block, device)


def fp8_matrix(weight: torch.Tensor, scale: torch.Tensor, block: int | None, names: tuple[str, str]) -> Matrix:
    """A weight of float8_e4m3fn with a scale for each block, or for the tensor, of a checkpoint.

    Args:
        weight: [..., out_features, in_features].
        scale: [..., out_features / block, in_features / block], rounded up; without block, one number for each weight.
        block: the rows and columns of a block; None: the tensor has one scale.
        names: of both, for messages.
    """
    check_dtype(names[0], weight, torch.float8_e4m3fn)
    *experts, rows, columns = weight.shape
    if block is None:
        block_rows, block_columns = rows, columns
    else:
        block_rows = block_columns = block
    scale = scale.reshape(*experts, 1, 1) if scale.numel() == math.prod(experts) else scale
    check_shape(names[1], scale, (*experts, -(-rows // block_rows), -(-columns // block_columns)))
    check_scale(names[1], scale)
    return Matrix("fp8", weight, scale, (block_rows, block_columns))


def row_matrix(weight: torch.Tensor, scale: torch.Tensor, names: tuple[str, str]) -> Matrix:
    """A weight of float8_e4m3fn with a scale for each row: [out_features] or [out_features, 1]. Arguments are those of
    `fp8_matrix`.
    """
    check_dtype(names[0], weight, torch.float8_e4m3fn)
    scale = scale[:, None] if scale.ndim == 1 else scale
    check_shape(names[1], scale, (len(weight), 1))
    check_scale(names[1], scale)
    return Matrix("fp8", weight, scale, (1, weight.shape[1]))


def read(settings: Mapping[str, Any]) -> Fp8:
    """The format that a `quantization_config` describes.

    Raises:
        ValueError: it is another format of fp8.
    """
    block = settings.get("weight_block_size")
    if block is not None and list(block) != [BLOCK, BLOCK]:
        raise ValueError(f"weight_block_size = {list(block)} is not supported: [{BLOCK}, {BLOCK}] is")
    if settings.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"fmt = {settings['fmt']!r} is not supported: 'e4m3' is")
    return Fp8(block is not None)
