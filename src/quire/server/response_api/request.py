"""The body of /v1/responses, and the chat that it stands for."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.server.errors import ApiError, bad
from quire.server.protocol import ChatRequest
from quire.server.response_api.items import messages_of

# Fields of chats, of vLLM's among others, that requests for responses have under the same names.
_PASSED = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop stop_token_ids "
    "min_tokens include_stop_str_in_output ignore_eos logit_bias allowed_token_ids bad_words truncate_prompt_tokens "
    "structured_outputs chat_template_kwargs"
)
# Fields that need stored responses. A value that is false or null has no effect.
_STATEFUL = {
    "store": "responses are not stored, which store = false or no value says",
    "previous_response_id": "responses are not stored: send their output items as input",
    "conversation": "conversations are not stored: send their items as input",
    "prompt": "prompts are not stored: send their text as input",
    "background": "responses are not stored, so that none can be fetched later",
}
# The names of fields, by those that chats have for them.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}


class TextFormat(BaseModel):
    """The form of an answer: "text", "json_object", or "json_schema" with a schema."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """How text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(BaseModel):
    """How the model reasons. There are no summaries: reasoning is in the output as it is."""

    effort: str | None = None
    summary: str | None = None


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(BaseModel):
    """The function that the model must call."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


class ResponsesRequest(BaseModel):
    """The body of /v1/responses."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None

    def chat(self) -> ChatRequest:
        """The body of the chat.

        Raises:
            ApiError: a field is wrong or not supported.
        """
        self._refuse()
        extra = self.model_extra or {}
        fields = {
            **extra,
            "messages": messages_of(self.input, self.instructions),
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.text and self.text.verbosity,
            "tools": None if self.tools is None else [_tool(i, tool) for i, tool in enumerate(self.tools)],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise bad(str(first["loc"][0]), f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def _refuse(self) -> None:
        for name, why in _STATEFUL.items():
            if getattr(self, name):
                raise bad(name, f"{name} is not supported by this server: {why}", "unsupported_parameter")
        if self.truncation not in (None, "disabled"):
            what = f"truncation = {self.truncation!r} is not supported by this server: it must be 'disabled'"
            raise bad("truncation", what, "unsupported_parameter")
        if "message.output_text.logprobs" in (self.include or ()):
            what = "include has 'message.output_text.logprobs', which is not supported by this server: use chats"
            raise bad("include", what, "unsupported_parameter")
        for name, value in (self.model_extra or {}).items():
            other = name in ChatRequest.model_fields and name not in _PASSED.split()
            if other and value not in (None, 0, [], {}) and name != "stream_options":
                raise bad(name, f"{name} is no field of responses, but of chats", "unsupported_parameter")

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text and self.text.format
        if not form:
            return None
        made: dict[str, Any] = {"type": form.type, **(form.model_extra or {})}
        if form.schema_ is not None:
            named = {"name": form.name, "description": form.description, "strict": form.strict}
            made["json_schema"] = {**named, "schema": form.schema_}
        return made

    def _tool_choice(self) -> Any:
        if not isinstance(self.tool_choice, FunctionChoice):
            return self.tool_choice
        return {"type": self.tool_choice.type, "function": self.tool_choice.name and {"name": self.tool_choice.name}}


def renamed(error: ApiError) -> ApiError:
    """An error of a chat that has the names of this interface's fields."""
    message = str(error).replace("response_format.json_schema.", "text.format.")
    message = re.sub(rf"\b({'|'.join(_NAMES)})\b", lambda found: _NAMES[found[1]], message)
    param = None if error.param is None else _NAMES.get(error.param, error.param)
    return ApiError(error.status, message, param, error.code, error.headers)


def _tool(i: int, tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function":
        what = f"tools.{i} has the type {tool.type!r}: only 'function' is supported"
        raise bad("tools", what, "unsupported_value")
    return {"type": "function", "function": tool.model_dump(exclude_unset=True, exclude={"type"})}
