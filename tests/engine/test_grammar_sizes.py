"""Large schemas and expressions as people write them are within the limits, from the first token to the last."""

from __future__ import annotations

import json
from itertools import product

import pytest

pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from quire.engine import LLM, SamplingParams, grammar_compiler

UUID = "123e4567-e89b-12d3-a456-426614174000"


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=64, device="cpu") as llm:
        yield llm


def closed(properties, required=()):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def text(most, **more):
    return {"type": "string", "maxLength": most, **more}


def listed(items, least, most):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def invoice():
    """Definitions that use each other, formats, patterns, and lists of up to 100 items."""
    money = closed(
        {
            "amount": {"type": "string", "pattern": r"^-?[0-9]{1,12}(\.[0-9]{1,4})?$"},
            "currency": {"enum": ["EUR", "GBP", "JPY", "USD"]},
        },
        ["amount", "currency"],
    )
    party = closed(
        {
            "id": {"type": "string", "format": "uuid"},
            "name": text(256),
            "email": {"type": "string", "format": "email"},
            "phone": {"type": "string", "pattern": r"^\+[1-9][0-9]{6,14}$"},
        },
        ["id", "name"],
    )
    percent = closed(
        {"kind": {"const": "percent"}, "value": {"type": "number", "minimum": 0, "maximum": 100}}, ["kind"]
    )
    fixed = closed({"kind": {"const": "fixed"}, "value": {"$ref": "#/$defs/money"}}, ["kind", "value"])
    line = closed(
        {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}(-[A-Z0-9]{1,4})?$"},
            "description": text(4000),
            "quantity": {"type": "integer", "minimum": 1, "maximum": 99_999},
            "price": {"$ref": "#/$defs/money"},
            "discounts": listed({"anyOf": [percent, fixed]}, 0, 10),
        },
        ["sku", "quantity", "price"],
    )
    properties = {
        "issued": {"type": "string", "format": "date"},
        "created": {"type": "string", "format": "date-time"},
        "buyer": {"$ref": "#/$defs/party"},
        "lines": listed({"$ref": "#/$defs/line"}, 1, 100),
    }
    schema = {"$defs": {"money": money, "party": party, "line": line}, **closed(properties, properties)}
    price = {"amount": "19.99", "currency": "EUR"}
    lines = {
        "sku": "ABC-12345-X1",
        "description": "A widget. " * 30,
        "quantity": 3,
        "price": price,
        "discounts": [{"kind": "percent", "value": 2.5}, {"kind": "fixed", "value": price}],
    }
    buyer = {"id": UUID, "name": "Größe & Söhne", "email": "a.b@example.com", "phone": "+4930123456"}
    value = {"issued": "2024-02-29", "created": "2024-02-29T12:30:00Z", "buyer": buyer, "lines": [lines] * 5}
    return schema, value


def tools():
    """Calls of 80 functions."""
    calls, verbs = [], ["search", "create", "update", "delete", "list", "get", "archive", "restore"]
    for verb, noun in product(verbs, "abcdefghij"):
        arguments = {
            "id": {"type": "string", "format": "uuid"},
            "query": text(500, description=f"The text by which to {verb} {noun}, in the user's language."),
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "fields": listed({"enum": [f"{noun}_{field}" for field in ("id", "title", "owner", "status")]}, 0, 4),
        }
        calls.append(closed({"name": {"const": f"{verb}_{noun}"}, "arguments": closed(arguments, ["id"])}, ["name"]))
    called = {"name": "search_a", "arguments": {"id": UUID, "query": "everything", "fields": ["a_id", "a_owner"]}}
    return listed({"anyOf": calls}, 1, 20), [called, {"name": "restore_j", "arguments": {"id": UUID}}]


def optional():
    """Four hundred properties, each of which may be left out."""
    names = [f"n{i}" for i in range(400)]
    return closed({name: text(50 + i) for i, name in enumerate(names)}), {names[0]: "a", names[399]: "b"}


def bounded():
    """Two hundred integers, each with bounds of its own."""
    bounds = {f"n{i}": {"type": "integer", "minimum": -i * 12_345, "maximum": i * 987_654_321 + 7} for i in range(200)}
    return closed(bounds), {"n0": 5, "n7": -77, "n199": 123_456_789_012}


def long_text():
    return closed({"text": text(100_000)}, ["text"]), {"text": "a few words, " * 400}


def codes():
    """Two thousand values."""
    values = [f"{letter}{i:02}.{j}" for letter, i, j in product("ABCDEFGHIJ", range(40), range(5))]
    return closed({"codes": listed({"enum": values}, 1, 25)}, ["codes"]), {"codes": values[::100]}


SCHEMAS = [invoice, tools, optional, bounded, long_text, codes]
ROW = "([^,\n]{0,50},){9}[^,\n]{0,50}"
ROWS = [",".join("x" * (7 * i % 50) for i in range(j, j + 10)) for j in range(40)]
EXPRESSIONS = {
    "time": (
        r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3])(:[0-5]\d){2}(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})",
        "2024-02-29T12:30:00.5+01:00",
    ),
    "table": (f"{ROW}(\n{ROW}){{0,50}}", "\n".join(ROWS)),
    "function": (
        r"def [a-z_][a-z0-9_]{0,40}\(([a-z_][a-z0-9_]{0,40}(: [A-Za-z\[\], ]{1,60})?(, )?){0,10}\)"
        r"( -> [A-Za-z\[\], ]{1,60})?:\n(    [^\n]{0,120}\n){1,200}",
        "def add(a: int, b: list[int]) -> int:\n" + "    return a\n" * 5,
    ),
    "address": (r"[a-zA-Z0-9._%+-]{1,64}@([a-zA-Z0-9-]{1,63}\.){1,10}[a-zA-Z]{2,24}", "john.doe@mail.example.com"),
}  # fmt: skip


def follow(llm, params, output):
    """The matcher of a request whose output is this text, after all of its tokens; each of them must be allowed."""
    llm._engine.grammars.forget(llm.prepare(params))
    matcher = llm.prepare(params).matcher(frozenset())
    for token in llm.encode(output):
        allowed = matcher.grammar.grammars.masks([matcher])[0].view("uint8")
        assert allowed[token // 8] >> token % 8 & 1
        matcher.push(token)
    return matcher


@pytest.mark.parametrize("make", SCHEMAS)
def test_prepare_large_schema_follows_a_whole_output(llm, make):
    schema, value = make()
    matcher = follow(llm, SamplingParams(json_schema=schema), json.dumps(value, ensure_ascii=False))
    assert matcher.state.is_accepting()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_prepare_long_expression_follows_a_whole_output(llm, name):
    expression, output = EXPRESSIONS[name]
    assert follow(llm, SamplingParams(regex=expression), output).state.is_accepting()


@pytest.mark.slow
def test_generate_after_a_lexer_is_full_compiles_the_grammar_anew(llm, monkeypatch):
    """All requests of a grammar share the states of its lexer, and their limit."""
    monkeypatch.setitem(grammar_compiler.LIMITS, "max_lexer_states", 1000)
    full = SamplingParams(regex="[a-z]{1,50000}", temperature=1, seed=1, max_tokens=400)
    (failed,) = llm.generate("x", full)
    assert failed.finish_reason == "error"
    assert "too many states: 1000" in failed.error
    (done,) = llm.generate("x", SamplingParams(regex="[a-z]{1,50000}", temperature=1, seed=1, max_tokens=4))
    assert done.finish_reason in ("stop", "length")
