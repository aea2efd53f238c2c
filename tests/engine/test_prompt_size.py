"""The bound of the characters that a token stands for."""

from __future__ import annotations

import unicodedata

import pytest

pytest.importorskip("transformers")

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.engine import LLM, SamplingParams, shipped_model
from quire.engine.prompt_size import longest_token

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "import os\n" * 50,
    " " * 300,
    "a\u0301" * 99,
    "\u1f82" * 99,
    unicodedata.normalize("NFD", "\u1f82가" * 99),
    "🙂日本" * 99,
]


def byte_level(*added, normalizer=None, before=None):
    """As the tokenizers of GPT-2 and Qwen, with the bytes and one token of two spaces."""
    vocab = {piece: i for i, piece in enumerate([*BYTES, "ĠĠ"])}
    own = Tokenizer(models.BPE(vocab, [("Ġ", "Ġ")]))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    own.pre_tokenizer = pre_tokenizers.Sequence([before, *steps] if before else steps)
    if normalizer is not None:
        own.normalizer = normalizer
    own.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=own)


def byte_fallback(missing=0):
    """As the tokenizers of Llama 2 and Gemma: characters without a token are bytes, unless bytes are missing."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256 - missing)), "▁", "a", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    own = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=own)


def other(model, pre_tokenizer=None):
    own = Tokenizer(model)
    if pre_tokenizer is not None:
        own.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>")


BOUNDED = {
    "shipped": (AutoTokenizer.from_pretrained(shipped_model()), 41),
    "bytes": (byte_level(), 2),
    "split": (byte_level(before=pre_tokenizers.Split(Regex(r"\s+"), "isolated")), 2),
    "added": (byte_level(AddedToken("<|long token|>", normalized=False)), 14),
    "composed": (byte_level(normalizer=normalizers.NFC()), 8),
    "fallback": (byte_fallback(), 6),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_longest_token_is_a_bound_of_every_text(name):
    tokenizer, longest = BOUNDED[name]
    assert longest_token(tokenizer) == longest
    for text in [*TEXTS, *(token * 20 for token in tokenizer.get_added_vocab())]:
        assert len(text) <= longest * len(tokenizer(text)["input_ids"])


def test_composed_characters_have_four_parts_at_most():
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000)) == 4


UNBOUNDED = {
    "strips": byte_level(AddedToken("<end>", rstrip=True)),
    "normalizer drops": byte_level(normalizer=normalizers.Strip()),
    "normalizer shortens": byte_level(normalizer=normalizers.Replace("aa", "a")),
    "normalizer with a pattern": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "one of a sequence drops": byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "pre-tokenizer drops": byte_level(before=pre_tokenizers.Split(" ", "removed")),
    "white space is dropped": byte_level(before=pre_tokenizers.Whitespace()),
    "unknown characters are one token": byte_fallback(missing=1),
    "unigram": other(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "words": other(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"), pre_tokenizers.WhitespaceSplit()),
    "none": None,
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_longest_token_without_a_sound_bound_is_none(name):
    assert longest_token(UNBOUNDED[name]) is None


def test_llm_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    with LLM(num_pages=10, page_size=8) as llm:
        most = 41 * llm.max_len
        seen = []
        prompts = llm._engine.prompts
        own = prompts.tokenizer
        llm.check("x")  # finds the bound of the tokenizer itself
        prompts.tokenizer = lambda text, **options: seen.append(text) or own(text, **options)
        message = f"prompt 0 has {most + 1} characters, at least 81 tokens: this model's maximum context length is 80"
        with pytest.raises(ValueError, match=message):
            llm.generate("x" * (most + 1))
        assert not seen
        with pytest.raises(ValueError, match="leaves no room"):
            llm.generate("x" * most)
        assert len(seen) == 1
        assert len(llm.encode("x " * most)) > most
        prompts.tokenizer = own
        cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=3)
        assert len(llm.generate("x" * (most + 1), cut)[0].token_ids) == 1
