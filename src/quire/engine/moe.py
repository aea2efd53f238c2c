"""Mixtures of experts, as a function of Transformers' interface for experts. It reads the weights of each chosen expert
once, and never waits for the device, so that steps can be captured in CUDA graphs whatever the dtype and the GPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.definition.spec import FLOATS
from quire.engine.hf_attention import NAME
from quire.engine.transformers_internals import apply_gate
from quire.engine.weights.modules import QuantizedWeight
from quire.steps import group_by_expert, grouped_gemm

# The names of the experts' weights.
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts compute.

    Args:
        module: the experts, whose attributes Transformers documents at `use_experts_implementation`.
        hidden_states: [tokens, hidden_size].
        top_k_index: integers [tokens, top_k], the experts of each token.
        top_k_weights: [tokens, top_k], their weights.

    Returns:
        [tokens, hidden_size], of the dtype of hidden_states.
    """
    chosen = top_k_index.reshape(-1)
    order, position, ends = group_by_expert(chosen, module.num_experts)

    def project(name: str, x: Tensor, order: Tensor | None) -> Tensor:
        weight = getattr(module, name)
        x = x.to(weight.dtype)
        if isinstance(weight, QuantizedWeight):
            y = weight.of_experts(x, order, ends)
        else:
            y = grouped_gemm(x, order, ends, weight, module.is_transposed)
        return y + getattr(module, f"{name}_bias")[sorted_experts] if module.has_bias else y

    sorted_experts = chosen[order] if module.has_bias else None
    x = project("gate_up_proj" if module.has_gate else "up_proj", hidden_states, order)
    x = apply_gate(module, x) if module.has_gate else module.act_fn(x)
    x = project("down_proj", x, None)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    weighted = x[position].view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


def expert_modules(network: Any) -> list[Any]:
    """The modules whose experts are computed by a function of Transformers' interface."""
    return [m for m in network.modules() if is_experts(m)]


def is_experts(module: Any) -> bool:
    """Whether a function of Transformers' interface computes the experts of a module."""
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def _weights(network: Any) -> list[Any]:
    """The weights of all experts of a network, of which some may be quantized."""
    names = [(module, name) for module in expert_modules(network) for name in PROJECTIONS]
    return [getattr(module, name) for module, name in names if hasattr(module, name)]


class ReplacedExperts:
    """Experts of a network that `experts_forward` computes.

    Args:
        network: Transformers' model, whose experts `can_replace`. Quantized experts, which Transformers' own function
            cannot compute, are always computed by `experts_forward`.
    """

    def __init__(self, network: Any) -> None:
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(NAME, experts_forward)
        self._network, self._implementation = network, network.get_experts_implementation()
        if any(isinstance(weight, QuantizedWeight) for weight in _weights(network)):
            self._implementation = NAME
        self.enable(True)

    def enable(self, on: bool) -> None:
        """Compute the experts by `experts_forward`, or by Transformers' own function."""
        self.on = on
        self._network.set_experts_implementation(NAME if on else self._implementation)


def can_replace(network: Any) -> bool:
    """Whether a network has experts, and all have weights of 16 or 32 bits, or that are quantized."""
    weights = _weights(network)

    def can_multiply(weight: Any) -> bool:
        is_dense = isinstance(weight, Tensor) and weight.ndim == 3 and weight.dtype in FLOATS
        return is_dense or isinstance(weight, QuantizedWeight)

    return bool(weights) and all(map(can_multiply, weights))
