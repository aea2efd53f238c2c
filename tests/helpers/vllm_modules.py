"""The modules of vLLM that the plug-in imports: those of the installed package, or stand-ins with their interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest

T = TypeVar("T")


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend:
    pass


class AttentionMetadata:
    pass


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionImpl(Generic[T]):
    pass


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool = False) -> None:
        speculative = self.vllm_config.speculative_config
        more = speculative.num_speculative_tokens if speculative and supports_spec_as_decode else 0
        self.reorder_batch_threshold = threshold + more


class AttentionBackendEnum(Enum):
    CUSTOM = ""


REGISTERED: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    REGISTERED[backend] = class_path


INSTALLED = find_spec("vllm") is not None
_CONTENTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {
        "AttentionBackend": AttentionBackend,
        "AttentionCGSupport": AttentionCGSupport,
        "AttentionImpl": AttentionImpl,
        "AttentionMetadata": AttentionMetadata,
        "AttentionMetadataBuilder": AttentionMetadataBuilder,
        "MultipleOf": MultipleOf,
    },
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: SETTINGS["layout"]},
}
SETTINGS = {"layout": "NHD"}


@contextmanager
def vllm_modules() -> Iterator[None]:
    """Let vLLM's modules be imported: the stand-ins where it is not installed, which are gone afterwards."""
    made: dict[str, ModuleType] = {}
    for name, names in ({} if INSTALLED else _CONTENTS).items():
        module = made[name] = ModuleType(name)
        module.__path__ = []  # a package, whose submodules may be imported
        vars(module).update(names)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        yield
