"""Completions of a given form over HTTP, through the official client."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import openai

from helpers.schemas import is_valid, random_schema
from helpers.server import served
from quire.engine import LLM, SamplingParams, shipped_model
from quire.server import ServerLimits
from quire.server.engine_client import attached

MESSAGES = [{"role": "user", "content": "import json"}]
TEXT = "# import json\ndata = "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["old", "new", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def named(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, **more}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "chatty"
    folder.mkdir()
    for file in shipped_model().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}# {{ m.content }}\n{% endfor %}data = ")
    with LLM(folder, num_pages=800, max_model_len=400, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm, limits=ServerLimits(max_grammar=5000)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_with_a_schema_answers_in_its_form(llm, client):
    done = client.chat.completions.create(
        model="chatty", messages=MESSAGES, response_format=named(SCHEMA, strict=True), temperature=1, seed=4, n=3
    )
    expected = llm.generate(
        [TEXT] * 3, [SamplingParams(json_schema=SCHEMA, temperature=1, seed=4 + i, max_tokens=None) for i in range(3)]
    )
    assert [c.message.content for c in done.choices] == [c.text for c in expected]
    assert len({c.text for c in expected}) == 3
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert set(value) == {"name", "age", "tags"}
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"old", "new", None}


def test_chat_stream_with_a_schema_has_the_text_of_the_answer(client):
    options = {"model": "chatty", "messages": MESSAGES, "response_format": named(SCHEMA), "seed": 7, "temperature": 1}
    whole = client.chat.completions.create(**options).choices[0].message.content
    parts = [part.choices[0] for part in client.chat.completions.create(**options, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole
    assert parts[-1].finish_reason == "stop"


def test_json_object_format_gives_an_object_unless_cut(client):
    form = {"type": "json_object"}
    cut = client.chat.completions.create(model="chatty", messages=MESSAGES, response_format=form, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content.startswith("{")
    done = client.completions.create(
        model="chatty", prompt=TEXT, max_tokens=200, n=8, temperature=1, seed=1, extra_body={"response_format": form}
    )
    complete = [c.text for c in done.choices if c.finish_reason == "stop"]
    assert complete
    assert all(isinstance(json.loads(text), dict) for text in complete)


def test_text_format_has_the_text_of_the_engine(llm, client):
    free = client.chat.completions.create(
        model="chatty", messages=MESSAGES, response_format={"type": "text"}, max_tokens=9
    )
    assert free.choices[0].message.content == llm.generate(TEXT, SamplingParams(max_tokens=9))[0].text


def test_chats_with_different_schemas_at_once_each_keep_theirs(url, rng):
    """Each stream has a schema of its own or none, and cannot see the others'."""
    schemas = [random_schema(rng) if i % 4 else None for i in range(24)]

    async def one(client, i, schema):
        form = {} if schema is None else {"response_format": named(schema)}
        done = await client.chat.completions.create(
            model="chatty", messages=MESSAGES, max_tokens=150, temperature=1, seed=i, **form
        )
        return done.choices[0]

    async def every():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client:
            return await asyncio.gather(*(one(client, i, schema) for i, schema in enumerate(schemas)))

    done = asyncio.run(every())
    complete = 0
    for choice, schema in zip(done, schemas, strict=True):
        if schema is not None and choice.finish_reason == "stop":
            complete += 1
            assert is_valid(schema, json.loads(choice.message.content)), (schema, choice.message.content)
    assert complete >= 8


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ['say "so"', "back\\slash", "größe\n", "\U0001f60a"]}, None),
        ({"grammar": 'start: "a" | "b"'}, "a|b"),
        ({"grammar": 'root ::= list\nlist ::= "[" ("a" | "b"){1,3} "]"'}, r"\[[ab]{1,3}\]"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
        ({"json": '{"enum": [1, 2]}'}, "1|2"),
    ],
)
def test_structured_outputs_of_vllm_are_obeyed(url, given, pattern):
    body = {"prompt": TEXT, "max_tokens": 30, "temperature": 1, "n": 4, "structured_outputs": given}
    done = httpx.post(f"{url}/v1/completions", json=body).json()
    for choice in done["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]) if pattern else choice["text"] in given["choice"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type = 'xml': it must be 'text'"),
        ({"response_format": {}}, "response_format", "response_format.type: Field required"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is missing"),
        ({"response_format": named(None)}, "response_format", "json_schema.schema is missing"),
        ({"response_format": named("x")}, "response_format", "valid dictionary"),
        ({"response_format": named({"type": "strin"})}, "response_format", "Invalid type: strin"),
        ({"response_format": named({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"response_format": named({"enum": ["x" * 5000]})}, "response_format", "this server allows 5000 at most"),
        ({"structured_outputs": {}}, "structured_outputs", "must have exactly one of json, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "it must be a list of strings"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs: regex = '(a': "),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "not a grammar in GBNF: Rule 'x'"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "it must be a JSON schema"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs", "Extra inputs are not permitted"),
        ({"structured_outputs": {"regex": "a"}, "response_format": named({})}, "structured_outputs", "combined"),
        ({"guided_json": {"type": "object"}}, "guided_json", "guided_json is not supported"),
    ],
    ids=lambda x: str(x)[:50],
)  # fmt: skip
def test_wrong_response_format_is_named(url, fields, param, message):
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        done = httpx.post(f"{url}/v1/{path}", json={**body, **fields})
        assert done.status_code == 400, done.text
        error = done.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert message in error["message"]


def test_requests_during_a_compilation_are_answered(llm, url, monkeypatch):
    """A compilation that waits until another request has been answered."""
    answered = asyncio.Event()

    def slow(params, prepare=llm.prepare):
        asyncio.run_coroutine_threadsafe(answered.wait(), loops[0]).result(20)
        prepare(params)

    loops = []
    monkeypatch.setattr(llm, "prepare", slow)

    async def both():
        loops.append(asyncio.get_running_loop())
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "[0-9]+"}}
            waiting = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await asyncio.sleep(0.1)
            assert (
                await client.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
            ).status_code == 200
            assert not waiting.done()
            answered.set()
            return (await waiting).status_code

    assert asyncio.run(both()) == 200


