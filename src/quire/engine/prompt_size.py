"""How much text can fit into a number of tokens, known before the text is tokenized."""

from __future__ import annotations

import json
from typing import Any

from quire.engine.transformers_internals import calls_library_to_encode

# A character decomposes into four characters at most, so NFC composes one of four at most.
_COMPOSED = 4
_KEEPING = ("ByteLevel", "Digits", "Metaspace")


def longest_token(tokenizer: Any) -> int | None:
    """Characters of a text that one token stands for at most; None if that is not known.

    It is known of byte-pair encodings of the tokenizers library that have all bytes and drop no character, as those of
    GPT-2, Qwen, Llama and Mistral. It is not known where an unknown token stands for any number of characters, where
    the normalizer or the pre-tokenizer drops characters, or where added tokens take the white space beside them.

    Args:
        tokenizer: a Transformers tokenizer.
    """
    from tokenizers.models import BPE

    if not calls_library_to_encode(tokenizer):
        return None
    library, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    steps = _steps(library.pre_tokenizer, "pretokenizers")
    composed = _composed(_steps(library.normalizer, "normalizers"))
    if composed is None or not all(map(_keeps, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocab = library.get_vocab()
    if not isinstance(library.model, BPE) or not _has_bytes(library.model, vocab, steps):
        return None
    longest = max(map(len, vocab))
    if library.normalizer is not None:
        longest = max([longest, *(len(library.normalizer.normalize_str(token.content)) for token in added)])
    return longest * composed


def check_size(text: str, name: str, longest: int | None, max_len: int) -> None:
    """Refuse text that cannot fit, whatever its tokens are: to tokenize it would take seconds.

    Args:
        text: a prompt.
        name: of the prompt in the message.
        longest: of `longest_token`.
        max_len: the largest number of tokens.

    Raises:
        ValueError: the text has more characters than max_len tokens stand for.
    """
    if longest is not None and len(text) > max_len * longest:
        what = f"at least {-(-len(text) // longest)} tokens: {context_length(max_len)}"
        raise ValueError(f"{name} has {len(text)} characters, {what}")


def context_length(max_len: int) -> str:
    """The end of the message for a prompt that cannot fit. Programs know the error by OpenAI's words."""
    return f"this model's maximum context length is {max_len} tokens, prompt and completion"


def _steps(component: Any, parts: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, those of sequences one by one."""
    steps = [] if component is None else [json.loads(component.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [part for step in steps for part in (step[parts] if step["type"] == "Sequence" else [step])]
    return steps


def _composed(normalizers: list[dict[str, Any]]) -> int | None:
    """The most characters that the normalizers compose into one; None if that is not known."""
    composed = 1
    for step in normalizers:
        replaced = step["pattern"].get("String") if step["type"] == "Replace" else None
        if step["type"] == "NFC":
            composed *= _COMPOSED
        elif step["type"] != "Prepend" and (replaced is None or len(step["content"]) < len(replaced)):
            return None
    return composed


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all characters."""
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING


def _has_bytes(model: Any, vocab: dict[str, int], pre_tokenizers: list[dict[str, Any]]) -> bool:
    """Whether text of any kind is made of tokens without an unknown one."""
    from tokenizers.pre_tokenizers import ByteLevel

    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        return vocab.keys() >= set(ByteLevel.alphabet())
    return model.byte_fallback and vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
