"""Answers of a generation: one JSON object, or a stream of server-sent events; both end when the client leaves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine import Completion
from quire.server.errors import ApiError
from quire.server.service import Generation

_T = TypeVar("_T")
_DONE = "data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LEAST = -9999.0  # in place of a log-probability of -inf, which JSON does not have


@dataclass
class Whole:
    """A completion, put together from its parts."""

    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None

    def add(self, part: Completion) -> None:
        self.prompt_token_ids, self.prompt_logprobs = part.prompt_token_ids, part.prompt_logprobs
        self.text += part.text
        self.finish_reason = part.finish_reason
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs or []


class Form(Protocol):
    """How an endpoint writes completions.

    Attributes:
        head: what each object begins with; `chunk_object` is the value of "object" in a stream.
    """

    head: dict[str, Any]
    chunk_object: str

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        """The element of "choices" for a whole completion."""

    def chunk(self, index: int, part: Completion) -> dict[str, Any]:
        """The element of "choices" for a part of a completion; the parts of a completion come in order."""


async def answer(request: Request, generation: Generation, form: Form, stream: bool, usage: bool) -> Response:
    """The response to a request whose completions have been started.

    Args:
        request: of HTTP; its body has been read.
        generation: its completions.
        form: of the answer.
        stream: as server-sent events, the first of which is sent when there is one.
        usage: whether a stream ends with the numbers of tokens.

    Raises:
        ApiError: a completion failed, and the answer is not a stream.
    """
    if stream:
        return _EventStream(_events(generation, form, usage), generation)
    try:
        done = await _while_connected(request.receive, _collect(generation))
    finally:
        generation.close()
    if done is None:
        return Response(status_code=499)  # nobody reads it
    choices = [form.choice(i, whole) for i, whole in enumerate(done)]
    return JSONResponse({**form.head, "choices": choices, "usage": generation.usage()})


def finite(logprob: float) -> float:
    """A log-probability that JSON can have."""
    return max(logprob, _LEAST) if not math.isnan(logprob) else _LEAST


async def _collect(generation: Generation) -> list[Whole]:
    done = [Whole() for _ in range(generation.count)]
    async for i, part in generation:
        done[i].add(part)
    return done


async def _events(generation: Generation, form: Form, usage: bool) -> AsyncIterator[str]:
    head = _encode({**form.head, "object": form.chunk_object}).removesuffix("}")
    none = ',"usage":null' if usage else ""
    begun = set()
    try:
        async for i, part in generation:
            if part.text or part.logprobs or part.finish_reason is not None or i not in begun:
                begun.add(i)
                yield f'data: {head},"choices":[{_encode(form.chunk(i, part))}]{none}}}\n\n'
        if usage:
            yield f'data: {head},"choices":[],"usage":{_encode(generation.usage())}}}\n\n'
    except ApiError as error:
        yield f"data: {_encode(error.body())}\n\n"
    yield _DONE


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """The result of `work`, which is cancelled when the client disconnects: None then."""

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


class _EventStream(Response):
    """Sends events while the client reads them, and closes the generation in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], generation: Generation) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._generation = events, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._send(send))
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
