"""Grammars, in llguidance's dialect of Lark, of outputs that are calls of tools or JSON, after reasoning or not.

Marks that are special tokens of a tokenizer are tokens in a grammar, since none of its text can match them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.engine.grammar_compiler import SPACE
from quire.server.chat_output.formats import CallForm, ReasoningFormat

# Between reasoning and what follows.
_GAP = r"GAP: /\n{0,2}/"
# In arguments of calls, which templates write in one line.
_ONE_SPACE = "[ ]"
_TEXT = r"TEXT: /(.|\n)*/"


class GrammarWriter:
    """Writes the grammars of one tokenizer.

    Args:
        special: its special tokens: their ids by their texts.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def write(
        self,
        form: CallForm | None,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        schema: str | None,
        reasoning: ReasoningFormat | None,
        opened: bool,
        several: bool,
    ) -> str:
        """The text of a grammar.

        Args:
            form: how calls are written; None: there must be none.
            functions: the name of each function that may be called, and the JSON schema of its arguments.
            schema: the JSON schema of content; None: there must be none.
            reasoning: how reasoning is written that may come before; None: there is none.
            opened: whether the prompt begins the reasoning.
            several: whether there may be several calls.
        """
        bodies, rules = [], []
        if form is not None:
            bodies.append("calls")
            rules += self._calls(form, functions, several and form.several)
        if schema is not None:
            bodies.append("content")
            before = "" if reasoning is None else self.literal(reasoning.content)
            rules += [f"content: {before} value", f"value: %json {_spaced(json.loads(schema))}"]
        body = " | ".join(bodies)
        if reasoning is None:
            return "\n".join([f"start: {body}", *rules])
        first = "reasoning" if opened else "reasoning?"
        return "\n".join([f"start: {first} ({body})", *self._reasoning(reasoning, opened), *rules])

    def literal(self, text: str) -> str:
        """The elements of a rule that match a text."""
        return " ".join(self._elements(text))

    def _elements(self, text: str) -> Iterable[str]:
        place = 0
        for found in self._split.finditer(text):
            if found.start() > place:
                yield json.dumps(text[place : found.start()], ensure_ascii=False)
            yield f"<[{self._special[found[0]]}]>"
            place = found.end()
        if place < len(text):
            yield json.dumps(text[place:], ensure_ascii=False)

    def _reasoning(self, reasoning: ReasoningFormat, opened: bool) -> list[str]:
        begin = "" if opened else self.literal(reasoning.begin)
        end = self.literal(reasoning.end)
        if end.startswith("<["):
            return [f"reasoning: {begin} TEXT {end} GAP", _TEXT, _GAP]
        # Text is any text that does not have the mark.
        return [f"reasoning: {begin} thought GAP", f"thought[suffix={end}]: TEXT", _TEXT, _GAP]

    def _calls(self, form: CallForm, functions: Sequence[tuple[str, Mapping[str, Any]]], several: bool) -> list[str]:
        names = " | ".join(f"call_{i}" for i in range(len(functions)))
        more = f"({self.literal(form.between)} call)*" if several else ""
        rules = [f"calls: {self.literal(form.before)} call {more} {self.literal(form.after)}", f"call: {names}"]
        for i, (name, schema) in enumerate(functions):
            rules.append(
                f"call_{i}: {self.literal(form.begin + name + form.middle)} value_{i} {self.literal(form.end)}"
            )
            rules.append(f"value_{i}: %json {_spaced({**schema, 'type': 'object'}, _ONE_SPACE)}")
        return rules


def _spaced(schema: Mapping[str, Any], space: str = SPACE) -> str:
    """The text of a schema that allows this white space."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": space}})
