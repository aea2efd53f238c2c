"""Random weights, which may be quantized, for a network that has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.engine import moe
from quire.engine.parallel.shard import DividedLinear
from quire.engine.weights.format import Format
from quire.engine.weights.layouts import Matrix
from quire.engine.weights.modules import QuantizedWeight, can_multiply, replace_parameters


@torch.no_grad()
def fill(network: Any, format: Format | None, device: torch.device) -> None:
    """Give a network on the meta device random weights. Experts, and linear layers other than the head if the format
    has a name for their weights, get weights in the format. Transformers initializes all others.

    Args:
        network: Transformers' model, or a rank's part of it.
        format: of the quantized weights; None: there are none.
        device: of the weights.

    Raises:
        ValueError: no random weights are made in the format, or there is no kernel for them.
    """
    made: dict[int, Any] = {}
    head = network.get_output_embeddings()
    for module in network.modules():
        for name, param in module.named_parameters(recurse=False):
            shape = None
            if format is not None and module is not head:
                shape = _quantized_shape(module, name, format)
            if id(param) not in made:
                made[id(param)] = nn.Parameter(_empty(param, device), requires_grad=False)
                if format is not None and shape is not None:
                    made[id(param)] = param
                    # This keeps Transformers from initializing it.
                    param._is_hf_initialized = True
                    param.quire_weight = _weight(format.random(shape, device), param.dtype)
            setattr(module, name, made[id(param)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = made.setdefault(id(buffer), _empty(buffer, device))
    network.initialize_weights()
    replace_parameters(network)


def _quantized_shape(module: nn.Module, name: str, format: Format) -> list[int] | None:
    """The shape [..., out_features, in_features] of a parameter that is quantized, None for others."""
    shape = list(getattr(module, name).shape)
    if moe.is_experts(module) and name in moe.PROJECTIONS and len(shape) == 3:
        return [shape[0], shape[2], shape[1]] if module.is_transposed else shape
    # Ranks have classes of their own for layers of which they keep a part.
    is_linear = type(module) is nn.Linear or isinstance(module, DividedLinear)
    return shape if is_linear and name == "weight" and "weight" in format.names else None


def _weight(matrix: Matrix, dtype: torch.dtype) -> QuantizedWeight:
    if not can_multiply(matrix):
        shape = list(matrix.codes.shape)
        raise ValueError(f"there is no kernel for {matrix.kind} {shape} in blocks of {matrix.block}")
    return QuantizedWeight.of(matrix, dtype)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device)
