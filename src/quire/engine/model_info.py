"""What must be known of a model and its engine to check requests in a process that does not have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.engine.params import SamplingParams

# The most names of adapters that have numbers, so that counts by name are bounded.
NUMBERED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInfo:
    """An adapter that requests can name.

    Attributes:
        name: by which requests choose it.
        folder: that it was read from.
        digest: of its contents; adapters with equal digests compute the same, whatever their names.
        rank: the largest rank of its layers.
        base_model_name: what it calls the model that it was trained on; "" if nothing.
        number: of the name, from 0 on, in the order in which names were first loaded; a name keeps its number. None:
            NUMBERED other names were loaded before.
    """

    name: str
    folder: str
    digest: str
    rank: int
    base_model_name: str
    number: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What requests depend on. It can be sent to other processes, and nothing of it changes: the engine has another one
    when adapters have come or gone.

    Attributes:
        folder: of the checkpoint.
        vocab_size: tokens are 0 to vocab_size - 1.
        context: the model's, in tokens.
        max_len: the largest number of tokens of a request, prompt and output, that the context and the cache allow.
        max_num_seqs: the largest number of requests that run at once.
        end_ids: the tokens that end an output.
        media_tokens: the tokens that stand for something else than text, and what that is: {151655: "image"}.
        default_params: the sampling parameters of requests that leave them out.
        runner: the name of the class that computes steps.
        supports_all_logits: whether it computes the logits of all tokens of a prompt.
        is_headless: whether the model has no language-model head, so that only embeddings can be computed.
        embedding_size: the size of hidden states, which embeddings are made of; None: the model does not return them.
        pooling: `EngineConfig.pooling`.
        device, dtype: of the weights.
        max_adapters: `EngineConfig.max_adapters`.
        adapters: those that requests can name.
    """

    folder: str
    vocab_size: int
    context: int
    max_len: int
    max_num_seqs: int
    end_ids: frozenset[int]
    media_tokens: dict[int, str]
    default_params: SamplingParams
    runner: str
    supports_all_logits: bool
    is_headless: bool
    embedding_size: int | None
    pooling: str
    device: str
    dtype: str
    max_adapters: int = 0
    adapters: tuple[AdapterInfo, ...] = ()


def unknown_adapter(name: object, known: Iterable[str]) -> str:
    """The message about a name that no adapter has."""
    names = ", ".join(map(repr, known))
    return f"adapter = {name!r} is not known: " + (f"{names} are" if names else "no adapter has been loaded")
