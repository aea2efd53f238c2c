"""How tokens are reported: their bytes and names are their own, and their offsets are those of the returned text."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from transformers import AutoTokenizer

from helpers.tokenizers import byte_fallback, metaspace
from quire.engine import shipped_model
from quire.engine.text import TextStream, TokenBytes
from quire.server.tokens import Offsets, by_name, echo, limited, text_name

KINDS = {
    "byte-level": lambda: AutoTokenizer.from_pretrained(shipped_model()),
    "byte fallback": byte_fallback,
    "byte fallback without a first space": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
}
CHARACTERS = dict.fromkeys(KINDS, "ab c\né漢🙂\u0301") | {"metaspace": "ab cé"}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def tokenizer(kind):
    return KINDS[kind]()


def random_text(rng, kind, least=1):
    return "".join(rng.choice(CHARACTERS[kind]) for _ in range(rng.randint(least, 30)))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_token_bytes_of_a_text_join_to_it(tokenizer, kind, rng):
    own = TokenBytes(tokenizer)
    for _ in range(100):
        text = random_text(rng, kind)
        joined = b"".join(map(own, ids(tokenizer, text))).decode()
        spaced = kind in ("byte fallback", "metaspace") and not text.startswith(" " if kind == "metaspace" else "\0")
        assert joined == (" " if spaced else "") + text


def test_token_bytes_of_partial_characters_are_their_own(kind, tokenizer):
    own = TokenBytes(tokenizer)
    if kind == "metaspace":
        return
    parts = [own(token) for token in ids(tokenizer, "a漢")]
    assert b"\xef\xbf\xbd" not in parts
    assert parts[-3:] == [b"\xe6", b"\xbc", b"\xa2"]
    assert text_name(parts[-1]) == "bytes:\\xa2"


def test_token_bytes_of_special_and_unknown_tokens_exist(tokenizer):
    own = TokenBytes(tokenizer)
    for token in tokenizer.all_special_ids:
        assert own(token) == tokenizer.decode([token]).encode()
    assert own(len(tokenizer) + 5) == b""


def expected_offsets(own, tokens, text):
    """The number of characters of the text that end in the tokens before each, where their bytes make the text."""
    whole = [b"".join(map(own, tokens[:i])) for i in range(len(tokens) + 1)]
    lead = len(whole[-1].decode()) - len(text)  # a first space that the text lacks
    assert whole[-1].decode()[lead:] == text
    return [max(0, len(part.decode(errors="ignore")) - lead) for part in whole[:-1]]


def test_offsets_of_a_text_are_positions_in_it(tokenizer, kind, rng):
    """Of texts of all characters, after a prompt or not, with special tokens between characters."""
    own = TokenBytes(tokenizer)
    for _ in range(100):
        prompt = ids(tokenizer, random_text(rng, kind)) if rng.random() < 0.5 else []
        tokens = ids(tokenizer, random_text(rng, kind))
        stream, begin = TextStream(tokenizer, prompt, ()), Offsets(tokenizer, own, prompt, 7)
        for token in tokens:
            stream.push(token)
        stream.finish()
        text = stream.take(last=True)
        assert [begin(token) for token in tokens] == [7 + x for x in expected_offsets(own, tokens, text)]


@pytest.mark.parametrize("kind", ["byte-level"])
def test_offsets_of_random_tokens_are_positions_in_their_text(tokenizer, rng):
    """Of random tokens, whose bytes are often no characters: a token of characters is in the text at its offset."""
    own = TokenBytes(tokenizer)
    halves = [token for token in range(len(tokenizer)) if text_name(own(token)).startswith("bytes:")]
    checked = broken = 0
    for _ in range(300):
        sources = (range(len(tokenizer)), halves, tokenizer.all_special_ids)
        tokens = [rng.choice(rng.choice(sources)) for _ in range(12)]
        stream, begin = TextStream(tokenizer, (), ()), Offsets(tokenizer, own, (), 0)
        for token in tokens:
            stream.push(token)
        stream.finish()
        text, offsets = stream.text, [begin(token) for token in tokens]
        broken += "\ufffd" in text
        assert offsets == sorted(offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            if token not in tokenizer.all_special_ids and token not in halves:
                assert text[offset:].startswith(own(token).decode())
                checked += 1
    assert checked > 300
    assert broken > 100


def test_echo_offsets_are_positions_in_its_text(tokenizer, kind, rng):
    """Of text, which may differ from that of its tokens by a normalizer, and of tokens with special ones among them."""
    own = TokenBytes(tokenizer)
    for _ in range(60):
        text = random_text(rng, kind)
        tokens = tokenizer(text)["input_ids"]
        made = echo(tokenizer, own, text, tokens, offsets=True)
        assert made.text == text
        assert made.offsets == expected_offsets(own, tokens, text)
        assert echo(tokenizer, own, text, tokens, offsets=False).text == text
        tokens.insert(rng.randint(0, len(tokens)), rng.choice(tokenizer.all_special_ids))
        given = echo(tokenizer, own, None, tokens, offsets=True)
        assert given.text == echo(tokenizer, own, None, tokens, offsets=False).text
        assert len(given.offsets) == len(tokens)


def test_echo_of_normalized_text_has_offsets_in_the_original():
    tokenizer = metaspace()
    text = "ab e\u0301 ab"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == "ab é ab"
    made = echo(tokenizer, TokenBytes(tokenizer), text, tokens, offsets=True)
    assert made.text == text
    pieces = [text[a:b] for a, b in zip(made.offsets, [*made.offsets[1:], len(text)], strict=True)]
    assert pieces == ["ab", " ", "e\u0301", " ab"]


def test_by_name_of_tokens_with_one_name_keeps_each():
    names = {1: "a", 2: "b", 3: "a", 4: "a", 5: "c"}
    report = {3: -0.1, 2: -0.2, 1: -0.3, 4: -4.0}
    assert by_name(report, 1, names.__getitem__) == {"token_id:3": -0.1, "b": -0.2, "a": -0.3, "token_id:4": -4.0}
    assert by_name(report, 2, names.__getitem__) == {"a": -0.1, "b": -0.2, "token_id:1": -0.3, "token_id:4": -4.0}
    assert limited(report, 1, 4) == {3: -0.1, 4: -4.0}
    assert limited(report, 2, 2) == {3: -0.1, 2: -0.2}
    assert limited(report, 0, 1) == {1: -0.3}
