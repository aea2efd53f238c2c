"""/v1/embeddings, through the official client: what the engine computes, in each form, and refusals."""

from __future__ import annotations

import asyncio
import base64

import httpx
import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
import transformers

from helpers.checkpoints import SHAPE, save_tokenizer
from helpers.engines import pages_add_up, until_idle
from helpers.server import served, serving_process
from quire.engine import LLM, EmbeddingParams, SamplingParams
from quire.server import ServerLimits

TEXTS = ["import os", "def add(a, b):\n    return a + b", "ü€𝄞", "import os", "x" * 300]


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=300, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm, limits=ServerLimits(max_queue=2, max_inputs=40)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def values(answer):
    return np.array([each.embedding for each in answer.data])


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_embeddings_in_each_form_are_those_of_the_engine(client, llm, form):
    expected = np.array([done.values for done in llm.embed(TEXTS)])
    fields = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model=llm.name, input=TEXTS, **fields)
    assert (answer.object, answer.model) == ("list", llm.name)
    assert [(each.object, each.index) for each in answer.data] == [("embedding", i) for i in range(len(TEXTS))]
    count = sum(len(llm.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    found = answer.data
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(each.embedding), "<f4") for each in found]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    else:
        # Without a form, the client asks for base64 and decodes it.
        np.testing.assert_allclose(values(answer), expected, atol=1e-6)


def test_embeddings_of_each_kind_of_input_are_equal(client, llm):
    tokens = [llm.encode(text) for text in TEXTS[:2]]
    texts = values(client.embeddings.create(model="", input=TEXTS[:2], extra_body={"model": None}))
    lists = values(client.embeddings.create(model=llm.name, input=tokens))
    np.testing.assert_allclose(texts, lists, atol=1e-6)
    for i in range(2):
        for one in (TEXTS[i], tokens[i]):
            np.testing.assert_allclose(
                values(client.embeddings.create(model=llm.name, input=one))[0], texts[i], atol=1e-6
            )


def test_embeddings_with_fewer_dimensions_are_normalized(client, llm):
    answer = client.embeddings.create(model=llm.name, input="import os", dimensions=16)
    (expected,) = llm.embed("import os", EmbeddingParams(dimensions=16))
    np.testing.assert_allclose(values(answer)[0], expected.values, atol=1e-6)
    assert np.linalg.norm(values(answer)) == pytest.approx(1)
    raw = client.embeddings.create(model=llm.name, input="import os", extra_body={"normalize": False})
    (expected,) = llm.embed("import os", EmbeddingParams(normalize=False))
    np.testing.assert_allclose(values(raw)[0], expected.values, rtol=1e-4)


def test_embeddings_of_long_texts_that_are_cut_are_those_of_their_last_tokens(client, llm):
    text = "x = 1\n" * 4000
    tokens = llm.encode(text)
    for most, kept in ((7, tokens[-7:]), (-1, tokens[-llm.max_len :])):
        answer = client.embeddings.create(model=llm.name, input=text, extra_body={"truncate_prompt_tokens": most})
        assert answer.usage.prompt_tokens == len(kept)
        np.testing.assert_allclose(values(answer)[0], llm.embed([kept])[0].values, atol=1e-5)


@pytest.mark.slow
def test_embeddings_of_a_checkpoint_without_a_head_are_all_that_is_served(tmp_path):
    config = transformers.Qwen3Config(**{**SHAPE, "vocab_size": save_tokenizer(tmp_path)})
    transformers.Qwen3Model(config).save_pretrained(tmp_path)
    with serving_process(str(tmp_path), "--num-pages", "64", "--served-model-name", "m") as (_, url):
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a", "model": "m"}).json()
        assert len(answer["data"][0]["embedding"]) == 32
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 400
    assert "has no language-model head: only embeddings" in refused.json()["error"]["message"]


def test_embeddings_of_a_server_with_mean_pooling_are_means():
    with LLM(num_pages=300, pooling="mean") as llm, served(llm) as url:
        (expected,) = llm.embed("import os", EmbeddingParams("mean"))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = client.embeddings.create(model=llm.name, input="import os")
    np.testing.assert_allclose(values(answer)[0], expected.values, atol=1e-6)


def test_embeddings_of_many_clients_beside_streams_are_their_own(url, llm):
    """More texts than the queue has room for count as few, since they take turns."""
    texts = [f"def function_{i}(x):\n    return x + {i}" for i in range(40)]
    expected = np.array([done.values for done in llm.embed(texts)])
    whole = llm.generate(["import os\n"], SamplingParams(temperature=0, max_tokens=40))[0].text

    async def stream(client):
        parts = await client.completions.create(
            model=llm.name, prompt="import os\n", max_tokens=40, temperature=0, stream=True
        )
        return "".join([part.choices[0].text async for part in parts])

    async def work():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20) as client:
            embedded = (client.embeddings.create(model=llm.name, input=texts) for _ in range(3))
            return await asyncio.gather(stream(client), *embedded)

    text, *answers = asyncio.run(work())
    assert text == whole
    for answer in answers:
        np.testing.assert_allclose(values(answer), expected, atol=1e-5)
    until_idle(llm)
    assert pages_add_up(llm)
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input", "input 1 is empty"),
        ({"input": ["a", 3]}, "input", "input must be a string, a list of token ids, or a list of either"),
        ({"input": [[1 << 40]]}, "input", "tokens are 0 to"),
        ({"input": [1] * 5000}, "input", "5000 tokens"),
        ({"input": "a" * 100_000}, "input", "100000 characters"),
        ({"input": ["a"] * 41}, "input", "41 elements: this server allows 40 at most"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions = 0"),
        ({"input": "a", "dimensions": 100_000}, "dimensions", "dimensions = 100000: the model's embeddings have"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens = 0"),
        ({"input": "a", "input_type": "query"}, "input_type", "not supported"),
        ({"input": "a", "model": "other"}, "model", "there is no model 'other'"),
        ({}, "input", "required"),
    ],
)
def test_embeddings_of_a_wrong_request_name_the_field(url, fields, param, message):
    answer = httpx.post(f"{url}/v1/embeddings", json=fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert message in error["message"]


def test_embeddings_that_the_engine_cannot_compute_are_an_error(llm, url, monkeypatch):
    def failing(*args):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "run", failing)
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS[:3]})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    assert httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS[:3]}).status_code == 200


def test_embeddings_whose_client_leaves_are_cancelled(llm, url):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/embeddings", json={"input": ["x = 1\n" * 40] * 40}, timeout=0.05)
    until_idle(llm)
    assert pages_add_up(llm)
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
