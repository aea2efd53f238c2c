"""Checkpoints with random weights that chat in a format, and engines whose outputs are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.chat_formats import MARKS, TEMPLATES
from helpers.checkpoints import save, save_tokenizer
from quire.engine import LLM
from quire.engine.request import Request

# Marks that are special tokens in the checkpoints of these formats.
SPECIAL = {
    "llama3": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral_by_name": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "deepseek": [mark for mark in MARKS if "▁" in mark],
    "gpt_oss": [mark for mark in MARKS if mark.startswith("<|") and mark != "<|python_tag|>"] + ["<|constrain|>"],
}


def chatting(folder: Path, name: str) -> Path:
    """A checkpoint with the template of a format, whose next tokens are random."""
    size = save_tokenizer(folder, *SPECIAL.get(name, ()), end="<|eot|>")
    save("llama", folder, vocab_size=size, max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    return folder


@contextmanager
def saying(llm: LLM, text: str) -> Iterator[None]:
    """Each output of an engine is the text, one token for each step, and the end token."""
    tokens = [*llm.model.tokenizer(text, add_special_tokens=False)["input_ids"], llm.model.tokenizer.eos_token_id]
    push = Request.push

    def given(request, sampled, logprobs=None):
        start = len(request.tokens) - request.prompt_len
        return push(request, tokens[start : start + len(sampled)], logprobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "push", given)
        yield
