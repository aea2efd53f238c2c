"""The ingress: takes HTTP requests, hands each to a replica, and sends its answer on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import anyio
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from quire.integrations.ray.settings import Settings
from quire.server.errors import ApiError, add_handlers
from quire.server.middleware import RequestGuard

# The fields of a request's scope that a replica gets.
_SCOPE = ("type", "method", "scheme", "path", "root_path", "query_string", "headers")
# The seconds that replicas have to report their metrics.
_METRICS_TIMEOUT = 5.0


class Ingress:
    """Speaks HTTP for the replicas of an engine.

    Args:
        engine: the deployment with the replicas.
        settings: of the application.
    """

    def __init__(self, engine: DeploymentHandle, settings: Settings) -> None:
        self._engine, self._settings = engine, settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._settings
        # The document is that of a replica.
        app = FastAPI(openapi_url=None)
        app.router.routes = [
            Route("/metrics", self._metrics),
            Route("/{path:path}", _Forward(self._engine, settings)),
        ]
        add_handlers(app)
        app.add_middleware(
            RequestGuard, limits=settings.limits, api_keys=() if settings.api_key is None else (settings.api_key,)
        )
        if settings.allowed_origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
            )
        return app

    async def _metrics(self, request: Request) -> Response:
        """Metrics of all replicas, with a label that names the replica."""
        reports = self._engine.broadcast("metrics").results_async(timeout_s=_METRICS_TIMEOUT, return_exceptions=True)
        try:
            found = [report for report in await reports if not isinstance(report, BaseException)]
        except (DeploymentUnavailableError, TimeoutError) as error:
            raise _no_replica("no replica reports its metrics") from error
        return Response(generate_latest(_Merged(found)), media_type=CONTENT_TYPE_LATEST)


class _Merged(Collector):
    """The metrics of several replicas as one."""

    def __init__(self, reports: list[tuple[str, list[Metric]]]) -> None:
        self._reports = reports

    def collect(self) -> list[Metric]:
        merged: dict[str, Metric] = {}
        for replica, metrics in self._reports:
            for metric in metrics:
                whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                whole.samples += [s._replace(labels={**s.labels, "replica": replica}) for s in metric.samples]
        return list(merged.values())


class _Forward:
    """The ASGI application that hands requests on."""

    def __init__(self, engine: DeploymentHandle, settings: Settings) -> None:
        self._engine = engine.options(method_name="answer", stream=True)
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        key = affinity(body, self._settings.prefix_length)
        engine = self._engine.options(session_id=key) if key else self._engine
        head = {name: scope[name] for name in _SCOPE if name in scope}
        answer = _Answer(send)
        for attempt in range(1, self._settings.max_tries + 1):
            try:
                await self._pass_on(engine.remote(head, body), answer, attempt)
                return
            except (RayTaskError, TaskCancelledError):
                # Another replica would have the same error, or the client has disconnected.
                raise
            except RayError as error:
                lost: RayError = error
                if answer.begun:
                    break
        await answer.fail(
            ApiError(503, f"the replica of this request is lost: {type(lost).__name__}", code="replica_lost")
        )

    async def _pass_on(self, parts: Any, answer: _Answer, attempt: int) -> None:
        """Send on what a replica answers.

        Raises:
            ApiError: no replica took the request.
            RayError: the replica is lost.
        """
        seconds = self._settings.queue_timeout
        try:
            with anyio.fail_after(seconds):
                replica = await anext(parts)
            about = [(b"x-replica", replica.encode()), (b"x-attempt", str(attempt).encode())]
            async for messages in parts:
                for message in messages:
                    await answer.pass_on(message, about)
        except BackPressureError:
            message = f"{self._settings.max_queued_requests} requests are waiting for a replica, which are the most"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
        except TimeoutError:
            raise _no_replica(f"no replica took the request within {seconds:g} s") from None
        except DeploymentUnavailableError:
            raise _no_replica("the replicas could not be started") from None
        finally:
            parts.cancel()


class _Answer:
    """An answer on its way to the client. Nothing is sent before the first part of the body arrives, so that the
    request can be sent to another replica until then.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._events = False
        self.begun = False

    async def pass_on(self, message: Message, about: list[tuple[bytes, bytes]]) -> None:
        """Send a message of the answer. `about`: headers that are added to those of the answer."""
        if message["type"] == "http.response.start":
            headers = [*message["headers"], *about]
            self._events = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
            self._start = {**message, "headers": headers}
            return
        if not self.begun:
            assert self._start is not None
            self.begun = True
            await self._send(self._start)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send the error to the client, as the last event if a stream has begun.

        Raises:
            ApiError: nothing has been sent, or a body that cannot be completed.
        """
        if not (self.begun and self._events):
            raise error
        event = f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": event.encode(), "more_body": False})


def affinity(body: bytes, length: int) -> str | None:
    """A hash that is equal for requests whose prompts begin alike; None if there is no prompt.

    If a request has a `prompt_cache_key`, that is hashed. Of a chat, the messages up to the first one of the user are
    hashed, so that all turns of a conversation have the same hash.

    Args:
        body: the body of a request.
        length: the number of characters of text that are hashed; of token ids, a quarter of that number.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        # The replica answers such a body with an error.
        return None
    start = _beginning(request, length) if isinstance(request, dict) else None
    return hashlib.blake2b(json.dumps(start).encode(), digest_size=16).hexdigest() if start else None


def _beginning(request: dict[str, Any], length: int) -> Any:
    """The part of a request that `affinity` hashes, if any; the replica checks what it is made of."""
    key, messages, prompt = (request.get(name) for name in ("prompt_cache_key", "messages", "prompt"))
    if isinstance(key, str) and key:
        return {"key": key}
    if messages is None and prompt is None:
        # Requests of the Responses API have items, some of which are messages, or the text of one message. Other
        # requests with `input` have prompts there.
        given, instructions = request.get("input"), request.get("instructions")
        if isinstance(instructions, str) or (isinstance(given, list) and given and isinstance(given[0], dict)):
            items = given if isinstance(given, list) else [{"role": "user", "content": given}]
            messages = [{"role": "system", "content": instructions}, *items]
        prompt = given
    if isinstance(messages, list):
        chat = [message for message in messages if isinstance(message, dict)]
        first = next((i for i, message in enumerate(chat) if message.get("role") == "user"), len(chat))
        return "".join(f"{message.get('role')} {message.get('content')}\n" for message in chat[: first + 1])[:length]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        # The first of several prompts decides.
        prompt = prompt[0]
    if isinstance(prompt, list):
        return prompt[: length // 4]
    return prompt[:length] if isinstance(prompt, str) else None


def _no_replica(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "10"})
