"""An OpenAI-compatible HTTP server over one engine, by FastAPI and uvicorn; `quire serve` runs it.

from quire.server import EngineProcess, create_app, serve
with EngineProcess("path/to/checkpoint") as process:
    serve(create_app(process.connect()), port=8000)  # until SIGINT or SIGTERM
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.server.config import ServerConfig
from quire.server.limits import ServerLimits

if TYPE_CHECKING:
    from quire.server.adapters import allow_adapters
    from quire.server.app import create_app
    from quire.server.engine_client import EngineClient, EngineEnded
    from quire.server.engine_process import EngineProcess
    from quire.server.run import bind, serve

__all__ = [
    "EngineClient",
    "EngineEnded",
    "EngineProcess",
    "ServerConfig",
    "ServerLimits",
    "allow_adapters",
    "bind",
    "create_app",
    "serve",
]
_MODULES = {
    "EngineClient": "engine_client",
    "EngineEnded": "engine_client",
    "EngineProcess": "engine_process",
    "allow_adapters": "adapters",
    "bind": "run",
    "create_app": "app",
    "serve": "run",
}


def __getattr__(name: str) -> Any:
    """Import FastAPI only on first use, since the command line checks its arguments before that."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"quire.server.{_MODULES[name]}")
    except ImportError as error:
        from quire.distribution import pip_install

        raise ImportError(f"the server needs FastAPI: {pip_install('server')} ({error})") from error
    value = globals()[name] = getattr(module, name)
    return value
