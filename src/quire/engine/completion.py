"""What a request has produced: a whole output, or what one step added to it."""

from __future__ import annotations

from dataclasses import dataclass

# The error of a request whose parameters together leave no token that may follow.
NO_TOKEN = "none of the tokens that the request allows is possible"


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of a prompt, or an element of a stream.

    Attributes:
        prompt_token_ids: the tokens of the prompt.
        text: the text of the output, without the stop string or end token that ended it; "" without a tokenizer.
        token_ids: the tokens of the output, with the end token if there was one.
        finish_reason: "stop", "length", "cancelled" or "error"; None in a stream that has not ended.
        logprobs: for each output token, its log-probability and those of the most likely tokens, if requested.
        num_cached_tokens: the number of tokens of the prompt whose keys and values were in the cache already.
        error: the type and message of the exception, if finish_reason is "error"; or NO_TOKEN.
        prompt_logprobs: for each token of the prompt, its log-probability and those of the most likely tokens, if
            requested; None for the first token. Each element of a stream has the whole list.
        prompt_ranks: with prompt_logprobs, one more than the number of tokens more likely than each token of the
            prompt; None for the first token.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    prompt_ranks: list[int | None] | None = None
