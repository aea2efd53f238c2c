"""Private internals of Transformers. No other file of the engine reads any.

They are those of KNOWN_VERSIONS. `tests/engine/test_transformers_internals.py` compares them with the installed
version, and fails on others until somebody has done so.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

KNOWN_VERSIONS = ("5.17", "5.23")


def calls_library_to_encode(tokenizer: Any) -> bool:
    """Whether calling a tokenizer does what `PreTrainedTokenizerFast` does: it calls the tokenizers library."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not issubclass(kind, Fast):
        return False
    return (kind.__call__, kind._encode_plus) == (Fast.__call__, Fast._encode_plus)


def calls_library_to_decode(tokenizer: Any) -> bool:
    """Whether `tokenizer.decode` does no more than to call the tokenizers library."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not issubclass(kind, Fast) or "decode" in vars(tokenizer) or tokenizer.clean_up_tokenization_spaces:
        return False
    return (kind.decode, kind._decode) == (Fast.decode, Fast._decode)


def generation_defaults() -> dict[str, Any]:
    """The values of settings that neither generation_config.json nor the caller of `generate` has."""
    from transformers import GenerationConfig

    defaults: dict[str, Any] = GenerationConfig._get_default_generation_params()
    return defaults


def apply_gate(experts: Any, x: Tensor) -> Tensor:
    """The activation of gated experts, from the product with gate_up_proj."""
    gated: Tensor = experts._apply_gate(x)
    return gated


@contextmanager
def without_load_report() -> Iterator[None]:
    """A context without Transformers' messages about tensors that a checkpoint has too many or too few of."""

    def is_other(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in ("LOAD REPORT", "seem corrupted"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def conversion_errors(error: BaseException) -> dict[str, str]:
    """Which parameters Transformers could not make of a checkpoint's tensors, as those of experts, and why. It logs
    that, and raises an exception without it; the report is a variable on the stack.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        errors: dict[str, str] = getattr(frame.f_locals.get("loading_info"), "conversion_errors", None) or {}
        if errors:
            return errors
    return {}
