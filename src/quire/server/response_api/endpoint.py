"""The endpoint of responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.bodies import JsonRoute
from quire.server.chat import start_chat
from quire.server.encoding import on_one_line
from quire.server.errors import ApiError
from quire.server.response_api.request import ResponsesRequest, renamed
from quire.server.response_api.writer import Event, ResponseWriter
from quire.server.responses import EventStream, while_connected
from quire.server.schemas import ResponseObject, completed
from quire.server.service import Generation, Service

router = APIRouter(route_class=JsonRoute)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@router.post("/v1/responses", responses=completed(ResponseObject))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a text, or items."""
    service: Service = request.app.state.service
    try:
        chat = await start_chat(service, request.app.state.markup, await asyncio.to_thread(body.chat))
    except ApiError as error:
        raise renamed(error) from None
    generation = chat.generation
    writer = ResponseWriter(body, generation.model, generation, chat.message())
    if body.stream:
        return EventStream(_events(generation, writer), generation)
    try:
        done = await while_connected(request.receive, _read(generation, writer))
    finally:
        generation.close()
    # Without a result the client has disconnected, so that nothing is read.
    return Response(_text(writer.whole()), media_type="application/json") if done else Response(status_code=499)


async def _read(generation: Generation, writer: ResponseWriter) -> bool:
    async for _, part in generation.steps():
        for _ in writer.add(part):
            pass
    return True


async def _events(generation: Generation, writer: ResponseWriter) -> AsyncIterator[str]:
    for event in writer.start():
        yield _sent(event)
    try:
        async for _, part in generation.steps():
            for event in writer.add(part):
                yield _sent(event)
        yield _sent(writer.end())
    except ApiError as error:
        yield _sent(writer.fail(error))


def _sent(event: Event) -> str:
    return f"event: {event['type']}\ndata: {_text(event)}\n\n"


def _text(value: dict[str, Any]) -> str:
    """The text of JSON, in which half characters, which a request's fields may have, are escaped."""
    return on_one_line(_encode(value)).encode("utf-8", "backslashreplace").decode()
