"""Embeddings of prompts: what is asked for, what a checkpoint says about it, and the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.engine.config import POOLINGS
from quire.engine.params import LIBRARY_DEFAULTS, SamplingParams
from quire.engine.reading import parse_json, read_json

# The names that sentence-transformers has for kinds of pooling.
_KINDS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_MODE = "pooling_mode"
# The sampling parameters of requests for embeddings.
NO_OUTPUT = SamplingParams(max_tokens=0).over(LIBRARY_DEFAULTS)


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """How the hidden states of a prompt's tokens, after the model's last norm, become its embedding.

    Attributes:
        pooling: "last" takes the state of the last token, "mean" the mean of all; "auto" is `EngineConfig.pooling`. If
            that is "auto", too, it is what the checkpoint's files for sentence-transformers say (modules.json), and
            "last" without them.
        normalize: whether the embedding is divided by its length. None: as the checkpoint's files say, if the pooling
            is theirs, and otherwise True.
        dimensions: keep only so many numbers, the first ones, before that, as models allow that are trained for it
            (Matryoshka). None: all.

    Raises:
        ValueError: a value is invalid; the message names the attribute, its value and the allowed values.
    """

    pooling: Literal["auto", "last", "mean"] = "auto"
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling = {self.pooling!r}: it must be one of {', '.join(POOLINGS)}")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise ValueError(f"normalize = {self.normalize!r}: it must be True or False, or None")
        size = self.dimensions
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"dimensions = {size!r}: it must be a whole number, 1 or larger; or None for all")

    def resolved(self, pooling: str, folder: Path, hidden_size: int) -> EmbeddingParams:
        """These parameters without "auto" and None.

        Args:
            pooling: in place of "auto"; if it is "auto", too, the checkpoint's.
            folder: the checkpoint.
            hidden_size: of the model.

        Raises:
            ValueError: the checkpoint's embeddings cannot be computed, or `dimensions` exceeds the hidden size.
        """
        size = hidden_size if self.dimensions is None else self.dimensions
        if size > hidden_size:
            raise ValueError(f"dimensions = {size}: the model's embeddings have {hidden_size} dimensions")
        chosen: Any = pooling if self.pooling == "auto" else self.pooling
        own = read_pooling(folder) if chosen == "auto" else EmbeddingParams(chosen, normalize=True)
        return EmbeddingParams(own.pooling, own.normalize if self.normalize is None else self.normalize, size)


def read_pooling(folder: Path) -> EmbeddingParams:
    """The pooling of a checkpoint by its files for sentence-transformers: modules.json, and the config.json of the
    folder that this names.

    Raises:
        ValueError: a file is broken, or embeddings need what is not supported.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return EmbeddingParams("last", normalize=True)
    modules = parse_json(file)
    try:
        # Versions of sentence-transformers have their classes in different packages.
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    except (KeyError, TypeError):
        raise ValueError(f"{file} could not be loaded: it is not a list of modules with types") from None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        what = f"{file} has the modules {', '.join(kinds)}"
        raise ValueError(f"{what}: only Transformer, Pooling and perhaps Normalize can be computed, in this order")
    config = folder / str(modules[1].get("path", "")) / "config.json"
    if not config.is_file():
        raise ValueError(f"{config}, which {file.name} names, is missing")
    modes = _modes(read_json(config))
    if len(modes) != 1 or modes[0] not in _KINDS:
        what = " and ".join(modes) or "none"
        raise ValueError(f"{config} has the pooling {what}: it must be one of {', '.join(_KINDS)}")
    return EmbeddingParams(_KINDS[modes[0]], normalize=len(kinds) == 3)  # type: ignore[arg-type]


def _modes(config: dict[str, Any]) -> list[str]:
    """The kinds of pooling of a configuration, which has a key for each in old versions."""
    mode = config.get(_MODE)
    if mode is not None:
        return [mode] if isinstance(mode, str) else [str(each) for each in mode]
    return [name.removeprefix(f"{_MODE}_") for name, on in config.items() if name.startswith(f"{_MODE}_") and on]


@dataclass(frozen=True, eq=False, slots=True)
class Embedding:
    """The embedding of a prompt.

    Attributes:
        prompt_token_ids: the tokens of the prompt.
        values: float32 [dimensions]; [0] without an embedding.
        finish_reason: "stop", "cancelled" or "error".
        num_cached_tokens: the number of tokens of the prompt whose keys and values were in the cache already.
        error: the type and message of the exception, if finish_reason is "error".
    """

    prompt_token_ids: list[int]
    values: np.ndarray
    finish_reason: str
    num_cached_tokens: int = 0
    error: str | None = None
