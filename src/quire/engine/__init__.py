"""Runs language models with continuous batching over a paged cache.

from quire.engine import LLM, SamplingParams
for done in LLM("path/to/checkpoint").generate(["def hello", "import"], SamplingParams(max_tokens=32)):
    print(done.text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.engine.completion import Completion
from quire.engine.config import EngineConfig
from quire.engine.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.embedding import Embedding, EmbeddingParams
    from quire.engine.llm import LLM, shipped_model

__all__ = ["LLM", "Completion", "Embedding", "EmbeddingParams", "EngineConfig", "SamplingParams", "shipped_model"]


def __getattr__(name: str) -> Any:
    """Import torch and NumPy only on first use, since the command line checks its arguments before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "embedding" if name in ("Embedding", "EmbeddingParams") else "llm"
    value = globals()[name] = getattr(import_module(f"quire.engine.{module}"), name)
    return value
