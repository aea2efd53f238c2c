"""Modules whose weights stay quantized: linear layers, and the experts of mixtures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.weights.layouts import Matrix
from quire.steps import (
    PACKED,
    code_product,
    grouped_code_product,
    multiplies_codes,
    pack_exponents,
    pack_words,
    unpack_exponents,
    unpack_words,
)

# Tiles of a product that several programs may share.
_TILES = 1 << 14
# Rows and columns of a block of fp8 that shares a scale; a weight that is such a block stays one.
_BLOCK = 128
# The largest exponent of a scale of MXFP4 that kernels decode, as it is stored: plus 127.
_LARGEST_EXPONENT = 128


class QuantizedWeight(nn.Module):
    """A weight as the kernels of `code_product` take it, in place of a parameter.

    Args:
        tensors: `codes`, `scale` and, where there are some, `zero` and `order`, on the device of the products.
        kind, block: of the codes, as `Matrix` has them.
        columns: the input features.
        dtype: of what it is multiplied by, and of the results.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    arrivals: Tensor | None

    def __init__(
        self, tensors: dict[str, Tensor | None], kind: str, block: tuple[int, int], columns: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        for name in ("codes", "scale", "zero", "order"):
            tensor = tensors.get(name)
            # torch.compile takes the shape of a Parameter as constant.
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("arrivals", _arrivals(self.codes.device))
        self.kind, self.block = kind, block
        self.columns, self.dtype = columns, dtype

    @classmethod
    def of(cls, matrix: Matrix, dtype: torch.dtype) -> QuantizedWeight:
        """The weight of a matrix that `can_multiply`."""
        codes, scale = matrix.codes, matrix.scale
        zero, block = matrix.zero, matrix.block
        rows, columns = codes.shape[-2:]
        if matrix.kind == "mxfp4":
            scale = pack_exponents(scale.view(torch.uint8))
        elif matrix.kind == "fp8":
            scale = scale.float()
        if block == (rows, columns) and rows > 1 and block != (_BLOCK, _BLOCK):
            # A scale of the tensor becomes one of each row, so that weights with other scales can be joined to it.
            scale, block = scale.expand(*scale.shape[:-2], rows, scale.shape[-1]), (1, block[1])
        if matrix.kind in ("int4", "mxfp4"):
            codes = pack_words(codes)
        tensors = {"codes": codes.contiguous(), "scale": _arranged(scale, block), "order": matrix.order}
        tensors["zero"] = None if zero is None else _arranged(zero, block)
        return cls(tensors, matrix.kind, (block[0], min(block[1], columns)), columns, dtype)

    @property
    def rows(self) -> int:
        """The output features."""
        return self.codes.shape[-2]

    @property
    def join_key(self) -> Hashable:
        """What weights must have in common to be stacked or joined."""
        order = None if self.order is None else self.order.cpu().numpy().tobytes()
        return self.kind, self.block, self.columns, self.dtype, self.codes.device, self.zero is None, order

    def on(self, device: torch.device) -> QuantizedWeight:
        """The weight on a device."""
        tensors: dict[str, Tensor | None] = {"codes": self.codes, "scale": self.scale}
        tensors |= {"zero": self.zero, "order": self.order}
        moved = {name: None if x is None else x.detach().to(device) for name, x in tensors.items()}
        return QuantizedWeight(moved, self.kind, self.block, self.columns, self.dtype)

    def part(self, dim: int, first: int, count: int) -> QuantizedWeight:
        """Some output features (dim = -2) or input features (dim = -1) as a weight of their own.

        Raises:
            ValueError: they are not whole blocks, or inputs of a weight whose columns are in another order.
        """
        is_input = dim == -1
        size, columns = self.block[dim], count if is_input else self.columns
        whole = self.columns if is_input else self.rows
        if is_input and self.order is not None:
            raise ValueError("its columns are in an order of their own")
        scale = unpack_exponents(self.scale, self.columns) if self.kind == "mxfp4" else self.scale.detach()
        is_divided = scale.shape[dim] > 1
        if is_divided and (first % size or (count % size and first + count < whole)):
            what = f"{first} to {first + count - 1} of {whole}"
            raise ValueError(f"{'input' if is_input else 'output'} features {what} are not whole blocks of {size}")

        def narrowed(values: Tensor) -> Tensor:
            return values.narrow(dim, first // size, -(-count // size)) if is_divided else values

        codes: Tensor = self.codes.detach()
        if is_input and self.kind in PACKED:
            codes = pack_words(unpack_words(codes, self.columns).narrow(dim, first, count))
        else:
            # In words, too, the last dimension but one is that of rows.
            codes = codes.narrow(dim, first, count).clone(memory_format=torch.contiguous_format)
        tensors: dict[str, Tensor | None] = {"codes": codes, "order": self.order, "zero": None}
        scale = pack_exponents(narrowed(scale)) if self.kind == "mxfp4" else narrowed(scale)
        tensors["scale"] = _arranged(scale, self.block)
        if self.zero is not None:
            tensors["zero"] = _arranged(narrowed(self.zero.detach()), self.block)
        return QuantizedWeight(tensors, self.kind, (self.block[0], min(self.block[1], columns)), columns, self.dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`torch.nn.functional.linear`: x [..., in_features], bias [out_features]; returns [..., out_features]."""
        x = x if self.order is None else x.index_select(-1, self.order)
        return code_product(x, self.codes, self.scale, self.zero, bias, self.arrivals, self.kind, *self.block)

    def of_experts(self, x: Tensor, order: Tensor | None, ends: Tensor) -> Tensor:
        """`grouped_gemm` with the weights of all experts; arguments are those of `grouped_code_product`."""
        return grouped_code_product(
            x, order, ends, self.codes, self.scale, self.zero, self.arrivals, self.kind, *self.block
        )


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is a `QuantizedWeight`."""

    weight: Any

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.weight(input, self.bias)
        return output


class RowsOf(nn.Module):
    """Rows of a weight, whose products are computed with all of its rows.

    Args:
        weight: the whole weight.
        start, size: the first row, and their number.
    """

    def __init__(self, weight: QuantizedWeight, start: int, size: int) -> None:
        super().__init__()
        self.whole, self.dtype = weight, weight.dtype
        self.start, self.size = start, size

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As that of `QuantizedWeight`."""
        output: Tensor = self.whole(x).narrow(-1, self.start, self.size)
        return output if bias is None else output + bias


def can_multiply(matrix: Matrix) -> bool:
    """Whether kernels multiply by a matrix without dequantizing it."""
    is_decoded = matrix.kind != "mxfp4" or bool((matrix.scale.view(torch.uint8) <= _LARGEST_EXPONENT).all())
    return is_decoded and multiplies_codes(matrix.kind, matrix.block, matrix.codes.shape[-1])


def can_join(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether weights can become rows of one weight, as `joined` makes it."""
    whole_blocks = all(weight.rows % weight.block[0] == 0 for weight in weights[:-1])
    return whole_blocks and len({weight.join_key for weight in weights}) == 1


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights one below another, which `can_join`."""
    return _made_of(weights, lambda parts: torch.cat(parts, -2))


def can_stack(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether weights can become those of the experts of a mixture, as `stacked` makes them."""
    return weights[0].order is None and len({(weight.join_key, weight.rows) for weight in weights}) == 1


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one expert each, which `can_stack`, as one weight of all."""
    return _made_of(weights, torch.stack)


def _made_of(weights: Sequence[QuantizedWeight], make: Any) -> QuantizedWeight:
    first = weights[0]
    # Not every version of torch concatenates fp8 on every device.
    codes = make([w.codes.detach().view(torch.uint8) for w in weights]).view(first.codes.dtype)
    tensors: dict[str, Tensor | None] = {"order": first.order, "codes": codes}
    tensors["scale"] = _arranged(make([w.scale.detach() for w in weights]), first.block)
    tensors["zero"] = None
    zeros = [w.zero.detach() for w in weights if w.zero is not None]
    if zeros:
        tensors["zero"] = _arranged(make(zeros), first.block)
    return QuantizedWeight(tensors, first.kind, first.block, first.columns, first.dtype)


def _arranged(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Scales or zero points [..., rows, groups] in the order in which kernels read them: those of neighbouring rows are
    neighbours in memory, unless rows share them.
    """
    return values.contiguous() if block[0] > 1 else values.mT.contiguous().mT


@lru_cache
def _arrivals(device: torch.device) -> nn.Parameter | None:
    """Counters of the programs that have finished their part of a tile. All products of a device share them, since they
    run one by one.
    """
    if device.type == "cpu":
        return None
    return nn.Parameter(torch.zeros(_TILES, dtype=torch.int32, device=device), requires_grad=False)


def replace_parameters(network: nn.Module) -> None:
    """Put the `QuantizedWeight` that parameters of a network have as their attribute `quire_weight` in their place."""
    for module in list(network.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            weight = getattr(param, "quire_weight", None)
            if weight is not None:
                delattr(module, name)
                setattr(module, name, weight)
                if type(module).forward is nn.Linear.forward:
                    module.__class__ = QuantizedLinear


def move(network: nn.Module, device: torch.device) -> None:
    """Move a network to a device, whose weights may be quantized."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, QuantizedWeight):
                setattr(module, name, child.on(device))
    network.to(device)
