"""Products with quantized weights: torch on the CPU; on a GPU Triton for few rows, and torch's products of fp8 or of
16-bit numbers for many.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import on_triton

# Columns of a block of words of 4-bit codes.
BLOCK = 128
# Kinds whose codes are packed in words.
PACKED = ("int4", "mxfp4")
# The code of 0 of int4 without zero points.
MIDDLE = 8
# The numbers of codes of mxfp4, whose highest bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def multiplies_codes(kind: str, block: tuple[int, int], columns: int) -> bool:
    """Whether there are kernels for codes of a kind. block: the rows and columns that share a scale; columns: those
    of the weight.
    """
    return block[1] >= columns or block[1] % BLOCK == 0 or (kind in PACKED and block[1] in (32, 64))


def pack_words(codes: Tensor) -> Tensor:
    """Codes of 4 bits as kernels read them.

    Args:
        codes: uint8 [..., rows, columns], below 16.

    Returns:
        int16 [..., columns / 128, rows, 32], rounded up. Code i of word j is that of column 32 i + j.
    """
    codes = F.pad(codes, (0, -codes.shape[-1] % BLOCK))
    places = codes.unflatten(-1, (-1, 4, BLOCK // 4)).to(torch.int16)
    words = places[..., 0, :] | places[..., 1, :] << 4 | places[..., 2, :] << 8 | places[..., 3, :] << 12
    return words.transpose(-3, -2).contiguous()


def unpack_words(words: Tensor, columns: int) -> Tensor:
    """What `pack_words` was given: uint8 [..., rows, columns]."""
    places = torch.stack([words >> 4 * i & 15 for i in range(4)], -2).to(torch.uint8)
    return places.transpose(-4, -3).flatten(-3)[..., :columns]


def pack_exponents(exponents: Tensor) -> Tensor:
    """Exponents of the scales of mxfp4 as kernels read them: uint8 [..., rows, groups] of 32 columns. Returns int32
    [..., rows, groups / 4], rounded up. Byte i of word j is the exponent of group 4 j + i, or that of a scale of 1.
    """
    return F.pad(exponents, (0, -exponents.shape[-1] % 4), value=127).contiguous().view(torch.int32)


def unpack_exponents(words: Tensor, columns: int) -> Tensor:
    """What `pack_exponents` was given for a weight with this number of columns."""
    return words.contiguous().view(torch.uint8)[..., : -(-columns // 32)]


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, kind: str, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weight of codes, computed in float32 and rounded to dtype once.

    Args:
        codes: [..., rows, columns]. fp8: float8_e4m3fn. int8: int8. int4 and mxfp4: uint8 below 16.
        scale: [..., rows / block[0], columns / block[1]], rounded up. mxfp4: uint8, exponents of powers of two, plus
            127.
        zero: as scale, of the dtype of codes; None: 0, or 8 for int4.
        kind: "fp8", "int8", "int4" or "mxfp4".
        block: rows and columns that share a scale.
        dtype: of the weight.
    """

    def spread(x: Tensor) -> Tensor:
        for dim, size in zip((-2, -1), block, strict=True):
            if x.shape[dim] > 1:
                x = x.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
        return x

    if kind == "mxfp4":
        values, factors = torch.tensor(_E2M1, device=codes.device)[codes.int()], (scale.float() - 127).exp2()
    else:
        values, factors = codes.float(), scale.float()
    if zero is not None:
        values.sub_(spread(zero.float()))
    elif kind == "int4":
        values.sub_(MIDDLE)
    return values.mul_(spread(factors)).to(dtype)


@torch.library.custom_op("quire::code_product", mutates_args=())
def code_product(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor | None,
    kind: str,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """`torch.nn.functional.linear` with a quantized weight.

    Args:
        x: float16, bfloat16 or float32 [..., in_features].
        codes: of fp8 and int8 as `dequantize` has them, [out_features, in_features], contiguous; of int4 and mxfp4 as
            `pack_words` returns them.
        scale, zero, kind, block_rows, block_columns: as `dequantize` has them, in any memory order; scales of mxfp4 as
            `pack_exponents` returns them.
        bias: [out_features] of the dtype of x.
        arrivals: on a GPU, int32, 0 before and after each call; calls that run at once need arrivals of their own.

    Returns:
        [..., out_features] of the dtype of x, added up in float32. With many rows of x, those of fp8 are rounded to
        fp8, with a scale for each row, or for each 128 columns of a row.
    """
    if not on_triton(x.device):
        codes, scale = unpacked(codes, scale, kind, x.shape[-1])
        weight = dequantize(codes, scale, zero, kind, (block_rows, block_columns), x.dtype)
        return F.linear(x, weight, bias)
    from quire.kernels.triton.code_launch import multiply

    rows = x.reshape(-1, x.shape[-1])
    out = multiply(rows, codes, scale, zero, bias, arrivals, kind, (block_rows, block_columns))
    return out.view(*x.shape[:-1], -1) if len(rows) else _new(x, codes, kind)


@code_product.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor | None,
    kind: str,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    return _new(x, codes, kind)


def unpacked(codes: Tensor, scale: Tensor, kind: str, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales as `dequantize` takes them."""
    codes = unpack_words(codes, columns) if kind in PACKED else codes
    return codes, unpack_exponents(scale, columns) if kind == "mxfp4" else scale


def _new(x: Tensor, codes: Tensor, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[1 if kind in PACKED else 0])


@torch.library.custom_op("quire::grouped_code_product", mutates_args=())
def grouped_code_product(
    x: Tensor,
    order: Tensor | None,
    ends: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    arrivals: Tensor | None,
    kind: str,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """`quire.kernels.grouped_gemm.grouped_gemm` with quantized weights.

    Args:
        x: float16, bfloat16 or float32 [tokens, in_features]. With `order`, each token has as many rows, one after
            another, as it has experts; without, x has the sorted rows themselves.
        order, ends: as `group_by_expert` returns them.
        codes, scale, zero, arrivals, kind, block_rows, block_columns: as `code_product` takes them, of all experts:
            [num_experts, ...].

    Returns:
        [rows, out_features] of the dtype of x, added up in float32.
    """
    out = _new_groups(x, order, codes, kind)
    if not on_triton(x.device):
        codes, scale = unpacked(codes, scale, kind, x.shape[-1])
        rows = x if order is None else x[order // (len(order) // max(len(x), 1))]
        starts = [0, *ends.tolist()]
        for expert, (start, end) in enumerate(pairwise(starts)):
            own_zero = None if zero is None else zero[expert]
            weight = dequantize(codes[expert], scale[expert], own_zero, kind, (block_rows, block_columns), x.dtype)
            out[start:end] = rows[start:end] @ weight.T
        return out
    from quire.kernels.triton.code_launch import multiply_groups

    multiply_groups(out, x, order, ends, codes, scale, zero, arrivals, kind, (block_rows, block_columns))
    return out


@grouped_code_product.register_fake
def _(
    x: Tensor,
    order: Tensor | None,
    ends: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    arrivals: Tensor | None,
    kind: str,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    return _new_groups(x, order, codes, kind)


def _new_groups(x: Tensor, order: Tensor | None, codes: Tensor, kind: str) -> Tensor:
    rows = x if order is None else order
    return x.new_empty(rows.shape[0], codes.shape[2 if kind in PACKED else 1])
