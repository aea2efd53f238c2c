"""How one checkpoint writes what a chat's output says: the formats of its calls and of its reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from quire.server.chat_output.detection import (
    HistoryStyle,
    find_reasoning_format,
    find_tool_format,
    shows_role,
    template_text,
)
from quire.server.chat_output.formats import (
    BY_TRANSFORMERS,
    PLAIN,
    REASONING_FORMAT_NAMES,
    REASONING_FORMATS,
    TOOL_FORMAT_NAMES,
    TOOL_FORMATS,
    CallForm,
    ReasoningFormat,
)
from quire.server.chat_output.gpt_oss import GptOssParser
from quire.server.chat_output.grammar import GrammarWriter
from quire.server.chat_output.llama3 import Llama3Parser
from quire.server.chat_output.parser import ContentParser, OutputParser
from quire.server.chat_output.reasoning import ReasoningParser
from quire.server.chat_output.response_template import ResponseTemplateParser


class ChatMarkup:
    """The formats of a checkpoint, which are found when the first chat needs them.

    Args:
        tokenizer: of Transformers; None: there is none, so that there are no chats.
        tool_format, reasoning_format: names of formats; None: they are found by the chat template.

    Raises:
        ValueError: a format is not known, or the tokenizer does not have it.
    """

    def __init__(self, tokenizer: Any, tool_format: str | None = None, reasoning_format: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._given_tools, self._given_reasoning = tool_format, reasoning_format
        _check("tool_format", tool_format, TOOL_FORMAT_NAMES)
        _check("reasoning_format", reasoning_format, REASONING_FORMAT_NAMES)
        if tool_format == BY_TRANSFORMERS and getattr(tokenizer, "response_template", None) is None:
            raise ValueError(f"tool_format = {tool_format!r}: the tokenizer has no response_template")

    @cached_property
    def _found(self) -> tuple[str | None, HistoryStyle]:
        return find_tool_format(self._tokenizer)

    @property
    def tool_format(self) -> str | None:
        """The name of the format of calls; None: it is not known."""
        return self._given_tools or self._found[0]

    @property
    def style(self) -> HistoryStyle:
        """What the template takes in messages that have calls."""
        return self._found[1]

    @cached_property
    def reasoning_format(self) -> str | None:
        """The name of the format of reasoning; None: reasoning is content."""
        name = self._given_reasoning or find_reasoning_format(self._tokenizer)
        return None if name == "none" else name

    @property
    def _reasoning(self) -> ReasoningFormat | None:
        return None if self.reasoning_format is None else REASONING_FORMATS[self.reasoning_format]

    @cached_property
    def _by_transformers(self) -> bool:
        if self.tool_format is None and self.reasoning_format is None:
            return getattr(self._tokenizer, "response_template", None) is not None
        return self.tool_format == BY_TRANSFORMERS

    @property
    def _in_channels(self) -> bool:
        return "gpt_oss" in (self.tool_format, self.reasoning_format)

    @cached_property
    def shows_developers(self) -> bool:
        """Whether the template shows messages of OpenAI's role "developer"."""
        return shows_role(self._tokenizer, "developer")

    def opened(self, prompt: str, continued: str = "") -> bool:
        """Whether a prompt begins the reasoning of its output.

        Args:
            continued: the part of the prompt that is the beginning of the message that the output continues.
        """
        if self._reasoning is None:
            return False
        begin, end = self._reasoning.begin, self._reasoning.end
        return prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end)

    def parser(self, prompt: str, opened: bool, tools: Sequence[Mapping[str, Any]], constrained: bool) -> OutputParser:
        """What reads the output of a chat.

        Args:
            prompt: the text before the output.
            opened: whether the prompt begins the reasoning of the output.
            tools: that may be called, as templates have them.
            constrained: whether a grammar of `grammar` constrains the output.
        """
        names = [tool["function"]["name"] for tool in tools]
        if not names and self._given_reasoning == "none":
            return ContentParser()
        if self._in_channels:
            return GptOssParser(names)
        if self._by_transformers and not constrained:
            return ResponseTemplateParser(self._tokenizer, prompt, tools)
        known = TOOL_FORMATS.get(self.tool_format or "")
        rest = ContentParser() if not names else known.parser(names) if known else Llama3Parser(names)
        reasoning = self._reasoning
        if reasoning is None:
            return rest
        return ReasoningParser((reasoning.begin, reasoning.end), opened, rest)

    def grammar(self, opened: bool, tools: Sequence[Mapping[str, Any]], schema: str | None, several: bool) -> str:
        """The grammar of an output that is reasoning, if it is known, and then calls, or JSON.

        Args:
            opened: whether the prompt begins the reasoning of the output.
            tools: that may be called, as templates have them.
            schema: the JSON schema of content; None: there must be calls.
            several: whether there may be several calls.
        """
        functions = [(t["function"]["name"], t["function"].get("parameters") or {}) for t in tools]
        return GrammarWriter(self._special).write(
            self._form if functions else None, functions, schema, self._reasoning, opened, several
        )

    @property
    def _form(self) -> CallForm:
        known = TOOL_FORMATS.get(self.tool_format or "")
        return PLAIN if known is None else known.form(template_text(self._tokenizer))

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return {token.content: number for number, token in added if token.special}

    def shows_special_tokens(self, calls: bool) -> bool:
        """Whether marks are special tokens, which the output's text must have then.

        Args:
            calls: whether there may be calls.
        """
        if not calls and self._given_reasoning == "none":
            return False
        if self._by_transformers or self._in_channels:
            return True
        text = "".join(self._reasoning or ())
        if calls:
            known = TOOL_FORMATS.get(self.tool_format or "")
            # Calls of Llama 3 may be after a mark that a grammar does not write.
            text += "".join(map(str, self._form)) + ("" if known is None else known.parser.begin)
        return any(mark in text for mark in self._special)


def _check(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ValueError(f"{name} = {value!r}: it must be one of {', '.join(known)}, or None")
