"""Runs language models with continuous batching over a paged cache.

from quire.engine import LLM, SamplingParams
for done in LLM("path/to/checkpoint").generate(["def hello", "import"], SamplingParams(max_tokens=32)):
    print(done.text)
"""

from quire.engine.llm import LLM, Completion, shipped_model
from quire.engine.params import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "shipped_model"]
