"""fp8 weights of NVIDIA's ModelOpt: a scale for the tensor, for each row, or for each block of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quire.engine.weights.format import Format, Tensors, required
from quire.engine.weights.fp8 import BLOCK, fp8_matrix, row_matrix
from quire.engine.weights.layouts import Matrix

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


@dataclass(frozen=True)
class ModelOpt(Format):
    """`weight` float8_e4m3fn and `weight_scale`: one number, [out_features] or [out_features / 128, 1, in_features /
    128, 1], which is one number where the weight is one block. A static scale of activations is not used: each token
    has its own.
    """

    algorithm: str

    method: ClassVar[str] = "modelopt"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("weight", "weight_scale", "input_scale")}

    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        weight, scale = required(tensors, prefix, "weight", "weight_scale")
        names = (f"{prefix}weight", f"{prefix}weight_scale")
        if self.algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return row_matrix(weight, scale, names)
        by_block = self.algorithm == "FP8_PB_WO"
        if by_block and scale.ndim == 4:
            scale = scale[:, 0, :, 0]
        return fp8_matrix(weight, scale, BLOCK if by_block else None, names)

    def random(self, shape: Sequence[int], device: torch.device) -> Matrix:
        blocks = {"FP8": (shape[-2], shape[-1]), "FP8_PB_WO": (BLOCK, BLOCK)}
        return Matrix.random("fp8", shape, blocks.get(self.algorithm, (1, shape[-1])), device)


def read(settings: Mapping[str, Any]) -> ModelOpt:
    """The format that a `quantization_config`, or the object `quantization` of hf_quant_config.json, describes.

    Raises:
        ValueError: it is another algorithm.
    """
    # ModelOpt writes the last of them in lower case.
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"quant_algo = {settings.get('quant_algo')!r} is not supported: {', '.join(_ALGORITHMS)} are")
    return ModelOpt(algorithm)
