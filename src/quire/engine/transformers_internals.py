"""Private internals of Transformers. No other file of the engine reads any.

They are those of KNOWN_VERSIONS. `tests/engine/test_transformers_internals.py` compares them with the installed
version, and fails on others until somebody has done so.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KNOWN_VERSIONS = ("5.17", "5.23")
# Threads that copy tensors to a device. Each waits for the pages of a file that it touches.
READERS = 8
# Loads take turns, since they replace a function and a number of a module.
_LOADING = threading.Lock()


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


@contextmanager
def reading_to(device: torch.device) -> Iterator[None]:
    """Let `from_pretrained`, called in this thread within the context, copy each tensor to a device when it is read, so
    that tensors made of several others, or dequantized, are computed there. Transformers does so for a `device_map`,
    which needs accelerate; without one it makes them in the memory of the host.
    """
    from transformers import core_model_loading as loading

    with _LOADING:
        caller = threading.get_ident()
        get_device, readers = loading.get_device, loading.GLOBAL_WORKERS

        def device_of(*args: Any, **options: Any) -> Any:
            return device if threading.get_ident() == caller else get_device(*args, **options)

        loading.get_device, loading.GLOBAL_WORKERS = device_of, READERS
        try:
            yield
        finally:
            loading.get_device, loading.GLOBAL_WORKERS = get_device, readers
