"""What is known of a model and its engine without having them, which is enough to check requests."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What requests depend on. It can be sent to other processes, and nothing of it changes.

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
