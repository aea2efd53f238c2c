"""The form that a completion must have: OpenAI's `response_format`, and the fields that vLLM has for it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.server.errors import bad

_OBJECT = {"type": "object"}
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class JsonSchema(BaseModel):
    """A JSON schema and its name. Completions are always as strict as llguidance is."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's field: "text", "json_object", or "json_schema" with a schema."""

    # Extra fields are kept, so that they can be refused by name.
    model_config = ConfigDict(extra="allow")

    type: str
    json_schema: JsonSchema | None = None

    def constraint(self) -> dict[str, Any]:
        """The keyword argument of SamplingParams; an ApiError names what is wrong."""
        if self.type not in ("text", "json_object", "json_schema"):
            what = f"response_format.type = {self.type!r}: it must be 'text', 'json_object' or 'json_schema'"
            raise bad("response_format", what, "unsupported_value")
        schema = self.json_schema
        for where, extra in (("", self.model_extra), (".json_schema", schema.model_extra if schema else None)):
            for name in extra or ():
                what = f"response_format{where}.{name} is not supported: a schema belongs into"
                raise bad("response_format", f"{what} response_format.json_schema.schema", "unsupported_parameter")
        if self.type == "text":
            return {}
        if self.type == "json_object":
            return {"json_schema": _OBJECT}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise bad("response_format", "response_format.json_schema.schema is missing: it must be a JSON schema")
        return {"json_schema": self.json_schema.schema_}


class StructuredOutputs(BaseModel):
    """vLLM's field, of which exactly one must be given; other options of it are refused."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraint(self) -> dict[str, Any]:
        """The keyword argument of SamplingParams; an ApiError names what is wrong."""
        field = "structured_outputs"
        given = {name: value for name, value in self if value not in (None, False)}
        if len(given) != 1:
            names = "json, regex, choice, grammar and json_object"
            raise bad(field, f"{field} must have exactly one of {names}, not {len(given)}")
        ((name, value),) = given.items()
        if name == "choice":
            if not value or "" in value:
                raise bad(field, f"{field} has choice = {value}: it must be a list of strings that are not empty")
            return {"grammar": "start: " + " | ".join(map(_quoted, value))}
        return {"json_schema": _OBJECT} if name == "json_object" else {name.replace("json_", "json_schema"): value}
