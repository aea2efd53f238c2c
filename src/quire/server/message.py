"""The message of a chat's completion, as its parts come."""

from __future__ import annotations

import secrets
import string
from typing import Any

from quire.engine import Completion
from quire.server.chat_output.parser import FunctionCall, MessageDelta, OutputParser

_CHARACTERS = string.ascii_letters + string.digits


class ReadMessage:
    """Reads the message of one completion.

    Args:
        parser: of the completion's output.
        several: whether the message may have several calls; those after the first one are left out otherwise.

    Attributes:
        num_calls: of the message so far.
    """

    def __init__(self, parser: OutputParser, several: bool) -> None:
        self._parser, self._several = parser, several
        self.num_calls = 0

    def add(self, part: Completion) -> MessageDelta:
        """What a part of the completion adds to the message."""
        delta = self._parser.feed(part.text, last=part.finish_reason is not None)
        if not self._several:
            del delta.calls[max(0, 1 - self.num_calls) :]
        self.num_calls += len(delta.calls)
        return delta

    def finish_reason(self, part: Completion) -> str | None:
        """Why the completion has ended with this part, which has been added; None if it has not."""
        return "tool_calls" if self.num_calls and part.finish_reason == "stop" else part.finish_reason


def call_object(call: FunctionCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def call_id() -> str:
    """A new id for a call. Templates of Mistral take ids of nine letters or digits only."""
    return "".join(secrets.choice(_CHARACTERS) for _ in range(9))
