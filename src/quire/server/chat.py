"""/v1/chat/completions: answers to messages, by the checkpoint's chat template."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import Completion, SamplingParams
from quire.server.bodies import JsonRoute
from quire.server.chat_output.markup import ChatMarkup
from quire.server.chat_output.parser import ContentParser
from quire.server.errors import bad
from quire.server.message import ReadMessage, call_object
from quire.server.protocol import ChatRequest, Messages, TokenizeRequest
from quire.server.rendering import rendered
from quire.server.responses import answer
from quire.server.schemas import ChatCompletion, completed
from quire.server.service import Generation, Service
from quire.server.tokens import finite, id_name, prompt_report
from quire.server.tools import ToolUse, shown, tool_use

router = APIRouter(route_class=JsonRoute)


@dataclass(frozen=True)
class Chat:
    """The completions of a chat that have been started.

    Attributes:
        generation: the completions.
        message: makes what reads one of them.
        logprobs: most likely tokens to report; None: no report.
    """

    generation: Generation
    message: Callable[[], ReadMessage]
    logprobs: int | None


@router.post("/v1/chat/completions", responses=completed(ChatCompletion))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer messages."""
    service: Service = request.app.state.service
    chat = await start_chat(service, request.app.state.markup, body)
    return await answer(request, chat.generation, _ChatFormatter(service, chat, body), body)


async def start_chat(service: Service, markup: ChatMarkup, body: ChatRequest) -> Chat:
    """Begin the completions of a chat, or raise an ApiError."""
    service.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs = true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.params(service.limits, logprobs, body.prompt_logprobs)
    use = await asyncio.to_thread(tool_use, body.tools, body.tool_choice, body.parallel_tool_calls)
    text = await asyncio.to_thread(rendered, service, markup, body, use.offered)
    changes = await asyncio.to_thread(_markup_params, service, markup, params[0], use, text, body.continued)
    params = [replace(each, **changes) for each in params]
    await service.prepare(params[0], "tools" if use.demanded else body.form_field)
    whole = await _tokens(service, text, any_length=params[0].truncate_prompt_tokens is not None)
    tokens = params[0].truncated(whole, service.max_len)
    constrained = params[0].constraint is not None
    # A regular expression or a grammar of the request is that of the whole output, which has no markup then.
    is_read = not constrained or params[0].json_schema is not None or "grammar" in changes
    opened = markup.opened(text, body.continued)

    def message() -> ReadMessage:
        parser = markup.parser(text, opened, use.allowed, constrained) if is_read else ContentParser()
        return ReadMessage(parser, use.several)

    generation = service.start([tokens], params, "messages", body.requested_tokens, body.model)
    return Chat(generation, message, logprobs)


def _markup_params(
    service: Service, markup: ChatMarkup, params: SamplingParams, use: ToolUse, text: str, continued: str
) -> dict[str, Any]:
    """What sampling parameters must have because of the formats of calls and of reasoning."""
    name, schema = params.constraint or ("", None)
    if name not in ("", "json_schema"):
        if use.allowed:
            raise bad("structured_outputs", "structured_outputs and tools can't be combined")
        return {}
    if use.allowed and not use.demanded and markup.tool_format is None:
        message = f"tools is not supported by {service.name} with tool_choice = 'auto', since the format of its calls"
        remedy = "name it by --tool-format, or choose 'required' or a function"
        raise bad("tools", f"{message} is not known: {remedy}", "unsupported_parameter")
    changes: dict[str, Any] = {}
    if markup.shows_special_tokens(bool(use.allowed)):
        changes["skip_special_tokens"] = False
    if use.demanded or (schema is not None and (use.allowed or markup.reasoning_format is not None)):
        content = None if use.demanded else schema
        try:
            grammar = markup.grammar(markup.opened(text, continued), use.allowed, content, use.several)
        except RecursionError:
            raise bad("tools", "tools have a schema that is nested too deeply") from None
        largest = service.limits.max_grammar
        if len(grammar) > largest:
            raise bad(
                "tools", f"tools have a grammar of {len(grammar)} characters: this server allows {largest} at most"
            )
        changes |= {"json_schema": None, "grammar": grammar}
    return changes


async def tokenized(service: Service, markup: ChatMarkup, body: Messages | TokenizeRequest) -> list[int]:
    """The tokens of messages, whose number may exceed the context, or an ApiError."""
    tools = await asyncio.to_thread(shown, body.tools or ())
    text = await asyncio.to_thread(rendered, service, markup, body, tools)
    return await _tokens(service, text, any_length=True)


async def _tokens(service: Service, text: str, any_length: bool) -> list[int]:
    """The tokens of a rendered chat; see `Service.encode` for `any_length`."""

    def encode(text: str) -> list[int]:
        return service.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return await service.tokenize(encode, text, "messages", "messages", any_length)


class _ChatFormatter:
    """Chat completions.

    Args:
        service: has the model's name and tokens' texts.
        chat: the completions.
        body: says what is reported.
    """

    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, chat: Chat, body: ChatRequest) -> None:
        self._service, self._body = service, body
        self._logprobs = chat.logprobs
        self._messages = [chat.message() for _ in range(chat.generation.count)]
        self._name = id_name if body.return_tokens_as_token_ids else service.token_name
        self.head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": service.now(),
            "model": chat.generation.model,
        }

    def choice(self, index: int, whole: Completion) -> dict[str, Any]:
        message = self._messages[index]
        delta = message.add(whole)
        calls = [call_object(call) for call in delta.calls]
        made: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not delta.content else delta.content,
            "refusal": None,
        }
        if delta.reasoning:
            made["reasoning_content"] = delta.reasoning
        if calls:
            made["tool_calls"] = calls
        return {"index": index, "message": made, **self._rest(whole, message)}

    def chunk(self, index: int, part: Completion, first: bool) -> dict[str, Any] | None:
        message = self._messages[index]
        start = message.num_calls
        delta = message.add(part)
        made: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.content or (first and not (delta.reasoning or delta.calls)):
            made["content"] = delta.content
        if delta.reasoning:
            made["reasoning_content"] = delta.reasoning
        if delta.calls:
            made["tool_calls"] = [{"index": start + i, **call_object(call)} for i, call in enumerate(delta.calls)]
        reported = self._logprobs is not None or self._body.return_token_ids or self._body.includes_each_usage
        if not made and part.finish_reason is None and not reported:
            # The parser holds all of the text.
            return None
        return {"index": index, "delta": made, **self._rest(part, message)}

    def beside(self, part: Completion, whole: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt_token_ids": part.prompt_token_ids} if self._body.return_token_ids else {}
        if whole and self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_report(part, self._body.prompt_logprobs, self._service.token_name)
        return fields

    def _rest(self, part: Completion, message: ReadMessage) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": self._report(part), "finish_reason": message.finish_reason(part)}
        return {**fields, "token_ids": part.token_ids} if self._body.return_token_ids else fields

    def _report(self, part: Completion) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        reports = zip(part.token_ids, part.logprobs or (), strict=True)
        return {"content": (self._reported(*each) for each in reports), "refusal": None}

    def _reported(self, token: int, report: Mapping[int, float]) -> dict[str, Any]:
        """The element of "content" for a token."""
        top = [self._one(other, value) for other, value in islice(report.items(), self._logprobs)]
        return {**self._one(token, report[token]), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        own = list(self._service.token_bytes(token))
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": own}
