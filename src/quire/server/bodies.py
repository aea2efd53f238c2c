"""Bodies of JSON: how much they may hold, and how they are parsed.

The event loop does nothing else while it parses a body. Parsing a million small lists takes a second, so the number of
lists, objects, strings and values is checked before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import bad
from quire.server.limits import ServerLimits

# Bodies up to this size are parsed in milliseconds.
_SMALL = 1 << 16
# A string, or what is left of the body if the string does not end: otherwise each of its quotes would be tried as a
# beginning.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)


class JsonRoute(APIRoute):
    """A route that parses large bodies by msgspec, in a quarter of the time that `json` takes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _SMALL:
            return await super().json()
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


def check_body(body: bytes, limits: ServerLimits) -> None:
    """Raise the ApiError for a body of more values than the limits allow. What is no JSON is not refused here."""
    # These bounds include what is within strings, and most bodies are below the limits all the same.
    if len(body) <= _SMALL or (_fits(body, limits) and body.count(b'"') // 2 <= limits.max_strings):
        return
    rest, count = _STRING.subn(b"", body, limits.max_strings + 1)
    if count > limits.max_strings:
        raise _too_many("strings", limits.max_strings)
    if _containers(rest) > limits.max_containers:
        raise _too_many("lists and objects", limits.max_containers)
    if rest.count(b",") > limits.max_values:
        raise _too_many("values", limits.max_values)


def _fits(text: bytes, limits: ServerLimits) -> bool:
    return _containers(text) <= limits.max_containers and text.count(b",") <= limits.max_values


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _too_many(what: str, allowed: int) -> Exception:
    return bad(None, f"the body has more than {allowed} {what}, which are the most", "body_too_large")