def connections(url):
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=200))


async def body_for(client):
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    return {"model": model, "prompt": TEXT, "max_tokens": 2}


def test_completions_new_grammars_wait_others_are_served(llm, monkeypatch):
    """A hundred new grammars, none of which ends: 16 wait, the others are refused, and all else is served."""
    known, release = {"regex": "[0-9]{3}"}, threading.Event()
    llm.prepare(SamplingParams(**known))
    monkeypatch.setattr(llm, "prepare", lambda params: release.wait() and None)

    async def attack(url):
        async with connections(url) as client:
            body = await body_for(client)
            new = [{**body, "structured_outputs": {"regex": f"x{i}"}} for i in range(100)]
            waiting = [asyncio.create_task(client.post("/v1/completions", json=each)) for each in new]
            try:
                while sum(task.done() for task in waiting) < 84:
                    await asyncio.sleep(0.05)
                for more in ({}, {"structured_outputs": known}):
                    assert (await client.post("/v1/completions", json={**body, **more})).status_code == 200
                assert [task.done() for task in waiting].count(False) == 16
                refused = [task.result() for task in waiting if task.done()]
                assert {answer.status_code for answer in refused} == {429}
                assert "16 grammars wait to be compiled, and 16 are the most" in refused[0].text
            finally:
                release.set()
                monkeypatch.undo()
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200, 429}

    with served(llm, limits=ServerLimits(max_grammars=16)) as url:
        asyncio.run(attack(url))


@pytest.mark.slow
def test_completions_many_new_grammars_at_once_are_all_served(url):
    async def every():
        async with connections(url) as client:
            body = await body_for(client)
            new = [{**body, "structured_outputs": {"regex": f"[0-9]{{3}} of {i}"}} for i in range(120)]
            return await asyncio.gather(*(client.post("/v1/completions", json=each) for each in new))

    assert {answer.status_code for answer in asyncio.run(every())} == {200}


def test_completions_equal_new_grammars_are_compiled_once(llm, monkeypatch):
    """They are one in the queue, and the end of one request leaves the others' work alone."""
    release, compiled = threading.Event(), []

    def slow(params, prepare=llm.prepare):
        compiled.append(params.regex)
        release.wait()
        return prepare(params)

    monkeypatch.setattr(llm, "prepare", slow)

    async def every(url):
        async with connections(url) as client:
            body = {**await body_for(client), "structured_outputs": {"regex": "equal [0-9]{3}"}}
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(40)]
            await asyncio.sleep(0.5)
            tasks.pop(0).cancel()
            await asyncio.sleep(0.2)
            release.set()
            return await asyncio.gather(*tasks)

    with served(llm, limits=ServerLimits(max_grammars=1)) as url:
        assert {answer.status_code for answer in asyncio.run(every(url))} == {200}
    assert compiled == ["equal [0-9]{3}"]


def test_completions_grammar_forgotten_before_the_start_is_compiled_again(llm, monkeypatch):
    """Others may be compiled while the prompt of a request is tokenized. Other requests do not wait meanwhile."""
    params, grammars = SamplingParams(regex="forgotten [0-9]{3}"), llm._engine.grammars
    engine, compiling, release = attached(llm), threading.Event(), threading.Event()

    def encode(prompt, name, encode=engine.encode):
        grammars.forget(grammars.prepared(params))
        monkeypatch.setattr(llm, "prepare", prepare)
        return encode(prompt, name)

    def prepare(params, prepare=llm.prepare):
        compiling.set()
        assert release.wait(60)
        return prepare(params)

    with served(engine) as url, ThreadPoolExecutor(1) as clients:
        monkeypatch.setattr(engine, "encode", encode)
        body = {"prompt": TEXT, "max_tokens": 2, "structured_outputs": {"regex": params.regex}}
        waiting = clients.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        assert compiling.wait(60)
        monkeypatch.delattr(engine, "encode")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": TEXT, "max_tokens": 2}).status_code == 200
        assert not waiting.done()
        release.set()
        assert waiting.result().json()["choices"][0]["text"].startswith("f")


def test_completions_waiting_for_grammars_at_the_end_are_answered(llm, monkeypatch):
    """When the time for requests to finish is over, grammars that wait are not compiled."""
    release, compiled = threading.Event(), []
    monkeypatch.setattr(llm, "prepare", lambda params: compiled.append(params) or (release.wait() and None))
    monkeypatch.setattr(llm, "close", release.set)
    bodies = [{"prompt": TEXT, "structured_outputs": {"regex": f"last {i}"}} for i in range(9)]
    with ThreadPoolExecutor(9) as clients:
        with served(llm, limits=ServerLimits(grace=0.3)) as url:
            answers = [clients.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30) for body in bodies]
            time.sleep(1)
        assert [answer.result().status_code for answer in answers] == [503] * 9
    assert len(compiled) == 1
