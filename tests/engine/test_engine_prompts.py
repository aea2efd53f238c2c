"""Prompts and parameters that can't be served are refused by name before anything starts."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

pytest.importorskip("transformers")

from quire.engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    with LLM(page_size=4, num_pages=600) as made:
        yield made


BAD_PROMPTS = {
    "empty string": ("", "prompt 1 is empty"),
    "no tokens": ([], "prompt 1 is empty"),
    "unknown token": ([1, 4096], "prompt 1 has token 4096: tokens are 0 to 4095"),
    "negative token": ([-1], "prompt 1 has token -1"),
    "bytes": (b"x = 1", "prompt 1 must be a string or a sequence of token ids"),
    "a dict": ({1: 2}, "prompt 1 must be a string or a sequence of token ids"),
    "a set": ({1, 2}, "prompt 1 must be a string or a sequence of token ids"),
    "truths": ([True, False], "prompt 1 must be a string or a sequence of token ids"),
    "a truth among tokens": ([1, True, 2], "prompt 1 must be a string or a sequence of token ids"),
    "half a character": ("x = '\ud83d'", "prompt 1 is not text: .* at 5 is half a character"),
    "not tokens": ([1.5, 2], "prompt 1 must be a string or a sequence of token ids"),
    "no sequence": (None, "prompt 1 must be a string or a sequence of token ids"),
    "too long": ([1] * 2048, "prompt 1 has 2048 tokens: the model's context of 2048 leaves no room"),
    "too long text": ("x = 1\n" * 2000, "prompt 1 has .* context of 2048 leaves no room"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_generate_with_an_invalid_prompt_names_it_and_starts_nothing(llm, case):
    prompt, message = BAD_PROMPTS[case]
    before = llm.stats
    with pytest.raises(ValueError, match=message):
        llm.generate(["import os\n", prompt], GREEDY)
    assert llm.stats == before
    with pytest.raises(ValueError, match=message.replace("prompt 1", "prompt")):
        llm.check(prompt)


def test_encode_with_any_integer_type_returns_new_ints(llm):
    tokens = [5, 6, 7]
    for prompt in (tokens, (5, 6, 7), array("i", tokens), np.array(tokens), [5, np.int32(6), 7]):
        encoded = llm.encode(prompt)
        assert encoded == tokens
        assert encoded is not tokens
        assert {type(t) for t in encoded} == {int}


@pytest.mark.parametrize("prompts", [b"x = 1", bytearray(b"x"), {"x = 1": 1}, {"x = 1"}, None, 5, memoryview(b"x")])
def test_generate_with_another_type_than_prompts_names_it(llm, prompts):
    with pytest.raises(ValueError, match=f"prompts is of type {type(prompts).__name__}: it must be a string, a list"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, ["greedy"], "g", 0.7, [None]])
def test_generate_with_another_type_than_params_names_it(llm, params):
    with pytest.raises(ValueError, match=r"params = .*SamplingParams"):
        llm.generate(["import os\n"], params)


def test_generate_with_a_prompt_longer_than_the_cache_names_both_sizes():
    with (
        LLM(page_size=4, num_pages=3) as llm,
        pytest.raises(ValueError, match="12 tokens: the cache of 12 tokens"),
    ):
        llm.generate([[1] * 12], GREEDY)
