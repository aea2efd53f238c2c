"""An OpenAI-compatible HTTP server over one engine, by FastAPI and uvicorn; `quire serve` runs it.

from quire.engine import LLM
from quire.server import create_app, serve
with LLM() as llm:
    serve(create_app(llm), port=8000)  # until SIGINT or SIGTERM
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.server.config import ServerConfig
from quire.server.limits import ServerLimits

if TYPE_CHECKING:
    from quire.server.app import create_app
    from quire.server.run import bind, serve

__all__ = ["ServerConfig", "ServerLimits", "bind", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    """Import FastAPI only on first use, since the command line checks its arguments before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from quire.server import app, run
    except ImportError as error:
        from quire.distribution import pip_install

        raise ImportError(f"the server needs FastAPI: {pip_install('server')} ({error})") from error
    value = globals()[name] = getattr(app if name == "create_app" else run, name)
    return value
