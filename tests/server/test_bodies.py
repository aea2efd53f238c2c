"""Bodies of more values than a server parses at once are refused, in a time that depends on their size alone."""

from __future__ import annotations

import json
import time

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from helpers.server import served
from quire.engine import LLM
from quire.server import ServerLimits
from quire.server.bodies import check_body
from quire.server.errors import ApiError

LIMITS = ServerLimits(max_containers=100, max_strings=1000, max_values=20_000)
LONG = "x" * 100_000


def refused(body):
    """What a body has too many of; None if it is not refused."""
    try:
        check_body(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)
    except ApiError as error:
        return str(error).removeprefix("the body has more than ").removesuffix(", which are the most")
    return None


def test_check_body_counts_what_is_outside_of_strings():
    assert refused({"x": LONG, "y": [[]] * 97}) is None
    assert refused({"x": LONG, "y": [[]] * 99}) == "100 lists and objects"
    assert refused({"x": LONG, "y": [{}] * 99}) == "100 lists and objects"
    assert refused({"x": LONG, "y": [1] * 20_000}) is None
    assert refused({"x": LONG, "y": [1] * 20_002}) == "20000 values"
    assert refused({"x": LONG, "y": ["a"] * 997}) is None
    assert refused({"x": LONG, "y": ["a"] * 998}) == "1000 strings"
    assert refused({"x": LONG, **{f"k{i}": 1 for i in range(999)}}) == "1000 strings"


def test_check_body_takes_any_text():
    for part in ('[{"a": [1, 2, 3]}, ', "\\", '\\"', '"\\\\', "\n,[", "ü,[{"):
        assert refused({"prompt": part * 50_000}) is None
        assert refused({"prompt": part * 50_000, "y": [[]] * 99}) == "100 lists and objects"


@pytest.mark.parametrize("part", ['"', '\\"', '\\\\"', "[", "{", ",", '"a",', '"\\', '"[', "\\"])
def test_check_body_of_what_is_no_json_takes_linear_time(part):
    body = b'{"prompt": ' + part.encode() * ((4 << 20) // len(part))
    start = time.thread_time()
    refused(body)
    assert time.thread_time() - start < 1


def test_check_body_of_small_bodies_is_left_to_the_parser():
    assert refused([[]] * 1000) is None


def test_server_refuses_a_body_of_too_many_values():
    with LLM(num_pages=64) as llm, served(llm) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "x": [[]] * 50_000})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "body_too_large"
        assert "more than 16384 lists and objects" in answer.json()["error"]["message"]
        text = '[{"a": 1}, ' * 20_000
        answer = httpx.post(f"{url}/tokenize", json={"prompt": text})
        assert answer.status_code == 200
