"""The answers that the OpenAPI document describes; what is sent is made by the endpoints themselves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Error(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, in OpenAI's form."""

    error: Error


class CachedTokens(BaseModel):
    """Tokens of the prompts that were in the prefix tree."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Logprob(BaseModel):
    """The log-probability of a token, its rank among all tokens, and its text."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of a prompt but the first: its log-probability, and those of the most likely tokens, by token id.
PromptLogprobs = list[dict[str, Logprob] | None] | None


class Choice(BaseModel):
    """A completion."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None
    token_ids: list[int] | None = None


class TextChoice(Choice):
    """A completion of a prompt."""

    text: str
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs = None


class CalledFunction(BaseModel):
    """The name of a function, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Answer(BaseModel):
    """A chat's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """A completion of a chat."""

    message: Answer


class Completed(BaseModel):
    """What the answers to requests for completions of prompts and of chats have in common."""

    id: str
    created: int
    model: str
    usage: Usage


class TextCompletion(Completed):
    """The answer of /v1/completions, unless it is a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Completed):
    """The answer of /v1/chat/completions, unless it is a stream."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs = None


class EmbeddedInput(BaseModel):
    """The embedding of one text: numbers, or float32 of little endian in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class InputUsage(BaseModel):
    """Numbers of tokens of texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[EmbeddedInput]
    usage: InputUsage


class ResponseUsage(BaseModel):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(BaseModel):
    """The answer of /v1/responses, unless it is a stream: its items are messages, reasoning and calls of functions."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: ResponseUsage


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


def completed(model: type[Completed] | type[ResponseObject]) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint that answers with the model, or with a stream of events."""
    whole_or_stream = "The completions, or, with stream, events that have parts of them"
    return {200: {"model": model, "content": {"text/event-stream": {}}, "description": whole_or_stream}}


def text(description: str) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint that answers with plain text."""
    return {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": description}}
