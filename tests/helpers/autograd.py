"""Tensors that require grad, and the modes in which calls are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
modes = pytest.mark.parametrize("mode", MODES)


def each(given, change):
    """An argument with `change` made to its tensors."""
    if isinstance(given, Tensor):
        return change(given)
    return type(given)(change(x) for x in given) if isinstance(given, (tuple, list)) else given


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def computed(x: Tensor) -> Tensor:
    """Part of a graph, as what a layer's projection gives."""
    return leaf(x) * 1 if x.is_floating_point() and x.element_size() > 1 else x


def parameter(x: Tensor) -> Tensor:
    return nn.Parameter(x.detach().clone()) if x.is_floating_point() else x


def flat(result) -> list[Tensor]:
    return [y for x in result for y in flat(x)] if isinstance(result, (tuple, list)) else [result]
