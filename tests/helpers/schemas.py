"""Random JSON schemas, and whether values are valid by them."""

from __future__ import annotations

import random
from typing import Any

_TEXTS = ["", "a", "name", 'say "so"', "back\\slash", "tab\there", "größe", "数", "x y", "\U0001f60a", "</end>", "0"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short: of all types, of enums, of alternatives, and nested."""
    scalar = ["enum", "integer", "number", "string", "boolean", "null"]
    kind = rng.choice([*scalar, "object", "object", "array", "anyOf"] if depth else scalar)
    if kind == "enum":
        return {"enum": rng.sample([*_TEXTS, 0, 17, -3, 2.5, True, None], rng.randint(1, 5))}
    if kind in ("integer", "number"):
        low = rng.randint(-1000, 1000)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "string":
        low = rng.randint(0, 4)
        return {"type": kind, "minLength": low, "maxLength": low + rng.randint(0, 8)}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": kind, "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(_TEXTS, rng.randint(0, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is valid by a schema of the kinds that `random_schema` makes."""
    if "enum" in schema:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"])
    if "anyOf" in schema:
        return any(is_valid(one, value) for one in schema["anyOf"])
    kind, is_number = schema["type"], isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in ("integer", "number"):
        whole = kind == "number" or (is_number and value == int(value))
        return is_number and whole and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(is_valid(schema["items"], one) for one in value)
    if kind == "object":
        known = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
        return known and all(is_valid(schema["properties"][name], one) for name, one in value.items())
    return value is None if kind == "null" else isinstance(value, bool)
