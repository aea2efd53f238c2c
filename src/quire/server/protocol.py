"""The bodies of requests: fields of OpenAI's interface, and those that vLLM adds. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from quire.engine import SamplingParams
from quire.server.errors import bad, invalid
from quire.server.formats import ResponseFormat, StructuredOutputs
from quire.server.limits import Limits

_Prompt = str | list[StrictInt] | list[str] | list[list[StrictInt]]
_SAMPLING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids ignore_eos"
)
# Fields that would change the answer and are not supported: they are refused unless they have no effect.
_ABSENT = (
    "best_of suffix logit_bias tools functions prompt_logprobs guided_json guided_regex guided_choice guided_grammar "
    "chat_template audio documents"
)


class StreamOptions(BaseModel):
    """How a stream reports."""

    include_usage: bool | None = None


class Sampled(BaseModel):
    """What requests for completions of prompts and of chats have in common."""

    model_config = ConfigDict(extra="allow")  # for fields that are refused by name
    logprobs_field: ClassVar[str] = "logprobs"  # the one with the number of likeliest tokens

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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def form_field(self) -> str:
        """The field that may constrain the form of completions."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self, limits: Limits, most: int | None, logprobs: int | None) -> list[SamplingParams]:
        """The sampling parameters of each of the n completions of a prompt.

        Args:
            limits: of the server.
            most: tokens of a completion at most, as requested; None for no limit.
            logprobs: likeliest tokens to report.

        Raises:
            ApiError: a field is invalid, beyond a limit or not supported.
        """
        self._refuse_absent()
        self._check(limits, most, logprobs)
        given = {name: getattr(self, name) for name in _SAMPLING.split() if getattr(self, name) is not None}
        given |= self._constraint(limits)
        most = limits.max_tokens if most is None else most
        try:
            first = SamplingParams(**given, seed=self.seed, max_tokens=most, logprobs=logprobs)
        except ValueError as error:
            raise invalid(error) from None
        count = 1 if self.n is None else self.n
        if self.seed is None:
            return [first] * count
        seeds = [self.seed, *((self.seed + i) % (1 << 64) for i in range(1, count))]
        return [SamplingParams(**given, seed=seed, max_tokens=most, logprobs=logprobs) for seed in seeds]

    def _check(self, limits: Limits, most: int | None, logprobs: int | None) -> None:
        if self.n is not None and not 1 <= self.n <= limits.max_n:
            raise bad("n", f"n = {self.n}: it must be from 1 to {limits.max_n}")
        if most is not None and limits.max_tokens is not None and most > limits.max_tokens:
            chosen = "max_tokens" if most == self.max_tokens else "max_completion_tokens"
            raise bad(chosen, f"{chosen} = {most}: this server allows {limits.max_tokens} at most")
        if logprobs is not None and logprobs > limits.max_logprobs:
            name = self.logprobs_field
            raise bad(name, f"{name} = {logprobs}: this server reports {limits.max_logprobs} at most")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, listed in (("stop", stops), ("stop_token_ids", self.stop_token_ids or [])):
            if len(listed) > limits.max_stop:
                raise bad(name, f"{name} has {len(listed)} elements: this server allows {limits.max_stop} at most")
        longest = max(map(len, stops), default=0)
        if longest > limits.max_stop_length:
            raise bad("stop", f"stop has {longest} characters: this server allows {limits.max_stop_length} at most")

    def _constraint(self, limits: Limits) -> dict[str, str]:
        """The keyword argument of SamplingParams for the form of completions; empty if they are free."""
        forms = [form.constraint() for form in (self.response_format, self.structured_outputs) if form is not None]
        if len(forms := [form for form in forms if form]) > 1:
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

    def _refuse_absent(self) -> None:
        extra = self.model_extra or {}
        for name in _ABSENT.split():
            value = extra.get(name)
            if value not in (None, False, "", [], {}) and (name, value) != ("best_of", self.n or 1):
                raise bad(name, f"{name} is not supported by this server", "unsupported_parameter")


class CompletionRequest(Sampled):
    """The body of /v1/completions."""

    prompt: _Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        prompt: Any = self.prompt
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


class ChatRequest(Messages, Sampled):
    """The body of /v1/chat/completions."""

    logprobs_field: ClassVar[str] = "top_logprobs"

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]
