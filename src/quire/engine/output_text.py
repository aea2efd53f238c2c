"""The text of an output whose tokens another process samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.model_info import ModelInfo
from quire.engine.prompts import TokenRequest
from quire.engine.text import text_stream


class OutputText:
    """Does with the tokens of an output what `Request.push` does with them in the engine's thread, as far as that is
    text: decodes them, and ends the output at a stop string.

    Args:
        request: that the output is of.
        info: has the model's end tokens.
        tokenizer: of the model; None: there is no text.
    """

    def __init__(self, request: TokenRequest, info: ModelInfo, tokenizer: Any) -> None:
        params = request.params
        stops = frozenset(params.stop_token_ids)
        self._stop_token_ids = stops if params.ignore_eos else stops | info.end_ids
        self._shows_stop_token = params.include_stop_str_in_output
        self._stream = None if tokenizer is None else text_stream(tokenizer, request.prompt, params)

    def add(self, tokens: Sequence[int], finish_reason: str | None) -> tuple[str, int, str | None]:
        """Add what a step has sampled.

        Args:
            tokens: a stop token may be the last one.
            finish_reason: why the output ends with them, as far as the engine knows; None: it goes on.

        Returns:
            the text that can be shown now, the number of tokens that are of the output, and why it ends with them.
        """
        stream, count = self._stream, len(tokens)
        if stream is None:
            return "", count, finish_reason
        for i, token in enumerate(tokens):
            if token in self._stop_token_ids:
                if self._shows_stop_token:
                    stream.push(token)
                break
            if stream.push(token):
                count, finish_reason = i + 1, "stop"
                break
        if finish_reason not in (None, "error"):
            # The end of an incomplete character may have the rest of a stop string.
            stream.finish()
            if stream.stopped and finish_reason == "length":
                finish_reason = "stop"
        return stream.take(last=finish_reason is not None), count, finish_reason
