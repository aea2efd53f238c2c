"""The bodies of requests: fields of OpenAI's interface, and those that vLLM adds. `unsupported.py` has those that are
refused; unknown ones are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from quire.engine import SamplingParams
from quire.server.errors import bad, invalid
from quire.server.formats import ResponseFormat, StructuredOutputs
from quire.server.limits import ServerLimits
from quire.server.tools import Tool, ToolChoice
from quire.server.unsupported import refuse

_Prompt = str | list[StrictInt] | list[str] | list[list[StrictInt]]
_SAMPLING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids "
    "min_tokens include_stop_str_in_output ignore_eos logit_bias allowed_token_ids bad_words truncate_prompt_tokens"
)


class StreamOptions(BaseModel):
    """How a stream reports."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(BaseModel):
    """What requests for completions of prompts and of chats have in common."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")
    # The field that has the number of most likely tokens.
    logprobs_field: ClassVar[str] = "logprobs"
    # The largest number of tokens of a completion if the body does not give one.
    default_tokens: ClassVar[int | None] = None
    # Whether special tokens are added to the text of prompts.
    adds_special_tokens: ClassVar[bool] = False

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def form_field(self) -> str:
        """The field that may constrain the form of completions."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_each_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def requested_tokens(self) -> tuple[str, int] | None:
        """The field that says how many tokens a completion has at most, and its value; None: none says it."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    def params(
        self, limits: ServerLimits, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> list[SamplingParams]:
        """The sampling parameters of each of the n completions of a prompt.

        Args:
            limits: of the server.
            logprobs, prompt_logprobs: most likely tokens to report.

        Raises:
            ApiError: a field is invalid, beyond a limit or not supported.
        """
        refuse(self.model_extra or {}, self.n, special=self.adds_special_tokens)
        self._check(limits, logprobs)
        given = {name: getattr(self, name) for name in _SAMPLING.split() if getattr(self, name) is not None}
        given |= self._constraint(limits)
        bounds = [n for n in (self.default_tokens, limits.max_tokens) if n is not None]
        tokens = self.requested_tokens[1] if self.requested_tokens else min(bounds, default=None)
        given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        try:
            first = SamplingParams(**given, seed=self.seed, max_tokens=tokens)
        except ValueError as error:
            raise invalid(error) from None
        count = 1 if self.n is None else self.n
        if self.seed is None:
            return [first] * count
        return [first, *(replace(first, seed=(self.seed + i) % (1 << 64)) for i in range(1, count))]

    def _check(self, limits: ServerLimits, logprobs: int | None) -> None:
        if self.n is not None and not 1 <= self.n <= limits.max_n:
            raise bad("n", f"n = {self.n}: it must be from 1 to {limits.max_n}")
        name, requested = self.requested_tokens or ("max_tokens", 0)
        if limits.max_tokens is not None and requested > limits.max_tokens:
            raise bad(name, f"{name} = {requested}: this server allows {limits.max_tokens} at most")
        for name, count in ((self.logprobs_field, logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > limits.max_logprobs:
                raise bad(name, f"{name} = {count}: this server reports {limits.max_logprobs} at most")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs", "prompt_logprobs can't be combined with stream")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        words = self.bad_words or []
        for name, listed, largest in (
            ("stop", stops, limits.max_stop),
            ("stop_token_ids", self.stop_token_ids or [], limits.max_stop),
            ("bad_words", words, limits.max_bad_words),
            ("logit_bias", self.logit_bias or {}, limits.max_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or [], limits.max_token_ids),
        ):
            if len(listed) > largest:
                raise bad(name, f"{name} has {len(listed)} elements: this server allows {largest} at most")
        for name, texts in (("stop", stops), ("bad_words", words)):
            longest = max(map(len, texts), default=0)
            if longest > limits.max_stop_length:
                raise bad(name, f"{name} has {longest} characters: this server allows {limits.max_stop_length} at most")

    def _constraint(self, limits: ServerLimits) -> dict[str, str]:
        """The keyword argument of SamplingParams for the form of completions; empty if they are free."""
        fields = (self.response_format, self.structured_outputs)
        forms = [form for field in fields if field is not None and (form := field.constraint())]
        if len(forms) > 1:
            raise bad("structured_outputs", "structured_outputs and response_format can't be combined")
        if not forms:
            return {}
        try:
            checked = SamplingParams(**forms[0]).constraint
        except ValueError as error:
            raise bad(self.form_field, f"{self.form_field}: {error}") from None
        assert checked is not None
        name, text = checked
        if len(text) > limits.max_grammar:
            size = f"{len(text)} characters: this server allows {limits.max_grammar} at most"
            raise bad(self.form_field, f"{self.form_field} has {size}")
        return {name: text}


class CompletionRequest(SamplingBody):
    """The body of /v1/completions."""

    # OpenAI's default.
    default_tokens: ClassVar[int | None] = 16
    adds_special_tokens: ClassVar[bool] = True

    prompt: _Prompt
    echo: bool | None = None
    # A chat's logprobs are true or false, which would become 1 and 0 here.
    logprobs: Annotated[int, Field(ge=0, strict=True)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        return _listed(self.prompt)


class EmbeddingsRequest(BaseModel):
    """The body of /v1/embeddings."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: _Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The texts, one or several."""
        return _listed(self.input)


def _listed(prompt: Any) -> list[str | list[int]]:
    """One prompt, or several, as a list of prompts."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]
    return prompt


class Part(BaseModel):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a chat; a template may read fields besides these."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None


class Messages(BaseModel):
    """A chat, and how its template renders it."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None


class ChatRequest(Messages, SamplingBody):
    """The body of /v1/chat/completions."""

    logprobs_field: ClassVar[str] = "top_logprobs"

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def continued(self) -> str:
        """The beginning of the message that the output continues; "" if it is a new message."""
        content = self.messages[-1].content if self.continue_final_message and self.messages else None
        return content if isinstance(content, str) else "\n".join(part.text or "" for part in content or ())

    @property
    def requested_tokens(self) -> tuple[str, int] | None:
        count = self.max_completion_tokens
        return super().requested_tokens if count is None else ("max_completion_tokens", count)


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a prompt, or messages."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None


class LoadAdapterRequest(BaseModel):
    """The body of /v1/load_lora_adapter."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")

    lora_name: str
    lora_path: Annotated[str, Field(max_length=4096)]


class UnloadAdapterRequest(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]
