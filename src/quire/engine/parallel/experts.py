"""The choice of a token's experts, which several ranks must have in common."""

from __future__ import annotations

from torch import Tensor, nn

from quire.engine.parallel.ranks import Ranks


def choose_by_first(experts: nn.Module, ranks: Ranks) -> None:
    """Compute the experts that rank 0 has chosen. Another rank may round a probability otherwise, and choose others.

    Args:
        experts: a module of Transformers' interface for experts.
        ranks: those that compute it.
    """

    def choose(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, index, weights = args
        return states, ranks.of_first(index), ranks.of_first(weights)

    experts.register_forward_pre_hook(choose)
