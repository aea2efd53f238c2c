"""Rounding to fp8 in Triton kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl


def mantissa_bits(dtype: torch.dtype) -> int:
    """Mantissa bits of an fp8 type; 0 for any other."""
    return {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype, 0)


@lru_cache(maxsize=16)
def _converts_fp8(device: torch.device) -> bool:
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device) >= (8, 9)


def storage(x: Tensor) -> Tensor:
    """An output as kernels write it: fp8 as bytes where the GPU does not convert to fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 and not _converts_fp8(x.device) else x


@triton.jit
def to_bytes(x, largest: tl.constexpr, mantissa: tl.constexpr):
    """Float32 rounded to even and saturated as the bytes of an fp8 type, by integer arithmetic."""
    bias: tl.constexpr = 7 if mantissa == 3 else 15
    # The last bit of this float32 is the smallest fp8 number.
    one: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    dropped: tl.constexpr = 23 - mantissa
    size = tl.minimum(tl.abs(x), largest)
    bits = size.to(tl.int32, bitcast=True)
    rounded = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    normal = (rounded >> dropped) - ((127 - bias) << mantissa)
    subnormal = (size + one).to(tl.int32, bitcast=True) - tl.full((), one, tl.float32).to(tl.int32, bitcast=True)
    code = tl.where(size < 2.0 ** (1 - bias), subnormal, normal)
    code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def convert(x, scale, dtype: tl.constexpr, mantissa: tl.constexpr):
    """Float32 as `dtype` or, with mantissa bits of an fp8 type, times the scale, rounded to even and saturated: by the
    GPU's conversion if dtype is that type, or else as the type's bytes.
    """
    largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
    if mantissa == 0:
        return x.to(dtype)
    elif dtype == tl.uint8:
        return to_bytes(x * scale, largest, mantissa)
    else:
        return tl.clamp(x * scale, -largest, largest, tl.PropagateNan.ALL).to(dtype)
