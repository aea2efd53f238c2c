"""GPTQ: 4-bit or 8-bit codes with zero points, packed along the columns of the weight, in an order of the columns that
may be that of their importance (act-order).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

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
from quire.engine.weights.layouts import Matrix

# A word whose codes are all 1, by the bits of a code.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq(Format):
    """`qweight` int32 [in_features * bits / 32, out_features], `qzeros` int32 [groups, out_features * bits / 32],
    `scales` [groups, out_features] and, for each column, its group `g_idx` int32 [in_features].
    """

    group: int
    symmetric: bool
    # What is added to each code of a zero point as it is stored.
    zero_offset: int

    method: ClassVar[str] = "gptq"
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("weight", "qweight", "qzeros", "scales", "g_idx")}

    def matrix(self, tensors: Tensors, prefix: str) -> Matrix:
        words, zero_words, scale = required(tensors, prefix, "qweight", "qzeros", "scales")
        for name, tensor in (("qweight", words), ("qzeros", zero_words)):
            check_dtype(f"{prefix}{name}", tensor, torch.int32)
        rows, groups = words.shape[-1], len(scale)
        bits = 32 * zero_words.shape[-1] // rows
        if bits not in (4, 8):
            raise ValueError(f"{prefix}qzeros has codes of {bits} bits: 4 and 8 are supported")
        check_shape(f"{prefix}scales", scale, (groups, rows))
        check_shape(f"{prefix}qzeros", zero_words, (groups, rows * bits // 32))
        check_scale(f"{prefix}scales", scale)
        columns = len(words) * 32 // bits
        codes, order = unpack(words.T, bits), None
        if "g_idx" in tensors:
            # A layer may have groups of another size than config.json says.
            counts = tensors["g_idx"].unique(return_counts=True)[1]
            size = group_size(f"{prefix}scales", columns, groups, int(counts.max()))
            order = column_order(f"{prefix}g_idx", tensors["g_idx"], columns, size)
            codes = codes if order is None else codes[:, order]
        else:
            size = group_size(f"{prefix}scales", columns, groups, self.group)
        # The offset was subtracted from whole words, so it is added to them: a zero point of 0 had borrowed from the
        # next code.
        zero = unpack(zero_words + self.zero_offset * _ONES[bits], bits).T
        if self.symmetric and (zero != 2 ** (bits - 1)).any():
            raise ValueError(f"{prefix}qzeros has zero points other than {2 ** (bits - 1)}, which `sym` means")
        return integers(bits, codes, scale.T.contiguous(), size, None if self.symmetric else zero, order)


def column_order(name: str, groups: Tensor, columns: int, size: int) -> Tensor | None:
    """The columns in the order of their groups; None if they are in it.

    Args:
        name: of `groups`, for messages.
        groups: integers [columns], the group of each column.
        columns: the columns of the weight.
        size: the columns of a group; the last one may have fewer.

    Raises:
        ValueError: a group has another number of columns.
    """
    check_shape(name, groups, (columns,))
    sorted_groups, order = groups.long().sort(stable=True)
    expected = torch.arange(columns, device=groups.device) // size
    if not torch.equal(sorted_groups, expected):
        counts = groups.unique(return_counts=True)[1]
        what = f"{len(counts)} groups of {counts.min()} to {counts.max()} columns"
        raise ValueError(f"{name} has {what}, and groups of {size} are expected")
    return None if torch.equal(groups.long(), expected) else order


def read(settings: Mapping[str, Any]) -> Gptq:
    """The format that a `quantization_config` describes.

    Raises:
        ValueError: it is another format of GPTQ.
    """
    bits, stored = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    if bits not in (4, 8):
        raise ValueError(f"bits = {bits} is not supported: 4 and 8 are")
    if stored not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format = {stored!r} is not supported: 'gptq' and 'gptq_v2' are")
    return Gptq(settings.get("group_size", 128), bool(settings.get("sym", False)), 1 if stored == "gptq" else 0)
