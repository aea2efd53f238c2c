"""Private internals of Transformers. No other file of the engine reads any.

They are those of KNOWN_VERSIONS. `tests/engine/test_transformers_internals.py` compares them with the installed
version, and fails on others until somebody has done so.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.engine.pinned_copy import PinnedCopies

KNOWN_VERSIONS = ("5.17", "5.23")
# Threads that copy tensors to a device.
READERS = 8
# Loads take turns, since they replace functions and a number of a module.
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


def conversions_of_parts(
    conversions: Sequence[Any], parts: Mapping[str, Sequence[str]], read: Callable[[Sequence[Any]], Any]
) -> list[Any]:
    """Conversions for a checkpoint that has several tensors for each weight.

    Args:
        conversions: those of the model, for a checkpoint that has one tensor for each weight.
        parts: for each weight that may have several tensors, by the end of its name, the ends of the tensors' names.
        read: makes the operation that reads these tensors, given the operations that the weight itself passes through.

    Returns:
        conversions whose patterns of names end in "$", since in 5.17 a pattern matches the beginning of a name, too.
        Those of one tensor that becomes several weights are unchanged, since Transformers has no conversion of several
        tensors to several weights. Such a tensor cannot be quantized.
    """
    from transformers.core_model_loading import WeightConverter

    updated = []
    for conversion in conversions:
        names = [source.removesuffix("$") for source in conversion._original_source_patterns]
        last = names[0].rpartition(".")[2]
        is_one = len(conversion._original_target_patterns) == 1
        is_weight = last in parts and all(name.endswith(f".{last}") for name in names)
        if isinstance(conversion, WeightConverter) and is_one and is_weight:
            patterns = [f"{name.removesuffix(last)}{part}$" for name in names for part in parts[last]]
            source, operations = conversion, [read(conversion.operations)]
            conversion = WeightConverter(patterns, source._original_target_patterns, operations)
            conversion.scope_prefix, conversion.base_model_prefix = source.scope_prefix, source.base_model_prefix
        updated.append(conversion)
    others = [WeightConverter([f"{name}$" for name in names], weight, [read([])]) for weight, names in parts.items()]
    return updated + others


@contextmanager
def reading_to(device: torch.device) -> Iterator[None]:
    """Let `from_pretrained`, called in this thread within the context, read tensors as Quire needs them.

    It copies each to a device when it is read, so that tensors made of several others, or dequantized, are computed
    there. Transformers does so for a `device_map`, which needs accelerate; without one it makes them in the memory of
    the host. On the CPU, it reads as it does anyway. Tensors of fp8, which 5.17 casts to the dtype of the weight, stay
    as they are.
    """
    from transformers import core_model_loading as loading

    from quire.engine.pinned_copy import PinnedCopies

    with _LOADING:
        caller = threading.get_ident()
        get_device, materialize = loading.get_device, loading.spawn_materialize
        readers = loading.GLOBAL_WORKERS
        copy = PinnedCopies(device) if device.type == "cuda" else None

        def device_of(*args: Any, **options: Any) -> Any:
            return device if threading.get_ident() == caller else get_device(*args, **options)

        def start_reading(pool: Any, tensor: Any, target: Any, dtype: Any, **options: Any) -> Any:
            if threading.get_ident() != caller:
                return materialize(pool, tensor, target, dtype, **options)
            dtype = None if _is_fp8(tensor) else dtype
            # Some large tensors stay on the host until they are converted.
            read = _CopiedSlice(tensor, copy) if copy is not None and target == device else tensor
            return materialize(pool, read, target, dtype, **options)

        loading.spawn_materialize = start_reading
        if device.type != "cpu":
            loading.get_device, loading.GLOBAL_WORKERS = device_of, READERS
        try:
            yield
        finally:
            loading.get_device, loading.spawn_materialize = get_device, materialize
            loading.GLOBAL_WORKERS = readers


class _CopiedSlice:
    """A tensor of a file that is not read yet, whose parts are on a GPU when they are read."""

    def __init__(self, tensor: Any, copy: PinnedCopies) -> None:
        self._tensor, self._copy = tensor, copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._copy(self._tensor[index])


def _is_fp8(tensor: Any) -> bool:
    """Whether a tensor, or one of a file that is not read yet, is of float8_e4m3fn."""
    import torch

    dtype = tensor.get_dtype() if hasattr(tensor, "get_dtype") else tensor.dtype
    return dtype in ("F8_E4M3", torch.float8_e4m3fn)
