"""The modules of a network that adapters may change, and the names that they have in adapters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from quire.engine.parallel.weight_shard import WeightShard

# Names, in Transformers' classes, of modules that do nothing but hold a language model. The names in an adapter begin
# with those of the class that it was trained with, which may be of another version of Transformers, and may have an
# encoder of images or a head that this model does not have.
_HOLDERS = {"model", "language_model", "text_model"}


@dataclass(frozen=True)
class Target:
    """A module that adapters may change.

    Attributes:
        kind: "linear", "embedding" (that of the tokens) or "head" (the linear layer that computes logits).
        in_features: of an embedding, the size of the vocabulary.
        out_features: the columns of its output.
        shard: which of these features each of several ranks has; None: each has all.
        output_scale: a factor of the module's output, and so of an adapter's output, too.
        weight: [out_features, in_features], of an embedding [in_features, out_features]; of several ranks, this one's
            part; None if it is quantized.
        bias: [out_features]; of several ranks, this one's part; None if there is none.
    """

    kind: Literal["linear", "embedding", "head"]
    in_features: int
    out_features: int
    output_scale: float = 1.0
    shard: WeightShard | None = None
    weight: Tensor | None = field(default=None, repr=False, compare=False)
    bias: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of the weight of all ranks."""
        sizes = self.out_features, self.in_features
        return sizes[::-1] if self.kind == "embedding" else sizes

    @property
    def shape_of_rank(self) -> tuple[int, int]:
        """The inputs and outputs that one rank has."""
        if self.shard is None:
            return self.in_features, self.out_features
        return (self.shard.size, self.out_features) if self.shard.dim == -1 else (self.in_features, self.shard.size)

    def factors_of_rank(self, rank: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A rank's part of the factors of an adapter, A [r, in_features] and B [out_features, r]."""
        if self.shard is None:
            return a, b
        if self.shard.dim == -1:
            return self.shard.tensor_of(rank, a, 1), b
        return a, self.shard.tensor_of(rank, b, 0)


def adapter_targets(network: Any) -> dict[str, Target]:
    """The modules of a network of Transformers that adapters may change, by their paths in `named_modules()`: all
    linear layers, the head, and the embedding of the tokens.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    found: dict[str, Target] = {}
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear):
            found[path] = _linear_target(module, "head" if module is head else "linear")
        elif module is embedding and isinstance(module, nn.Embedding):
            found[path] = Target(
                kind="embedding",
                in_features=module.num_embeddings,
                out_features=module.embedding_dim,
                output_scale=_output_scale(module),
                weight=_weight(module),
            )
    return found


def _linear_target(module: nn.Linear, kind: Literal["linear", "head"]) -> Target:
    shard: WeightShard | None = getattr(module, "quire_shard", None)
    return Target(
        kind=kind,
        in_features=shard.features if shard is not None and shard.dim == -1 else module.in_features,
        out_features=shard.features if shard is not None and shard.dim == -2 else module.out_features,
        shard=shard,
        weight=_weight(module),
        bias=module.bias,
    )


def _weight(module: nn.Module) -> Tensor | None:
    return module.weight if isinstance(module.weight, Tensor) else None


def _output_scale(embedding: nn.Embedding) -> float:
    """What an embedding multiplies the rows of its weight by, as those of Gemma do, rounded as it does that."""
    scale: Any = getattr(embedding, "embed_scale", 1.0)
    return float(scale.to(embedding.weight.dtype)) if isinstance(scale, Tensor) else float(scale)


class Names:
    """Finds the modules that an adapter's names mean.

    Args:
        paths: of the network's modules.
        removed: paths of the parts of the network that were removed, as the encoder of images.
    """

    def __init__(self, paths: Collection[str], removed: Collection[str] = ()) -> None:
        self._paths = set(paths)
        self._short: dict[str, str | None] = {}
        for path in paths:
            short = _short(path)
            # A name that could mean two paths is ambiguous, and means neither.
            self._short[short] = None if short in self._short else path
        self._removed = {_short(path): path for path in removed}

    def find(self, name: str) -> str | None:
        """The path that a name in an adapter means: itself, or the one that differs from it only in the modules that
        hold the language model; None if there is none.
        """
        return name if name in self._paths else self._short.get(_short(name))

    def removed(self, name: str) -> str | None:
        """The removed part of the network that a name in an adapter is of; None if it is of none."""
        short = _short(name)
        return next((path for part, path in self._removed.items() if f"{short}.".startswith(f"{part}.")), None)


def _short(path: str) -> str:
    """A path without the modules at its beginning that hold the language model."""
    parts = path.split(".")
    while len(parts) > 1 and parts[0] in _HOLDERS:
        del parts[0]
    return ".".join(parts)
