"""A server whose model has a chat template with tools, for programs of others that speak OpenAI's interface."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

# Without it, LiteLLM downloads a table of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@dataclass(frozen=True)
class Served:
    """The engine, its name, and the URL of its server."""

    llm: object
    url: str

    @property
    def name(self) -> str:
        return self.llm.name

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("fastapi")
    pytest.importorskip("llguidance")
    from helpers.chats import chatting
    from helpers.server import served
    from quire.engine import LLM

    folder = chatting(tmp_path_factory.mktemp("checkpoints") / "hermes", "hermes")
    # The model is not trained for chats, and would never end its reasoning.
    with LLM(folder, num_pages=1000, max_model_len=2048) as llm, served(llm, reasoning_format="none") as url:
        yield Served(llm, url)
