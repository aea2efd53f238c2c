"""Answers of a generation: one JSON object, or a stream of server-sent events; both end when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine import Completion
from quire.server.encoding import encode, in_thread, pieces
from quire.server.errors import ApiError
from quire.server.protocol import SamplingBody
from quire.server.service import Generation

_T = TypeVar("_T")
_DONE = "data: [DONE]\n\n"


class ResponseFormatter(Protocol):
    """How an endpoint writes completions.

    Attributes:
        head: what each object begins with; `chunk_object` is the value of "object" in a stream.
    """

    head: dict[str, Any]
    chunk_object: str

    def choice(self, index: int, whole: Completion) -> dict[str, Any]:
        """The element of "choices" for a whole completion. Lists of reports may be iterators."""

    def chunk(self, index: int, part: Completion, first: bool) -> dict[str, Any] | None:
        """The element of "choices" for a part of a completion; the parts of a completion come in order. None if a later
        one has what the part adds.
        """

    def beside(self, part: Completion, whole: bool) -> dict[str, Any]:
        """What is beside "choices" for a prompt: of whole completions, or of the first part of one."""


async def answer(
    request: Request, generation: Generation, formatter: ResponseFormatter, body: SamplingBody
) -> Response:
    """The response to a request whose completions have been started.

    Args:
        request: of HTTP; its body has been read.
        generation: its completions.
        formatter: makes the choices of the response.
        body: says whether it is a stream of server-sent events, the first of which is sent when there is one, and what
            they have.

    Raises:
        ApiError: a completion failed, and the answer is not a stream.
    """
    if body.stream:
        return EventStream(_events(generation, formatter, body), generation)
    try:
        done = await while_connected(request.receive, _collect(generation))
    finally:
        generation.close()
    if done is None:
        # The client has disconnected, so this is not read.
        return Response(status_code=499)
    if any(whole.logprobs or whole.prompt_logprobs for whole in done):
        content = await in_thread(_content, generation, formatter, done)
    else:
        content = _content(generation, formatter, done)
    return Response(content, media_type="application/json")


def _content(generation: Generation, formatter: ResponseFormatter, done: Sequence[Completion]) -> bytes:
    """The body of the answer with whole completions."""
    choices = [formatter.choice(i, whole) for i, whole in enumerate(done)]
    beside = formatter.beside(done[0], whole=True)
    return "".join(pieces({**formatter.head, **beside, "choices": choices, "usage": generation.usage()})).encode()


async def _collect(generation: Generation) -> list[Completion]:
    parts: list[list[Completion]] = [[] for _ in range(generation.count)]
    async for i, part in generation:
        parts[i].append(part)
    return [_whole(own) for own in parts]


def _whole(parts: Sequence[Completion]) -> Completion:
    """A completion, put together from its parts."""
    tokens = [token for part in parts for token in part.token_ids]
    logprobs = [report for part in parts for report in part.logprobs or ()]
    return replace(parts[-1], text="".join(part.text for part in parts), token_ids=tokens, logprobs=logprobs)


async def _events(generation: Generation, formatter: ResponseFormatter, body: SamplingBody) -> AsyncIterator[str]:
    head = encode({**formatter.head, "object": formatter.chunk_object}).removesuffix("}")
    usage, each = body.includes_usage, body.includes_each_usage
    none, tokens = ',"usage":null' if usage else "", [0] * generation.count
    begun = set()
    try:
        async for i, part in generation:
            tokens[i] += len(part.token_ids)
            first = i not in begun
            silent = not (part.text or part.logprobs or part.finish_reason is not None or first)
            if silent and not (part.token_ids and (each or body.return_token_ids)):
                continue
            begun.add(i)
            if first and part.prompt_logprobs:
                # It may report all tokens of a long prompt.
                chunk = await in_thread(_chunk, formatter, i, part, first)
            else:
                chunk = _chunk(formatter, i, part, first)
            if chunk is None:
                continue
            rest = none
            if each:
                rest = f',"usage":{encode(generation.usage_of(i, tokens[i]))}'
            if first and (beside := formatter.beside(part, whole=False)):
                rest = f",{encode(beside)[1:-1]}{rest}"
            yield f'data: {head},"choices":[{chunk}]{rest}}}\n\n'
        if usage:
            yield f'data: {head},"choices":[],"usage":{encode(generation.usage())}}}\n\n'
    except ApiError as error:
        yield f"data: {encode(error.body())}\n\n"
    yield _DONE


def _chunk(formatter: ResponseFormatter, index: int, part: Completion, first: bool) -> str | None:
    """The element of "choices" for a part of a completion, in JSON; None if there is none."""
    chunk = formatter.chunk(index, part, first)
    if chunk is None:
        return None
    return "".join(pieces(chunk)) if first or part.logprobs else encode(chunk)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
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


class EventStream(Response):
    """Sends events while the client reads them, and closes the generation in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], generation: Generation) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._generation = events, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
