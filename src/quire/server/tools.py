"""The tools of a chat: what a request may offer, and which of it the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from quire.server.errors import bad

# Names that stand in the markup of calls as they are.
_NAME = re.compile(r"[\w.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")


class FunctionDefinition(BaseModel):
    """A function; the template may read fields besides these."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """What the model may call: a function; the template may read fields besides these."""

    model_config = ConfigDict(extra="allow")

    type: str
    function: FunctionDefinition | None = None


class FunctionName(BaseModel):
    """The name of a function."""

    name: str


class NamedChoice(BaseModel):
    """The function that the model must call."""

    # Extra fields are kept, so that choices of other kinds are refused by their type.
    model_config = ConfigDict(extra="allow")

    type: str
    function: FunctionName | None = None


ToolChoice = str | NamedChoice


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        offered: what the template shows, as it takes them; empty: there are none.
        allowed: those of them that may be called.
        demanded: whether there must be a call.
        several: whether there may be several calls.
    """

    offered: Sequence[dict[str, Any]] = ()
    allowed: Sequence[dict[str, Any]] = ()
    demanded: bool = False
    several: bool = True


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """The tools of a request by its fields `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: a field is wrong.
    """
    offered = shown(tools or ())
    if isinstance(choice, str) and choice not in _CHOICES:
        what = f"tool_choice = {choice!r}: it must be {', '.join(map(repr, _CHOICES))}, or name a function"
        raise bad("tool_choice", what, "unsupported_value")
    if not offered and choice not in (None, "none", "auto"):
        raise bad("tool_choice", "tool_choice needs tools, of which there are none")
    if not offered or choice == "none":
        return ToolUse()
    several = parallel is not False
    if not isinstance(choice, NamedChoice):
        return ToolUse(offered, offered, choice == "required", several)
    if choice.type != "function" or choice.function is None:
        what = f"tool_choice has the type {choice.type!r}: it must be 'function', with the function's name"
        raise bad("tool_choice", what, "unsupported_value")
    name = choice.function.name
    allowed = [tool for tool in offered if tool["function"]["name"] == name]
    if not allowed:
        raise bad("tool_choice", f"tool_choice names the function {name!r}, which tools do not have")
    return ToolUse(offered, allowed, True, False)


def shown(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates take them.

    Raises:
        ApiError: one of them is not a function, or its name is wrong or not the only one of its kind.
    """
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type != "function":
            what = f"tools.{i} has the type {tool.type!r}: only 'function' is supported"
            raise bad("tools", what, "unsupported_value")
        if tool.function is None:
            raise bad("tools", f"tools.{i}.function is missing")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            allowed = "it must be 1 to 128 letters, digits, and characters of _ . : / -"
            raise bad("tools", f"tools.{i}.function.name = {name!r}: {allowed}")
        if name in names:
            raise bad("tools", f"tools.{i}.function.name = {name!r}: another function has this name")
        names.add(name)
    return [tool.model_dump(exclude_unset=True) for tool in tools]
