"""Options of completions beyond OpenAI's first ones, through the official client: answers are those of the engine."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from helpers.checkpoints import with_chat_template
from helpers.server import served
from quire.engine import LLM, SamplingParams
from quire.engine.text import TokenBytes
from quire.server import ServerLimits

PROMPT = "def add(a, b):\n    return"
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
CHAT = "# def add(a, b):\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    folder = with_chat_template(tmp_path_factory.mktemp("checkpoints") / "model", template)
    # Texts do not depend on the order of requests.
    with LLM(folder, num_pages=500, max_model_len=256, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, **fields):
    own = {name: fields.pop(name) for name in list(fields) if name not in ("max_tokens", "n", "seed", "stop", "stream")}
    given = {"model": "model", "max_tokens": 16, "prompt": own.pop("prompt", PROMPT), **fields}
    return client.completions.create(**given, extra_body=own)


def chat(client, **fields):
    own = {name: fields.pop(name) for name in list(fields) if name not in ("max_tokens", "n", "seed", "stop", "stream")}
    return client.chat.completions.create(
        **{"model": "model", "messages": MESSAGES, "max_tokens": 16, **fields}, extra_body=own
    )


def options(llm):
    """Each field, with values that change the text of a greedy completion."""
    seen = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))[0]
    bias = {str(token): -100 for token in seen.token_ids[:3]}
    return {
        "min_tokens": {"min_tokens": 12, "stop": [seen.text[3:5], "\n"]},
        "bad_words": {"bad_words": [seen.text[1:4], "return"]},
        "allowed_token_ids": {"allowed_token_ids": list(range(0, llm.model.vocab_size, 2))},
        "logit_bias": {"logit_bias": bias},
        "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["\n"]},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    }


def params(given, **more):
    own = dict(given)
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    return SamplingParams(**own, **{"temperature": 0, "max_tokens": 16, **more})


@pytest.mark.parametrize(
    "name",
    [
        "min_tokens", "bad_words", "allowed_token_ids", "logit_bias", "include_stop_str_in_output",
        "truncate_prompt_tokens",
    ],
)  # fmt: skip
def test_completion_with_each_option_has_the_text_of_the_engine(llm, client, name):
    given = options(llm)[name]
    (expected,) = llm.generate(PROMPT, params(given))
    done = complete(client, temperature=0, **given)
    assert done.choices[0].text == expected.text
    assert done.usage.prompt_tokens == len(expected.prompt_token_ids)
    without = {k: v for k, v in given.items() if k != name}
    assert expected.text != llm.generate(PROMPT, params(without))[0].text
    streamed = complete(client, temperature=0, stream=True, **given)
    assert "".join(part.choices[0].text for part in streamed) == expected.text
    (expected,) = llm.generate(CHAT, params(given))
    assert chat(client, temperature=0, **given).choices[0].message.content == expected.text


def test_completion_with_options_and_n_applies_them_to_each(llm, client):
    given = options(llm)["bad_words"] | options(llm)["allowed_token_ids"] | {"min_tokens": 4}
    own = [params(given, temperature=1.0, seed=7 + i) for i in range(3)]
    expected = [completion.text for completion in llm.generate([PROMPT] * 3, own)]
    done = complete(client, temperature=1.0, n=3, seed=7, **given)
    assert [choice.text for choice in done.choices] == expected
    assert len(set(expected)) == 3


def test_truncate_prompt_tokens_keeps_the_last_tokens(llm, client):
    tokens = llm.encode(PROMPT)
    done = complete(client, truncate_prompt_tokens=4, echo=True, return_token_ids=True, max_tokens=2)
    assert done.choices[0].prompt_token_ids == tokens[-4:]
    assert done.choices[0].text.startswith(llm.model.tokenizer.decode(tokens[-4:]))
    long = [5, 6, 7] * 1000
    done = complete(client, prompt=long, truncate_prompt_tokens=-1, return_token_ids=True, max_tokens=10)
    assert done.choices[0].prompt_token_ids == long[-(llm.max_len - 10) :]
    with pytest.raises(openai.BadRequestError, match="3000 tokens"):
        complete(client, prompt=long)
    (expected,) = llm.generate([long], SamplingParams(truncate_prompt_tokens=-1, temperature=0, max_tokens=10))
    assert expected.prompt_token_ids == done.choices[0].prompt_token_ids


def test_return_token_ids_of_completions_returns_them(llm, client):
    expected = llm.generate([PROMPT] * 2, [params({}, temperature=1.0, seed=i) for i in range(2)])
    given = {"temperature": 1.0, "seed": 0, "n": 2, "return_token_ids": True}
    done = complete(client, **given)
    for choice, completion in zip(done.choices, expected, strict=True):
        assert choice.token_ids == completion.token_ids
        assert choice.prompt_token_ids == completion.prompt_token_ids
    parts = list(complete(client, stream=True, **given))
    for i, completion in enumerate(expected):
        own = [part.choices[0] for part in parts if part.choices[0].index == i]
        assert [token for choice in own for token in choice.token_ids] == completion.token_ids
        assert own[0].prompt_token_ids == completion.prompt_token_ids
        assert not any(hasattr(choice, "prompt_token_ids") for choice in own[1:])
    assert not hasattr(complete(client).choices[0], "token_ids")


def test_return_token_ids_of_chats_returns_them(llm, client):
    (expected,) = llm.generate(CHAT, params({}))
    done = chat(client, temperature=0, return_token_ids=True)
    assert (done.prompt_token_ids, done.choices[0].token_ids) == (expected.prompt_token_ids, expected.token_ids)
    parts = list(chat(client, temperature=0, return_token_ids=True, stream=True))
    assert parts[0].prompt_token_ids == expected.prompt_token_ids
    assert not any(hasattr(part, "prompt_token_ids") for part in parts[1:])
    assert [token for part in parts for token in part.choices[0].token_ids] == expected.token_ids


@pytest.mark.parametrize("included", [True, False])
def test_continuous_usage_stats_give_each_part_its_usage(llm, client, included):
    prompts, options = [PROMPT, "import"], {"include_usage": included, "continuous_usage_stats": True}
    parts = list(complete(client, prompt=prompts, n=2, stream=True, stream_options=options, return_token_ids=True))
    if included:
        last = parts.pop()
        assert (last.choices, last.usage.completion_tokens) == ([], 64)
    seen = [0] * 4
    for part in parts:
        i = part.choices[0].index
        seen[i] += len(part.choices[0].token_ids)
        prompt = len(llm.encode(prompts[i // 2]))
        assert part.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": prompt, "completion_tokens": seen[i], "total_tokens": prompt + seen[i]
        }  # fmt: skip
    assert seen == [16] * 4
    parts = list(chat(client, stream=True, max_tokens=3, stream_options=options))
    assert [part.usage.completion_tokens for part in parts[:3]] == [1, 2, 3]


def expected_report(llm, completion, count):
    own, done = TokenBytes(llm.model.tokenizer), [None]
    for token, report, rank in zip(
        completion.prompt_token_ids[1:], completion.prompt_logprobs[1:], completion.prompt_ranks[1:], strict=True
    ):
        best = list(report)[:count]
        ranks = {other: i for i, other in enumerate(best, 1)} | ({} if token in best else {token: rank})
        done.append(
            {
                str(other): {
                    "logprob": pytest.approx(report[other], abs=1e-4), "rank": place,
                    "decoded_token": own(other).decode(),
                }
                for other, place in ranks.items()
            }
        )  # fmt: skip
    return done


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_have_the_form_of_vllm(llm, client, count):
    (expected,) = llm.generate(PROMPT, params({}, prompt_logprobs=count))
    for choice in complete(client, prompt_logprobs=count, n=2).choices:
        assert choice.prompt_logprobs == expected_report(llm, expected, count)
        assert choice.logprobs is None
    (expected,) = llm.generate(CHAT, params({}, prompt_logprobs=count))
    assert chat(client, prompt_logprobs=count).prompt_logprobs == expected_report(llm, expected, count)


def test_prompt_logprobs_beside_echo_have_their_own_number(llm, client):
    """Each report has its own number of most likely tokens."""
    (expected,) = llm.generate(PROMPT, params({}, prompt_logprobs=5))
    choice = complete(client, prompt_logprobs=1, logprobs=5, echo=True, max_tokens=1).choices[0]
    assert choice.prompt_logprobs == expected_report(llm, expected, 1)
    size = len(expected.prompt_token_ids)
    assert [len(top) for top in choice.logprobs.top_logprobs[1:size]] == [len(r) for r in expected.prompt_logprobs[1:]]
    choice = complete(client, prompt_logprobs=5, logprobs=1, echo=True, max_tokens=1).choices[0]
    assert choice.prompt_logprobs == expected_report(llm, expected, 5)
    assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs[1:])


def test_echo_with_max_tokens_0_scores_the_prompt(llm, client, url):
    """As evaluation harnesses do: no token is generated, and the echo has the log-probabilities of the prompt."""
    for prompt in (PROMPT, llm.encode(PROMPT), [[5], llm.encode("import os")]):
        scored = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
        longer = complete(client, prompt=prompt, max_tokens=1, echo=True, logprobs=2)
        assert scored.usage.completion_tokens == 0
        assert scored.usage.prompt_tokens == longer.usage.prompt_tokens
        for choice, other in zip(scored.choices, longer.choices, strict=True):
            assert choice.finish_reason == "length"
            assert other.text.startswith(choice.text)
            size = len(choice.logprobs.tokens)
            assert size == len(other.logprobs.tokens) - 1
            for name in ("tokens", "text_offset"):
                assert getattr(choice.logprobs, name) == getattr(other.logprobs, name)[:size]
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:size], abs=1e-4)
    (part,) = complete(client, max_tokens=0, echo=True, logprobs=2, stream=True)
    assert part.choices[0].text == PROMPT
    assert len(part.choices[0].logprobs.tokens) == len(llm.encode(PROMPT))
    whole = [1] * llm.max_len
    assert complete(client, prompt=whole, max_tokens=0, echo=True).usage.prompt_tokens == llm.max_len
    done = chat(client, max_tokens=0, prompt_logprobs=0)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("", "length")
    assert httpx.get(f"{url}/health").status_code == 200


def test_default_max_tokens_fits_beside_the_prompt(llm, client):
    size = llm.max_len - 5
    done = client.completions.create(model="model", prompt=[[1] * size, [1]], extra_body={"ignore_eos": True})
    assert done.usage.completion_tokens == 5 + 16
    assert [choice.finish_reason for choice in done.choices] == ["length"] * 2
    with pytest.raises(openai.BadRequestError, match="and max_tokens is 6") as refused:
        complete(client, prompt=[1] * size, max_tokens=6)
    assert refused.value.param == "max_tokens"
    long = [{"role": "user", "content": "x y " * size}]
    with served(llm, limits=ServerLimits(max_tokens=250)) as url:
        body = {"messages": [{"role": "user", "content": "x y " * 20}], "ignore_eos": True}
        done = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert done["usage"]["total_tokens"] == llm.max_len
        for field in ("max_tokens", "max_completion_tokens"):
            error = httpx.post(f"{url}/v1/chat/completions", json={**body, field: 240}).json()["error"]
            assert error["param"] == field
            assert f"and {field} is 240" in error["message"]
            error = httpx.post(f"{url}/v1/chat/completions", json={"messages": long, field: 1}).json()["error"]
            assert error["param"] == "messages"


def test_chat_logprobs_of_partial_characters_have_their_bytes(llm, client, rng):
    own = TokenBytes(llm.model.tokenizer)
    given = {"temperature": 9.0, "seed": rng.randrange(1000), "n": 8, "max_tokens": 60, "return_token_ids": True}
    done = chat(client, logprobs=True, top_logprobs=5, **given)
    halves = 0
    for choice in done.choices:
        content = choice.logprobs.content
        assert [bytes(one.bytes) for one in content] == [own(token) for token in choice.token_ids]
        for one in content:
            assert len({tuple(top.bytes) for top in one.top_logprobs}) == 5
            try:
                assert one.token == bytes(one.bytes).decode()
            except UnicodeDecodeError:
                halves += 1
                assert one.token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.bytes)
    assert halves > 0


@pytest.mark.slow
def test_logprobs_of_broken_characters_have_rising_offsets(llm, client, rng):
    """Streamed or not, with an echo or not, and with a stop string."""
    prompt = "s = 'naïve 日本語 🙂🙃'\n"
    own, special = TokenBytes(llm.model.tokenizer), llm.model.tokenizer.all_special_ids
    broken = 0
    for echo in (False, True):
        for stop in (None, ["e", "a\n"]):
            given = {"prompt": prompt, "logprobs": 5, "echo": echo, "stop": stop, "return_token_ids": True}
            seed = rng.randrange(1000)
            done = complete(client, temperature=9.0, seed=seed, n=8, max_tokens=60, **given)
            for choice in done.choices:
                report, text = choice.logprobs, choice.text
                tokens = choice.prompt_token_ids * echo + choice.token_ids
                assert len(report.text_offset) == len(tokens)
                assert report.text_offset == sorted(report.text_offset)
                for token, name, offset, top in zip(
                    tokens, report.tokens, report.text_offset, report.top_logprobs, strict=True
                ):
                    piece = own(token)
                    assert 0 <= offset <= len(text)
                    assert top is None or len(top) >= 5
                    if name.startswith("bytes:"):
                        broken += 1
                    elif token not in special and offset + len(name) <= len(text):
                        assert text[offset:].startswith(piece.decode())
                    else:  # special, or after the beginning of the stop string
                        assert token in special or choice.finish_reason == "stop"
            parts = list(complete(client, temperature=9.0, seed=seed, n=8, max_tokens=60, stream=True, **given))
            for choice in done.choices:
                own_parts = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
                offsets = [x for part in own_parts for x in part.logprobs.text_offset]
                assert [min(x, len(choice.text)) for x in offsets] == choice.logprobs.text_offset
                assert [x for part in own_parts for x in part.logprobs.tokens] == choice.logprobs.tokens
    assert broken > 100


def test_return_tokens_as_token_ids_names_tokens_by_id(llm, client):
    given = {"max_tokens": 4, "return_token_ids": True, "return_tokens_as_token_ids": True, "temperature": 0}
    (expected,) = llm.generate(PROMPT, params({}, max_tokens=4, logprobs=3))
    choice = complete(client, logprobs=3, **given).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in expected.token_ids]
    for top, report in zip(choice.logprobs.top_logprobs, expected.logprobs, strict=True):
        assert list(top) == [f"token_id:{token}" for token in report]
    content = chat(client, logprobs=True, top_logprobs=2, **given).choices[0].logprobs.content
    own = TokenBytes(llm.model.tokenizer)
    for one in content:
        for each in (one, *one.top_logprobs):
            assert bytes(each.bytes) == own(int(each.token.removeprefix("token_id:")))
