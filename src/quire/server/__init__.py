"""An OpenAI-compatible HTTP server over one engine, by FastAPI and uvicorn; `quire serve` runs it.

from quire.engine import LLM
from quire.server import create_app, serve
with LLM() as llm:
    serve(create_app(llm), port=8000)  # until SIGINT or SIGTERM
"""

from quire.distribution import pip_install

try:
    import fastapi
    import prometheus_client
    import uvicorn
except ImportError as error:
    raise ImportError(f"the server needs FastAPI: {pip_install('server')} ({error})") from error
else:
    del fastapi, prometheus_client, uvicorn

from quire.server.app import create_app
from quire.server.limits import ServerLimits
from quire.server.run import bind, serve

__all__ = ["ServerLimits", "bind", "create_app", "serve"]
