"""Text from tokens as they come: whole characters, stop strings, and all of it in the end."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from helpers.tokenizers import byte_fallback
from quire.engine import shipped_model
from quire.engine.params import SamplingParams
from quire.engine.text import TextStream, text_stream


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped_model())


def stream(tokenizer, text, stops=(), prompt="x = 1\n"):
    """Push a text's tokens one by one; what was taken after each, and the stream."""
    made = TextStream(tokenizer, tokenizer(prompt)["input_ids"], stops)
    parts = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        stopped = made.push(token)
        parts.append(made.take())
        if stopped:
            break
    made.finish()
    parts.append(made.take(last=True))
    return parts, made


TEXTS = [
    "def f(x):\n    return x\n",
    "naïve café – “quoted”",
    "日本語のテキスト",
    "🙂🙃 emoji 👩‍👩‍👧 joined",
    "  \t\n\n  ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_stream_parts_make_the_text(tokenizer, text):
    parts, made = stream(tokenizer, text)
    assert "".join(parts) == made.text == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_stream_parts_have_whole_characters(tokenizer, text):
    parts, _ = stream(tokenizer, text)
    assert not any("\ufffd" in part for part in parts)
    assert len(tokenizer(TEXTS[2])["input_ids"]) > len(TEXTS[2])  # there are halves


def test_text_stream_of_random_text_makes_the_text(tokenizer, rng):
    for _ in range(30):
        text = "".join(rng.choice("ab \n(=é漢🙂") for _ in range(rng.randint(1, 40)))
        parts, made = stream(tokenizer, text)
        assert "".join(parts) == made.text == text


@pytest.mark.parametrize("count", range(1, 8))
def test_text_stream_after_a_prompt_of_single_bytes_is_equal(count):
    tokenizer = byte_fallback()
    for text in ("漢é", "🙂a漢", "ab🙂🙂"):
        parts, made = stream(tokenizer, text, prompt="漢🙂é" * count)
        assert "".join(parts) == made.text == " " + text  # to this tokenizer, a text begins with a space


def test_text_stream_after_a_prompt_with_half_a_character_has_all_of_it(tokenizer):
    tokens = tokenizer("x = '漢'")["input_ids"]
    halves = [i for i in range(len(tokens)) if tokenizer.decode(tokens[:i]).endswith("\ufffd")]
    assert halves
    for cut in halves:
        made = TextStream(tokenizer, tokens[:cut], ())
        for token in tokens[cut:]:
            made.push(token)
        made.finish()
        assert made.take(last=True) == "漢'"


def test_text_stream_with_half_a_character_at_its_end_shows_a_replacement(tokenizer):
    made = TextStream(tokenizer, [], ())
    made.push(tokenizer("漢", add_special_tokens=False)["input_ids"][0])
    assert made.take() == ""
    made.finish()
    assert made.take(last=True) == "\ufffd"


def test_text_stream_with_a_stop_string_ends_before_it(tokenizer):
    parts, made = stream(tokenizer, "for x in y:\n    pass\n\ndef g():\n", stops=["\n\n", "never"])
    assert made.stopped
    assert made.text == "".join(parts) == "for x in y:\n    pass"


def test_text_stream_that_includes_the_stop_string_ends_after_it(tokenizer, rng):
    text = "for x in y:\n    pass\n\ndef g():\n"
    for _ in range(30):
        begin = rng.randrange(len(text) - 1)
        stop = text[begin : begin + rng.randint(1, 9)]
        made = TextStream(tokenizer, (), (stop, f"{stop}?", "never"), True)
        parts = []
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            stopped = made.push(token)
            parts.append(made.take(last=stopped))
            if stopped:
                break
        assert made.stopped
        assert "".join(parts) == made.text == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("include", [False, True])
def test_text_stream_with_min_tokens_ignores_earlier_stop_strings(tokenizer, rng, include):
    text = "ab ab ab def ab(ab):\n    return ab\n" * 2
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for least in range(len(tokens)):
        params = SamplingParams(stop=["ab", "b(a"], min_tokens=least, include_stop_str_in_output=include)
        made = text_stream(tokenizer, (), params)
        first = len(tokenizer.decode(tokens[:least]))
        pushed = 0
        for token in tokens:
            pushed += 1
            if made.push(token):
                break
            made.take()
        places = [(text.find(stop, max(0, first - len(stop) + 1)), len(stop)) for stop in params.stop]
        start, length = min(place for place in places if place[0] >= 0) if max(places)[0] >= 0 else (None, 0)
        made.finish()
        made.take(last=True)
        if start is None:
            assert not made.stopped
            assert made.text == text
        else:
            assert pushed > least
            assert made.text == text[: start + include * length]


def test_text_stream_with_several_stop_strings_ends_before_the_first(tokenizer):
    _, made = stream(tokenizer, "one two three", stops=["three", "two"])
    assert made.text == "one "


def test_text_stream_with_the_begin_of_a_stop_string_holds_it_back(tokenizer):
    text = "a END b EN"
    parts, made = stream(tokenizer, text, stops=["ENDING"])
    assert not made.stopped
    assert "".join(parts) == text
    taken = ""
    for part in parts[:-1]:
        taken += part
        assert not taken.endswith(("E", "EN", "END"))


def test_text_stream_with_a_stop_string_across_tokens_ends_before_it(tokenizer, rng):
    text = "def function(argument):\n    return argument + 1\n"
    for _ in range(30):
        begin = rng.randrange(1, len(text) - 2)
        stop = text[begin : begin + rng.randint(1, 12)]
        parts, made = stream(tokenizer, text, stops=[stop])
        assert made.stopped
        assert "".join(parts) == made.text == text[: text.find(stop)]


def test_text_stream_with_known_texts_of_tokens_decodes_equally(tokenizer, rng):
    """Any tokens after any prompt, halves of characters and special tokens among them: each part is the same when all
    tokens are decoded together with those before them.
    """
    halves = [t for t in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([t], skip_special_tokens=True)]
    for _ in range(200):
        kinds = (range(len(tokenizer)), halves, tokenizer.all_special_ids, tokenizer("漢é🙂")["input_ids"])
        tokens = [rng.choice(rng.choice(kinds)) for _ in range(40)]
        prompt = tokens[: rng.randint(0, 12)]
        stops = [tokenizer.decode(tokens[-12:-10])] if rng.random() < 0.5 else []
        made, other = (TextStream(tokenizer, prompt, [s for s in stops if s]) for _ in range(2))
        assert made._own_texts is not None
        other._own_texts = None
        for token in tokens[len(prompt) :]:
            assert made.push(token) == other.push(token)
            if rng.random() < 0.8:
                assert made.take(last=made.stopped) == other.take(last=made.stopped)
            if made.stopped:
                break
        made.finish()
        other.finish()
        assert made.take(last=True) == other.take(last=True)
        assert made.text == other.text


@pytest.mark.parametrize("skip", [True, False])
def test_text_stream_with_special_tokens_shows_them_if_they_are_not_skipped(tokenizer, skip):
    end = tokenizer.eos_token_id
    ids = [*tokenizer("a(")["input_ids"], end, *tokenizer("é b")["input_ids"], end]
    made = text_stream(tokenizer, tokenizer("x")["input_ids"], SamplingParams(stop=(), skip_special_tokens=skip))
    for token in ids:
        made.push(token)
    made.finish()
    assert made.text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert (tokenizer.eos_token in made.text) is not skip
