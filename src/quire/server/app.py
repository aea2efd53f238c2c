"""The application: its endpoints, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.server import chat, completions, embeddings, schemas
from quire.server.adapters import add_models, allow_adapters
from quire.server.bodies import JsonRoute
from quire.server.chat_output.markup import ChatMarkup
from quire.server.counts import Counts
from quire.server.engine_client import EngineClient, attached
from quire.server.errors import ApiError, add_handlers, bad
from quire.server.limits import ServerLimits
from quire.server.middleware import RequestGuard
from quire.server.page import add_page
from quire.server.protocol import DetokenizeRequest, TokenizeRequest
from quire.server.response_api import endpoint
from quire.server.service import Service
from quire.server.unsupported import refuse

if TYPE_CHECKING:
    from quire.engine import LLM


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How an engine is served: the arguments of `create_app`, and others.

    Attributes:
        chat_template: takes the place of the checkpoint's chat template; None: the checkpoint's is used.
        adapter_root: the folder of the adapters that requests may load; None: they may not.
    """

    name: str | Sequence[str] | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    api_key: str | Sequence[str] | None = None
    allowed_origins: Sequence[str] = ()
    metrics_prefix: str = "quire"
    tool_format: str | None = None
    reasoning_format: str | None = None
    chat_template: str | None = None
    adapter_root: Path | None = None


def create_app(
    llm: LLM | EngineClient,
    *,
    name: str | Sequence[str] | None = None,
    limits: ServerLimits | None = None,
    api_key: str | Sequence[str] | None = None,
    allowed_origins: Sequence[str] = (),
    metrics_prefix: str = "quire",
    tool_format: str | None = None,
    reasoning_format: str | None = None,
) -> FastAPI:
    """The ASGI application that serves an engine.

    Args:
        llm: an engine in this process, or the client of one in another (`EngineProcess.connect`); whoever made it
            closes it.
        name: of the model, or several, of which answers have the first; by default that of the engine.
        limits: what requests may ask for.
        api_key: that requests must have as "Authorization: Bearer <key>", or several, of which they must have one;
            None or empty: they need none.
        allowed_origins: of web pages whose scripts may use the server (CORS); "*" for all.
        metrics_prefix: of the metrics' names.
        tool_format, reasoning_format: how the model writes calls and reasoning, by the names that `quire serve` has;
            None: as its chat template says.

    Raises:
        ValueError: a name is empty or that of an adapter, a key is empty or not ASCII, the prefix is not a name, or a
            format is not known.
    """
    options = AppOptions(
        name=name,
        limits=limits or ServerLimits(),
        api_key=api_key,
        allowed_origins=allowed_origins,
        metrics_prefix=metrics_prefix,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
    )
    return app_of(llm if isinstance(llm, EngineClient) else attached(llm), options, Counts())


def app_of(engine: EngineClient, options: AppOptions, counts: Counts) -> FastAPI:
    """The application of one process of a server; see `create_app`.

    Args:
        engine: of the process.
        options: the same in all processes.
        counts: of the server.
    """
    keys, names = _listed(options.api_key), _listed(options.name) or [engine.name]
    _check(engine, options, keys, names)
    if options.chat_template is not None:
        engine.tokenizer.chat_template = options.chat_template
    # The pages that FastAPI has for the OpenAPI document load their scripts from a host on the internet.
    app = FastAPI(title="Quire", version=__version__, responses=schemas.ERRORS, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.service = Service(engine, names, options.limits, counts, options.metrics_prefix)
    app.state.markup = ChatMarkup(engine.tokenizer, options.tool_format, options.reasoning_format)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(endpoint.router)
    app.include_router(embeddings.router)
    add_models(app, app.state.service)
    if options.adapter_root is not None:
        allow_adapters(app, options.adapter_root)
    _add_tokens(app, app.state.service, app.state.markup)
    _add_state(app, app.state.service)
    add_page(app)
    add_handlers(app)
    app.add_middleware(RequestGuard, limits=options.limits, api_keys=keys)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _check(engine: EngineClient, options: AppOptions, keys: list[str], names: list[str]) -> None:
    """Raise the ValueError for options that are wrong; see `create_app`."""
    if not all(key and key.isascii() for key in keys):
        raise ValueError("the API key must be a string of one or more ASCII characters")
    if not all(names):
        raise ValueError(f"name = {options.name!r}: a name of the model must have one or more characters")
    taken = next((info.name for info in engine.adapters if info.name in names), None)
    if taken is not None:
        raise ValueError(f"adapter {taken!r} has a name of the model: requests could not name it")
    if not options.metrics_prefix.isidentifier():
        raise ValueError(f"metrics_prefix = {options.metrics_prefix!r}: it must have letters, digits and _ only")
    if options.chat_template is not None and engine.tokenizer is None:
        raise ValueError(f"chat_template needs a tokenizer, but {engine.info.folder} has none")


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _add_tokens(app: FastAPI, service: Service, markup: ChatMarkup) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt, or of messages."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("prompt", "there must be either a prompt or messages")
        refuse(body.model_extra or {}, special=body.prompt is not None)
        if body.prompt is None:
            tokens = await chat.tokenized(service, markup, body)
        elif body.tools:
            raise bad("tools", "tools belong to messages, and there is a prompt")
        else:
            tokens = await service.encode(body.prompt, "prompt", any_length=True)
        return {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        service.check_model(body.model)
        size = service.engine.info.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
            wrong = next(token for token in body.tokens if not 0 <= token < size)
            raise bad("tokens", f"tokens has {wrong}: tokens are 0 to {size - 1}")
        return {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens)}


def _alive(service: Service) -> dict[str, Any]:
    """The state of a server that accepts requests; an ApiError if it does not."""
    if service.draining or not service.engine.alive:
        raise ApiError(503, "the server is being shut down" if service.draining else "the engine has ended")
    return {"status": "ok"}


def _add_state(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests are accepted; 503 if not."""
        return _alive(service)

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> dict[str, Any]:
        """What /health says, where SageMaker asks for it."""
        return _alive(service)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """The version of Quire."""
        return {"version": __version__}

    @app.get("/load")
    async def load() -> dict[str, Any]:
        """The number of completions that run or wait."""
        return {"server_load": service.running}

    @app.get("/metrics", response_class=Response, responses=schemas.text("Metrics"))
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        await service.engine.state()
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Versions, limits and the engine's state."""
        engine = service.engine
        info, state = engine.info, await engine.state()
        return {
            "version": __version__,
            "model": service.name,
            "max_model_len": info.max_len,
            "max_num_seqs": info.max_num_seqs,
            "vocab_size": info.vocab_size,
            "chat": bool(getattr(engine.tokenizer, "chat_template", None)),
            "device": info.device,
            "dtype": info.dtype,
            "api_processes": service.counts.processes,
            "limits": asdict(service.limits),
            "stats": asdict(state.stats),
        }

    @app.get("/engine_state")
    async def engine_state(after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0) -> dict[str, Any]:
        """The engine at this moment: its counts, its pages, and those of its last 256 steps whose number is larger than
        `after`. Times are seconds since the engine started. A step lasts from its launch until its results have been
        read; on a GPU the next one is launched before that. `started` is another one after a restart.
        """
        state = await service.engine.state(after)
        return {
            "started": service.started,
            "accepts_requests": service.engine.alive and not service.draining,
            "time": state.now,
            "stats": {**asdict(state.stats), "hit_rate": state.stats.hit_rate},
            "steps": [step._asdict() for step in state.steps],
        }
