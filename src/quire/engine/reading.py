"""Reading the files of a checkpoint that are not its weights; torch is not imported for that."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
# Transformers reads this variable whenever it has advice, as that models need torch.
_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file; ValueError if it is broken."""
    if not file.is_file():
        return {}
    content = parse_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} could not be loaded: it is not a JSON object")
    return content


def parse_json(file: Path) -> Any:
    """What a JSON file has; ValueError if it is broken."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} could not be loaded: {error}") from error


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The Transformers tokenizer of a checkpoint; None if it has none.

    Raises:
        ValueError: its files are broken, or it needs code of the folder.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    with reading(f"the tokenizer of {folder}", trust_remote_code):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if not getattr(tokenizer, "chat_template", None):
        # Vision-language models have it with what prepares images.
        tokenizer.chat_template = read_json(folder / "chat_template.json").get("chat_template")
    return tokenizer


def import_tokenizers() -> None:
    """Import Transformers without torch, unless this process has imported one of them. Tokenizers do not need torch,
    whose import takes a second and 300 MiB. Code of a checkpoint may still import it.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    advice = os.environ.get(_NO_ADVICE)
    # For Python, a module of None is one that can't be imported. Transformers asks once whether there is torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[_NO_ADVICE] = "1"
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
        if advice is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = advice


@contextmanager
def reading(
    what: str, trust_remote_code: bool, explain: Callable[[Exception], str | None] = lambda error: None
) -> Iterator[None]:
    """Turn exceptions of Transformers, safetensors and json, which are of many types, into a ValueError that says what
    could not be loaded.

    Args:
        what: is read.
        trust_remote_code: whether code of the checkpoint is run.
        explain: returns what is wrong, to be said after `what`; None for errors that it does not know.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{what} could not be loaded: {error}") from error
    except Exception as error:
        known = explain(error)
        if known is not None:
            raise ValueError(f"{what} {known}") from error
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(untrusted(what)) from error
        raise ValueError(f"{what} could not be loaded: {type(error).__name__}: {error}") from error


def untrusted(what: str) -> str:
    """The error of a checkpoint that needs its own code."""
    return f"{what} needs code that comes with it, which is run with trust_remote_code=True (--trust-remote-code) only"
