"""The text of messages, by a checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

_PROBE = "quire"

_take_parts: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def check_template(template: str) -> None:
    """Refuse what is not a chat template.

    Args:
        template: Jinja, with what Transformers adds to it.

    Raises:
        ValueError: it does not compile; the message has the line.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # Without conversations it is compiled, and not run.
        render_jinja_template(conversations=[], chat_template=template)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template is not a Jinja template: line {error.lineno}: {error.message}") from None


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text of messages.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
        messages: with content of text, {"role": "user", "content": "Hello"}.
        options: of the tokenizer's `apply_chat_template`, or of the template.

    Raises:
        Exception: whatever the template raises, which is a program of the checkpoint.
    """
    if tokenizer not in _take_parts:
        _take_parts[tokenizer] = _takes_parts(tokenizer)
    if _take_parts[tokenizer]:
        messages = [_in_parts(message) for message in messages]
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return text


def _takes_parts(tokenizer: Any) -> bool:
    """Whether a template leaves out content that is not a list of parts, as those of some vision-language models do."""
    return not _shows(tokenizer, _PROBE) and _shows(tokenizer, [{"type": "text", "text": _PROBE}])


def _shows(tokenizer: Any, content: Any) -> bool:
    try:
        return _PROBE in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:
        # The template is a program of the checkpoint, and may raise anything.
        return False


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
