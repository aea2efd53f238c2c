"""JSON in pieces is JSON, and large answers are made beside other requests."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.server.encoding import encode, pieces


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["scalar", "list", "long", "dict"] if depth else ["scalar"])
    if kind == "scalar":
        return rng.choice([None, True, 0, -1.5e-9, 1e300, "", 'a "b"\n\u2028', "ü𝄞"])
    if kind == "list":
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "long":
        return [random_value(rng, min(depth - 1, 1)) for _ in range(rng.choice((63, 64, 65, 128, 200)))]
    return {rng.choice(["a", 'q"', "", "ü"]) + str(i): random_value(rng, depth - 1) for i in range(rng.randint(0, 4))}


def test_json_has_no_line_ends_of_unicode():
    value = {"a\u2028": ["b\x85c", "\u2029", "ü𝄞"]}
    assert encode(value).splitlines() == [encode(value)]
    assert json.loads(encode(value)) == value
    assert "ü𝄞" in encode(value)


def test_pieces_of_random_values_are_their_json(rng):
    for _ in range(300):
        value = random_value(rng, 4)
        assert "".join(pieces(value)) == encode(value)
        assert json.loads("".join(pieces(value))) == value


def test_pieces_of_a_long_list_are_short():
    value = {"choices": [{"logprobs": {"content": [{"token": "x" * 10}] * 10_000}}]}
    assert max(map(len, pieces(value))) < 3000


def test_pieces_of_what_json_does_not_have_raise():
    with pytest.raises(ValueError, match="Out of range"):
        "".join(pieces([float("nan")]))
