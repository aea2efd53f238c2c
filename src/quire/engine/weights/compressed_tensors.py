"""The formats of the compressed-tensors library: fp8, int8, packed integers of 4 and 8 bits, and MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.distribution import pip_install
from quire.engine.weights.format import (
    Format,
    Tensors,
    check_dtype,
    check_scale,
    check_shape,
    group_size,
    integers,
    required,
    unpack,
)
from quire.engine.weights.fp8 import BLOCK, fp8_matrix, row_matrix
from quire.engine.weights.gptq import column_order
from quire.engine.weights.layouts import Matrix
from quire.engine.weights.mxfp4 import mxfp4_matrix

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized")


@dataclass(frozen=True)
class CompressedTensors(Format):
    """`weight` float8_e4m3fn or int8, or `weight_packed`. Its dtype and the shape of its scales say which of the
    formats a weight has. A static scale of activations is not used: each token has its own.
    """

    method: ClassVar[str] = "compressed-tensors"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": (
            "weight",
            "weight_scale",
            "weight_packed",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
        )
    }

    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        if "weight_packed" in tensors:
            packed, scale = required(tensors, prefix, "weight_packed", "weight_scale")
            if packed.dtype == torch.uint8:
                return mxfp4_matrix(packed, scale, (f"{prefix}weight_packed", f"{prefix}weight_scale"))
            return _packed(tensors, prefix)
        weight, scale = required(tensors, prefix, "weight", "weight_scale")
        check_dtype(f"{prefix}weight", weight, torch.float8_e4m3fn, torch.int8)
        if weight.dtype == torch.int8:
            return _int8(weight, scale, tensors.get("weight_zero_point"), prefix)
        names = (f"{prefix}weight", f"{prefix}weight_scale")
        if scale.numel() == 1:
            return fp8_matrix(weight, scale, None, names)
        by_block = tuple(scale.shape) == tuple(-(-size // BLOCK) for size in weight.shape)
        return fp8_matrix(weight, scale, BLOCK, names) if by_block else row_matrix(weight, scale, names)


def _int8(weight: Tensor, scale: Tensor, zero: Tensor | None, prefix: str) -> Matrix:
    """A weight of int8 with a scale for each row, or for the tensor."""
    scale = scale.reshape(1, 1).expand(len(weight), 1) if scale.numel() == 1 else scale
    scale = scale[:, None] if scale.ndim == 1 else scale
    check_shape(f"{prefix}weight_scale", scale, (len(weight), 1))
    check_scale(f"{prefix}weight_scale", scale)
    if zero is not None:
        zero = zero.reshape(-1, 1).expand(len(weight), 1).to(torch.int8)
    return Matrix("int8", weight, scale.contiguous(), (1, weight.shape[1]), zero)


def _packed(tensors: Tensors, prefix: str) -> Matrix:
    """A weight of integers that are packed along its columns, whose zero points are packed along its rows."""
    words, scale, shape = required(tensors, prefix, "weight_packed", "weight_scale", "weight_shape")
    check_dtype(f"{prefix}weight_packed", words, torch.int32)
    rows, columns = shape.tolist()
    bits = words.shape[1] * 32 // columns
    if bits not in (4, 8):
        raise ValueError(f"{prefix}weight_packed has codes of {bits} bits: 4 and 8 are supported")
    groups = scale.shape[-1] if scale.ndim == 2 else 1
    check_shape(f"{prefix}weight_packed", words, (rows, -(-columns * bits // 32)))
    check_shape(f"{prefix}weight_scale", scale, (rows, groups))
    check_scale(f"{prefix}weight_scale", scale)
    size = group_size(f"{prefix}weight_scale", columns, groups)
    zero = order = None
    codes = unpack(words, bits)[:, :columns]
    if "weight_zero_point" in tensors:
        zero_words = tensors["weight_zero_point"]
        check_shape(f"{prefix}weight_zero_point", zero_words, (-(-rows * bits // 32), groups))
        zero = unpack(zero_words.T, bits)[:, :rows].T.contiguous()
    # The library takes a group of -1 for columns that are in the order of their groups.
    if "weight_g_idx" in tensors and not (tensors["weight_g_idx"] == -1).all():
        order = column_order(f"{prefix}weight_g_idx", tensors["weight_g_idx"], columns, size)
        codes = codes if order is None else codes[:, order]
    return integers(bits, codes, scale, size, zero, order)


def _without_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` that does not say in which order columns were quantized: `weight_g_idx` has the groups of
    columns, and versions of the library differ in the orders that they accept.
    """
    changed = deepcopy(dict(settings))
    for group in (changed.get("config_groups") or {}).values():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            group["weights"].pop("actorder", None)
    return changed


def read(settings: Mapping[str, Any]) -> CompressedTensors:
    """The format that a `quantization_config` describes.

    Raises:
        ImportError: compressed-tensors is not installed.
        ValueError: the configuration is broken, or has a format that is not supported.
    """
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError as error:
        what = "weights of compressed-tensors need that package"
        raise ImportError(f"{what}: {pip_install('quantized')} ({error})") from error

    config = QuantizationConfig.model_validate(_without_order(settings))
    for name, group in config.config_groups.items():
        stored = group.format or config.format
        if stored not in _FORMATS:
            what = f"config_groups.{name}: format = {stored!r} is not supported"
            raise ValueError(f"{what}: {', '.join(_FORMATS)} are")
    for name in ("sparsity_config", "transform_config"):
        content = settings.get(name) or {}
        if content and content.get("format") != "dense":
            raise ValueError(f"{name} is not supported")
    return CompressedTensors()
