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
from quire.engine.chat import render_chat
from quire.server.errors import bad
from quire.server.protocol import ChatRequest, Message, Messages, TokenizeRequest
from quire.server.responses import answer
from quire.server.schemas import ChatCompletion, completed
from quire.server.service import Service
from quire.server.tokens import finite, id_name, prompt_report

router = APIRouter()


@router.post("/v1/chat/completions", responses=completed(ChatCompletion))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer messages."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs = true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.params(service.limits, logprobs, body.prompt_logprobs)
    grammar = await service.prepare(params[0], body.form_field)
    whole = await tokenized(service, body, any_length=params[0].truncate_prompt_tokens is not None)
    tokens = params[0].truncated(whole, service.llm.max_len)
    generation = service.start([tokens], params, "messages", body.asked_tokens, grammar)
    return await answer(request, generation, _ChatFormatter(service, body, logprobs), body)


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
        text = render_chat(tokenizer, messages, **{**ours, **given}, **options)
    except Exception as error:
        # The template is a program of the checkpoint, which may raise anything for the messages of a request.
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


class _ChatFormatter:
    """Chat completions.

    Args:
        service: has the model's name and tokens' texts.
        body: says what is reported.
        logprobs: most likely tokens to report; None: no report.
    """

    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, logprobs: int | None) -> None:
        self._service, self._body = service, body
        self._logprobs = logprobs
        self._name = id_name if body.return_tokens_as_token_ids else service.token_name
        self.head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": service.now(),
            "model": service.name,
        }

    def choice(self, index: int, whole: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            **self._rest(whole),
        }

    def chunk(self, index: int, part: Completion, first: bool) -> dict[str, Any]:
        delta = {"content": part.text} if part.text or first else {}
        if first:
            delta = {"role": "assistant", **delta}
        return {"index": index, "delta": delta, **self._rest(part)}

    def beside(self, part: Completion, whole: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt_token_ids": part.prompt_token_ids} if self._body.return_token_ids else {}
        if whole and self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_report(part, self._body.prompt_logprobs, self._service.token_name)
        return fields

    def _rest(self, part: Completion) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": self._report(part), "finish_reason": part.finish_reason}
        return {**fields, "token_ids": part.token_ids} if self._body.return_token_ids else fields

    def _report(self, part: Completion) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        content = []
        for token, report in zip(part.token_ids, part.logprobs or (), strict=True):
            top_logprobs = list(report.items())[: self._logprobs]
            top = [self._one(other, value) for other, value in top_logprobs]
            content.append({**self._one(token, report[token]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        own = list(self._service.token_bytes(token))
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": own}
