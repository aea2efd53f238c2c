"""A replica: an engine and its HTTP application, in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from prometheus_client.core import Metric
from ray import serve
from starlette.types import Message, Scope

from quire.engine import LLM
from quire.integrations.ray.settings import Settings
from quire.server import create_app

_log = logging.getLogger("ray.serve")


class Replica:
    """Answers HTTP requests that an ingress hands on, with the application of `quire.server`.

    Args:
        settings: of the application.
    """

    def __init__(self, settings: Settings) -> None:
        self._llm = LLM(settings.model, adapters=settings.adapters, **settings.engine)
        self._app = create_app(
            self._llm,
            name=settings.served_model_name,
            limits=settings.limits,
            metrics_prefix=settings.metrics_prefix,
            tool_format=settings.tool_format,
            reasoning_format=settings.reasoning_format,
        )
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[str | list[Message]]:
        """First this replica's name, at once; then the ASGI messages of the answer, as many as there are each time.

        Leaving the loop, or cancelling the call, cancels the request's completions.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left = [body]

        async def receive() -> Message:
            if not left:
                # The call is cancelled when the client disconnects.
                await asyncio.Event().wait()
            return {"type": "http.request", "body": left.pop(), "more_body": False}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            except Exception:
                # The error has been answered, and is raised for the log.
                _log.exception("a request failed")
            finally:
                messages.put_nowait(None)

        yield self._name
        task = asyncio.create_task(run())
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                yield [message for message in batch if message is not None]
        finally:
            task.cancel()

    async def metrics(self) -> tuple[str, list[Metric]]:
        """This replica's name, and its metrics."""
        await self._app.state.service.engine.state()
        return self._name, list(self._app.state.service.metrics.registry.collect())

    def check_health(self) -> None:
        """Raise, so that Ray replaces this replica, if its engine has ended."""
        if not self._llm.alive:
            raise RuntimeError("the engine has ended")
