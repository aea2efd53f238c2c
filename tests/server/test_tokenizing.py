"""Long texts: refused before they are tokenized where they cannot fit, and otherwise not in the way of short ones."""

from __future__ import annotations

import asyncio
import threading
import warnings

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from helpers.checkpoints import with_chat_template
from helpers.server import served
from quire.engine import LLM
from quire.server.engine_client import attached

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Characters that no 2,048 tokens of the bundled model stand for, and characters that some do.
FAR_TOO_LONG, LONG = 100_000, 70_000


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = with_chat_template(tmp_path_factory.mktemp("checkpoints") / "chatty", TEMPLATE)
    with LLM(folder, num_pages=256, page_size=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(llm):
    return attached(llm)


@pytest.fixture(scope="module")
def url(engine):
    with served(engine) as url:
        yield url


class Watched:
    """A tokenizer that keeps the lengths of texts, and waits for `go` in those that are long."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.lengths, self.now, self.most = [], 0, 0
        self.go, self._lock = threading.Event(), threading.Lock()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **options):
        self.lengths.append(len(text))
        if len(text) < LONG:
            return self._tokenizer(text, **options)
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.go.wait(60)
        with self._lock:
            self.now -= 1
        return {"input_ids": [1]}


@pytest.fixture
def watched(engine, url, monkeypatch):
    """In place of the tokenizer, whose bound the server has."""
    watched = Watched(engine.tokenizer)
    monkeypatch.setattr(engine.prompts, "tokenizer", watched)
    yield watched
    watched.go.set()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x" * FAR_TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "y" * FAR_TOO_LONG]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * FAR_TOO_LONG}]}, "messages"),
    ],
)
def test_encode_text_that_cannot_fit_is_refused_untokenized(url, watched, path, body, field):
    watched.go.set()
    done = httpx.post(url + path, json={**body, "max_tokens": 1})
    error = done.json()["error"]
    assert (done.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert f"has {FAR_TOO_LONG} characters, at least 2440 tokens" in error["message"]
    assert "maximum context length is 2048" in error["message"]
    assert FAR_TOO_LONG not in watched.lengths


def test_encode_text_that_cannot_fit_is_cut_where_the_request_asks_for_it(url):
    options = {"max_tokens": 1, "truncate_prompt_tokens": 5}
    for path, body in (
        ("completions", {"prompt": "x" * FAR_TOO_LONG}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * FAR_TOO_LONG}]}),
    ):
        done = httpx.post(f"{url}/v1/{path}", json={**body, **options})
        assert (done.status_code, done.json()["usage"]["prompt_tokens"]) == (200, 5)


def test_tokenize_text_that_cannot_fit_is_counted(url, llm):
    text = "x = 1\n" * (FAR_TOO_LONG // 6 + 1)
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        assert httpx.post(f"{url}/tokenize", json=body).json()["count"] == len(llm.encode(text))


def test_encode_long_texts_one_at_a_time_without_delaying_short_ones(url, watched):
    """More long texts than asyncio's pool has threads on any machine."""

    async def load():
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            long = [
                asyncio.ensure_future(client.post(f"{url}/tokenize", json={"prompt": "x" * LONG})) for _ in range(40)
            ]
            long += [
                asyncio.ensure_future(
                    client.post(f"{url}/v1/completions", json={"prompt": "x" * LONG, "max_tokens": 1})
                )
            ]
            while not watched.now:
                await asyncio.sleep(0.02)
            # The server takes the others in.
            await asyncio.sleep(0.5)
            done = await client.post(f"{url}/v1/completions", json={"prompt": "x = ", "max_tokens": 1}, timeout=20)
            assert done.status_code == 200
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            assert (await client.post(f"{url}/v1/chat/completions", json=chat, timeout=20)).status_code == 200
            assert not any(each.done() for each in long)
            watched.go.set()
            return await asyncio.gather(*long)

    assert {answer.status_code for answer in asyncio.run(load())} == {200}
    assert watched.most == 1
    assert watched.lengths.count(LONG) == 41


def test_tokens_of_a_text_beyond_the_tokenizers_length_are_no_warning(llm, caplog):
    """Transformers logs that such a text will fail in the model, by its own logger, which does not propagate."""
    from transformers.utils import logging

    own = logging.get_logger("transformers")
    own.addHandler(caplog.handler)
    llm.model.tokenizer.deprecation_warnings.clear()  # which say what has been logged
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(llm.encode("x = 1\n" * 2048)) > llm.model.tokenizer.model_max_length
    finally:
        own.removeHandler(caplog.handler)
    assert not caplog.records
