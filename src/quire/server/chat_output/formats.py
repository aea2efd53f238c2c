"""The formats of calls and of reasoning by their names: what reads them, and how a grammar writes them.

The command line has their names, so this imports neither FastAPI nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.server.chat_output.deepseek import DeepSeekParser
from quire.server.chat_output.gpt_oss import GptOssParser
from quire.server.chat_output.hermes import HermesParser
from quire.server.chat_output.llama3 import Llama3Parser
from quire.server.chat_output.marked import MarkedCallParser
from quire.server.chat_output.mistral import MistralParser

# The name of the format that Transformers' own parser reads, by the tokenizer's response_template.
BY_TRANSFORMERS = "transformers"


class CallForm(NamedTuple):
    """How calls are written.

    Attributes:
        begin, middle, end: of a call: the function's name is after `begin`, and the JSON object after `middle`.
        before, between, after: of all calls.
        several: whether an output may have several calls.
    """

    begin: str
    middle: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    several: bool = True


# Calls of models whose format is not known, where a grammar demands calls. The parser of Llama 3 reads them.
PLAIN = CallForm('{"name": "', '", "parameters": ', "}", before="[", between=", ", after="]")


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls.

    Attributes:
        parser: reads the calls of functions that have these names.
        form: how calls are written by a model whose chat template has this text.
    """

    parser: type[MarkedCallParser] | type[GptOssParser]
    form: Callable[[str], CallForm]


def _mistral(template: str) -> CallForm:
    if "[ARGS]" in template:
        return CallForm("[TOOL_CALLS]", "[ARGS]", "")
    return CallForm('{"name": "', '", "arguments": ', "}", before="[TOOL_CALLS][", between=", ", after="]")


def _deepseek(template: str) -> CallForm:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    form = CallForm(begin, "<｜tool▁sep｜>", end, before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>")
    if "```json" not in template:
        return form
    return form._replace(begin=f"{begin}function<｜tool▁sep｜>", middle="\n```json\n", end=f"\n```{end}", between="\n")


_HERMES = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")
_GPT_OSS = CallForm("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", several=False)
_LLAMA3 = CallForm('{"name": "', '", "parameters": ', "}", between="; ")
TOOL_FORMATS = {
    "hermes": ToolFormat(HermesParser, lambda template: _HERMES),
    "gpt_oss": ToolFormat(GptOssParser, lambda template: _GPT_OSS),
    "deepseek": ToolFormat(DeepSeekParser, _deepseek),
    "mistral": ToolFormat(MistralParser, _mistral),
    "llama3": ToolFormat(Llama3Parser, lambda template: _LLAMA3),
}


class ReasoningFormat(NamedTuple):
    """A format of reasoning.

    Attributes:
        begin, end: what reasoning is between.
        content: what is before the content.
    """

    begin: str
    end: str
    content: str = ""


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gpt_oss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
    ),
}
# What command lines and create_app take.
TOOL_FORMAT_NAMES = (*TOOL_FORMATS, BY_TRANSFORMERS)
REASONING_FORMAT_NAMES = (*REASONING_FORMATS, "none")
