"""The functions of `flashinfer.jit` that build FlashInfer's kernels ahead of time. They do nothing.

Functions that build a program's own kernels are not provided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.page import get_batch_indices_positions

_NAMES = (
    "gen_act_and_mul_module",
    "gen_batch_attention_module",
    "gen_batch_decode_module",
    "gen_batch_mla_module",
    "gen_batch_pod_module",
    "gen_batch_prefill_attention_sink_module",
    "gen_batch_prefill_module",
    "gen_cascade_module",
    "gen_norm_module",
    "gen_page_module",
    "gen_pod_module",
    "gen_quantization_module",
    "gen_rope_module",
    "gen_sampling_module",
    "gen_single_decode_module",
    "gen_single_prefill_module",
)
__all__ = [  # noqa: PLE0604
    *_NAMES,
    "JitSpec",
    "MissingJITCacheError",
    "attention_sink_decl",
    "build_jit_specs",
    "filename_safe_dtype_map",
    "get_page_module",
]

filename_safe_dtype_map = {x: str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}
# FlashInfer has C++ sources here, of which only the names are needed.
attention_sink_decl = {"fa2": "AttentionSink", "fa3": "AttentionSink"}


@dataclass(frozen=True)
class JitSpec:
    """A kernel to build, of which Quire has the name alone."""

    name: str


class MissingJITCacheError(RuntimeError):
    """An exception with a `spec`, for programs that catch it; Quire does not raise it."""

    def __init__(self, message: str, spec: JitSpec | None = None) -> None:
        super().__init__(message)
        self.spec = spec


def _spec(name: str, *args: Any, **kwargs: Any) -> JitSpec:
    texts = (str(filename_safe_dtype_map.get(x, x)) for x in (*args, *kwargs.values()))
    return JitSpec("_".join([name.removeprefix("gen_"), *texts]))


def build_jit_specs(specs: Iterable[JitSpec], verbose: bool = False, skip_prebuilt: bool = True) -> None:
    """Does nothing."""


def get_page_module() -> SimpleNamespace:
    """The compiled module behind `flashinfer.page`, of which programs call one function directly."""
    return SimpleNamespace(get_batch_indices_positions=_get_batch_indices_positions)


def _get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, batch_indices: Tensor, positions: Tensor
) -> None:
    get_batch_indices_positions(append_indptr, seq_lens, len(batch_indices), batch_indices, positions)


def __getattr__(name: str) -> Callable[..., JitSpec]:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_spec, name)
