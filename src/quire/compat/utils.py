"""The helpers of `flashinfer.utils`: enumerations, properties of devices, integer arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from quire.definition.checks import as_dtype, check
from quire.definition.spec import FLOATS8, LOG2E, attention_spec

__all__ = [
    "BackendSupportedError",
    "GPUArchitectureError",
    "LibraryError",
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "canonicalize_torch_dtype",
    "ceil_div",
    "determine_attention_backend",
    "device_support_pdl",
    "get_compute_capability",
    "get_device_sm_count",
    "get_indptr",
    "has_flashinfer_cubin",
    "has_flashinfer_jit_cache",
    "is_fa3_backend_supported",
    "is_fa3_prefill_head_dim_supported",
    "is_float8",
    "is_sm100a_supported",
    "is_sm100f_supported",
    "is_sm110a_supported",
    "is_sm120a_supported",
    "is_sm120f_supported",
    "is_sm121a_supported",
    "is_sm12x_supported",
    "is_sm90a_supported",
    "ln2",
    "log2e",
    "next_positive_power_of_2",
    "round_up",
    "version_at_least",
]


class PosEncodingMode(Enum):
    """FlashInfer's numbers for position encodings."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """FlashInfer's numbers for kinds of masks."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """FlashInfer's numbers for the layouts of keys and values."""

    NHD = 0
    HND = 1


class GPUArchitectureError(Exception):
    """An exception that programs catch; Quire does not raise it."""


class LibraryError(Exception):
    """An exception that programs catch; Quire does not raise it."""


class BackendSupportedError(Exception):
    """An exception that programs catch; Quire does not raise it."""


canonicalize_torch_dtype = as_dtype
log2e, ln2 = LOG2E, 1 / LOG2E


def get_compute_capability(device: torch.device | str) -> tuple[int, int]:
    """The major and minor compute capability of a GPU. ValueError for another device."""
    device = torch.device(device)
    check(device.type == "cuda", "device", str(device), "a CUDA device")
    return torch.cuda.get_device_capability(device)


def _is(major: int, minor: int | None, device: torch.device | str) -> bool:
    """Whether an NVIDIA GPU has this compute capability (None: any minor one). Quire runs on other GPUs, too."""
    capability = get_compute_capability(device)
    return torch.version.hip is None and capability[0] == major and minor in (None, capability[1])


_Predicate = Callable[[torch.device | str], bool]
is_sm90a_supported: _Predicate = partial(_is, 9, None)
is_sm100a_supported: _Predicate = partial(_is, 10, None)
is_sm100f_supported: _Predicate = is_sm100a_supported
is_sm110a_supported: _Predicate = partial(_is, 11, None)
is_sm120a_supported: _Predicate = partial(_is, 12, 0)
is_sm120f_supported: _Predicate = partial(_is, 12, None)
is_sm121a_supported: _Predicate = partial(_is, 12, 1)
is_sm12x_supported: _Predicate = is_sm120f_supported


def device_support_pdl(device: torch.device | str) -> bool:
    """Whether a device has programmatic dependent launch."""
    return torch.device(device).type == "cuda" and torch.version.hip is None and get_compute_capability(device)[0] >= 9


def get_device_sm_count(device: torch.device | str) -> int:
    """The number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_fa3_backend_supported(*args: object, **kwargs: object) -> bool:
    """True: like all of FlashInfer's backends, "fa3" means "auto", which supports every layer that can be planned."""
    return True


def is_fa3_prefill_head_dim_supported(head_dim_qk: int, head_dim_vo: int) -> bool:
    """Whether `AttentionSpec` admits these head sizes."""
    try:
        attention_spec(num_qo_heads=1, num_kv_heads=1, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo)
    except ValueError:
        return False
    return True


def determine_attention_backend(*args: object, **kwargs: object) -> str:
    """Always "fa2", which means "auto" here: `plan` chooses the kernel family."""
    return "fa2"


def has_flashinfer_jit_cache() -> bool:
    """True: no operation needs a build before it is called."""
    return True


has_flashinfer_cubin = has_flashinfer_jit_cache


def is_float8(x: Tensor) -> bool:
    """Whether a tensor holds 8-bit floating-point numbers."""
    return x.dtype in FLOATS8


def get_indptr(x: Tensor) -> Tensor:
    """The indptr of segments with these lengths, int64 [len(x) + 1]."""
    return torch.cat([x.new_zeros(1, dtype=torch.int64), x.long().cumsum(0)])


def ceil_div(x: int, y: int) -> int:
    """The quotient x / y, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The smallest multiple of y that is at least x."""
    return ceil_div(x, y) * y


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of 2 that is at least x; 1 if x is not positive."""
    return 1 << max(x - 1, 0).bit_length()


def version_at_least(version: str, base_version: str) -> bool:
    """Whether a version is base_version or a later one."""
    return TorchVersion(version) >= TorchVersion(base_version)
