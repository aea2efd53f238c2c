"""The text of a chat's messages and tools, by the checkpoint's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.chat import render_chat
from quire.engine.params import half_character
from quire.server.chat_output.detection import with_arguments
from quire.server.chat_output.markup import ChatMarkup
from quire.server.errors import bad
from quire.server.protocol import Message, Messages, TokenizeRequest
from quire.server.service import Service


def rendered(
    service: Service, markup: ChatMarkup, body: Messages | TokenizeRequest, tools: Sequence[Mapping[str, Any]]
) -> str:
    """The text of messages.

    Args:
        service: has the tokenizer.
        markup: what its template takes.
        body: has the messages.
        tools: that the template shows.

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
    functions = tokenizer.apply_chat_template, render_chat
    reserved = {name for function in functions for name in inspect.signature(function).parameters} & options.keys()
    if reserved:
        raise bad("chat_template_kwargs", f"chat_template_kwargs must not have {sorted(reserved)[0]!r}")
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    messages = [_template_message(i, message, markup) for i, message in enumerate(body.messages)]
    ours = {"add_generation_prompt": not body.continue_final_message, "continue_final_message": False}
    given = {name: getattr(body, name) for name in ours if getattr(body, name) is not None}
    try:
        text = render_chat(tokenizer, messages, tools=list(tools) or None, **{**ours, **given}, **options)
    except Exception as error:
        # The template is a program of the checkpoint, which may raise anything for the messages of a request.
        raise bad("messages", f"the chat template refuses the messages: {error}") from None
    if half_character(text) is not None:
        raise bad("messages", "messages are not text: they have half a character")
    return text


def _template_message(index: int, message: Message, markup: ChatMarkup) -> dict[str, Any]:
    """A message as templates read it, with content of text, and without fields that are null."""
    fields = message.model_dump()
    turn = {name: value for name, value in fields.items() if name == "content" or value is not None}
    if message.role == "developer" and not markup.shows_developers:
        # The template would leave the message out. It is OpenAI's newer name of the system's role.
        turn["role"] = "system"
    if isinstance(message.content, list):
        other = next((part.type for part in message.content if part.type != "text"), None)
        if other is not None:
            raise bad("messages", f"messages.{index}.content has a part of type {other!r}: only 'text' is supported")
        turn["content"] = "\n".join(part.text or "" for part in message.content)
    calls = turn.get("tool_calls")
    if isinstance(calls, list) and calls:
        turn["tool_calls"] = [with_arguments(call, markup.style.json_arguments) for call in calls]
        if turn["content"] is None and markup.style.empty_content:
            turn["content"] = ""
    elif calls is not None:
        # Some templates take an empty list for calls.
        del turn["tool_calls"]
    if markup.reasoning_format == "gpt_oss" and "reasoning_content" in turn:
        # The template of GPT-OSS has another name for it, and refuses it beside the content of a message with calls.
        reasoning = turn.pop("reasoning_content")
        if not (calls and turn["content"]):
            turn.setdefault("thinking", reasoning)
    return turn
