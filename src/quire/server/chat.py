"""/v1/chat/completions: answers to messages, by the checkpoint's chat template."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import Completion
from quire.server.answers import Whole, answer, finite
from quire.server.documents import ChatCompletion, completed
from quire.server.errors import bad
from quire.server.protocol import ChatRequest, Message, Messages, TokenizeRequest
from quire.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions", responses=completed(ChatCompletion))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer messages."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs = true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = body.params(service.limits, most, logprobs)
    await service.prepare(params[0], body.form_field)
    tokens = await tokenized(service, body)
    generation = service.start([tokens], params, "messages")
    return await answer(request, generation, _Form(service, logprobs), bool(body.stream), body.includes_usage)


async def tokenized(service: Service, body: Messages | TokenizeRequest, any_length: bool = False) -> list[int]:
    """The tokens of messages, or an ApiError; see `Service.encode` for `any_length`."""
    text = await asyncio.to_thread(_rendered, service, body)

    def encode(text: str) -> list[int]:
        return service.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return await service.tokenize(encode, text, "messages", "messages", any_length)


def _rendered(service: Service, body: Messages | TokenizeRequest) -> str:
    """The text of messages.

    Raises:
        ApiError: the checkpoint has no chat template, or the template refuses the messages.
    """
    tokenizer = service.tokenizer
    if not tokenizer.chat_template:
        message = f"{service.name} has no chat template, so it cannot chat: use /v1/completions"
        raise bad("messages", message, "no_chat_template")
    if not body.messages:
        raise bad("messages", "messages is empty: there must be at least one message")
    options = dict(body.chat_template_kwargs or {})
    reserved = options.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    if reserved:
        raise bad("chat_template_kwargs", f"chat_template_kwargs must not have {sorted(reserved)[0]!r}")
    messages = [_plain(i, message) for i, message in enumerate(body.messages)]
    ours = {"add_generation_prompt": not body.continue_final_message, "continue_final_message": False}
    given = {name: getattr(body, name) for name in ours if getattr(body, name) is not None}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **{**ours, **given}, **options)
    except Exception as error:  # the template is a program of the checkpoint, run on the messages of a request
        raise bad("messages", f"the chat template refuses the messages: {error}") from None
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise bad("messages", "messages are not text: they have half a character")
    return text


def _plain(index: int, message: Message) -> dict[str, Any]:
    """A message as templates read it, with content of text."""
    plain = message.model_dump()
    if isinstance(message.content, list):
        other = next((part.type for part in message.content if part.type != "text"), None)
        if other is not None:
            raise bad("messages", f"messages.{index}.content has a part of type {other!r}: only 'text' is supported")
        plain["content"] = "\n".join(part.text or "" for part in message.content)
    return plain


class _Form:
    """Chat completions; the arguments are those of text completions."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, logprobs: int | None) -> None:
        self._service, self._logprobs = service, logprobs
        self._begun: set[int] = set()
        self.head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": service.now(),
            "model": service.name,
        }

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._report(whole.token_ids, whole.logprobs),
            "finish_reason": whole.finish_reason,
        }

    def chunk(self, index: int, part: Completion) -> dict[str, Any]:
        delta = {"content": part.text} if part.text or index not in self._begun else {}
        if index not in self._begun:
            delta = {"role": "assistant", **delta}
        self._begun.add(index)
        report = self._report(part.token_ids, part.logprobs or [])
        return {"index": index, "delta": delta, "logprobs": report, "finish_reason": part.finish_reason}

    def _report(self, tokens: list[int], logprobs: list[dict[int, float]]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        content = []
        for token, report in zip(tokens, logprobs, strict=True):
            likeliest = list(report.items())[: self._logprobs]
            top = [self._one(other, value) for other, value in likeliest]
            content.append({**self._one(token, report[token]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._service.token_text(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
