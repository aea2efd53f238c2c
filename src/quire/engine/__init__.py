"""Runs language models with continuous batching over a paged cache.

from quire.engine import LLM, SamplingParams
for done in LLM("path/to/checkpoint").generate(["def hello", "import"], SamplingParams(max_tokens=32)):
    print(done.text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.engine.config import EngineConfig
from quire.engine.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.embedding import Embedding, EmbeddingParams
    from quire.engine.llm import LLM, Completion, shipped_model

__all__ = ["LLM", "Completion", "Embedding", "EmbeddingParams", "EngineConfig", "SamplingParams", "shipped_model"]


def __getattr__(name: str) -> Any:
    """Import torch only on first use, since the command line checks its arguments before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.engine import llm

    value = globals()[name] = getattr(llm, name)
    return value
