"""The output of a response, item by item, and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from quire.engine import Completion
from quire.server.errors import ApiError
from quire.server.message import ReadMessage, call_id
from quire.server.response_api.request import ResponsesRequest
from quire.server.service import Generation

Event = dict[str, Any]


class ResponseWriter:
    """Writes one response.

    Args:
        body: of the request.
        model: the name of the model.
        generation: the completion.
        message: reads the completion.
    """

    def __init__(self, body: ResponsesRequest, model: str, generation: Generation, message: ReadMessage) -> None:
        self._generation, self._message = generation, message
        self._head = _head(body, model)
        # The items that are complete.
        self._output: list[dict[str, Any]] = []
        # The item that text is added to, and its text, in parts; None: there is none.
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._number = 0
        # The tokens before the first one that adds something else than reasoning, and whether such a token has come.
        self._before_answer, self._answered = 0, False
        self._reasoned = False
        self._reason: str | None = None

    def start(self) -> Iterator[Event]:
        """The first events."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self.response("in_progress"))

    def add(self, part: Completion) -> Iterator[Event]:
        """The events of a part of the completion, which is that of one step, since tokens of reasoning are counted by
        steps.
        """
        delta = self._message.add(part)
        self._reasoned |= bool(delta.reasoning)
        self._answered |= bool(delta.content or delta.calls)
        self._before_answer += 0 if self._answered else len(part.token_ids)
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add_text("message", delta.content)
        for call in delta.calls:
            yield from self._close("completed")
            yield from self._add_call(call.name, call.arguments)
        if part.finish_reason is not None:
            self._reason = part.finish_reason
            yield from self._close("incomplete" if part.finish_reason == "length" else "completed")

    def end(self) -> Event:
        """The last event of a completion that has ended."""
        response = self.whole()
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> Event:
        """The last event of a completion that has failed."""
        failure = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self.response("failed"), "error": failure})

    def whole(self) -> dict[str, Any]:
        """The response of a completion that has ended."""
        if self._reason == "length":
            return {**self.response("incomplete"), "incomplete_details": {"reason": "max_output_tokens"}}
        return {**self.response("completed"), "completed_at": time.time()}

    def response(self, status: str) -> dict[str, Any]:
        """The response so far."""
        usage = None if status == "in_progress" else self._usage()
        return {**self._head, "status": status, "output": list(self._output), "usage": usage}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._before_answer if self._reasoned else 0},
            "total_tokens": usage["total_tokens"],
        }

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._texts.append(text)
        logprobs: Event = {"logprobs": []} if kind == "message" else {}
        yield self._text_event("delta", delta=text, **logprobs)

    def _begin(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any] = {"id": _new_id("msg" if kind == "message" else "rs"), "type": kind}
        item |= {"status": "in_progress"}
        item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._open, self._texts = item, []
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._part_event("added", "")

    def _close(self, status: str) -> Iterator[Event]:
        """Complete the item that text is added to, if there is one."""
        if self._open is None:
            return
        text = "".join(self._texts)
        logprobs: Event = {"logprobs": []} if self._open["type"] == "message" else {}
        yield self._text_event("done", text=text, **logprobs)
        yield self._part_event("done", text)
        item = {**self._open, "status": status, "content": [self._part(text)]}
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _add_call(self, name: str, arguments: str) -> Iterator[Event]:
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call_id(), "name": name}
        index, whole = len(self._output), {**item, "status": "completed", "arguments": arguments}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        where = {"item_id": item["id"], "output_index": index}
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, name=name, arguments=arguments)
        yield self._event("response.output_item.done", output_index=index, item=whole)
        self._output.append(whole)

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _part_event(self, kind: str, text: str) -> Event:
        return self._event(f"response.content_part.{kind}", **self._where(), part=self._part(text))

    def _text_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        of_message = self._open["type"] == "message"
        return self._event(f"response.{'output' if of_message else 'reasoning'}_text.{kind}", **self._where(), **fields)

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """What a response repeats of its request, and what is always the same."""
    form, reasoning = body.text and body.text.format, body.reasoning
    options = {"effort": reasoning.effort if reasoning else None, "summary": None}
    text = {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}}
    choice = body.tool_choice or "auto"
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": options,
        "store": False,
        "background": False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
        "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        "truncation": "disabled",
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
