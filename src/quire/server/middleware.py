"""What every request passes before the application: the key, and bounds of its body's size and time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.bodies import check_body
from quire.server.errors import ApiError
from quire.server.limits import ServerLimits
from quire.server.page import PATHS

# These paths are served without the key.
_OPEN = ("/health", "/ping", "/openapi.json", *PATHS)
# A body that is too large is read up to this many times the largest size before the connection is closed.
_DROPPED = 4


class RequestGuard:
    """Refuses requests without the key, and reads bodies, which are small, before the application sees them.

    Args:
        app: the application.
        limits: max_body and body_timeout.
        api_keys: of which requests must have one as "Authorization: Bearer <key>"; empty: they need none.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits, api_keys: Sequence[str]) -> None:
        self._app, self._limits = app, limits
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(Request(scope))
            with anyio.fail_after(self._limits.body_timeout):
                body = await self._read(Request(scope), receive)
            check_body(body or b"", self._limits)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except TimeoutError:
            message = f"the body did not arrive within {self._limits.body_timeout:g} s"
            await ApiError(408, message, headers={"Connection": "close"}).response()(scope, receive, send)
            return
        if body is None:
            return
        left = [body]

        async def replay() -> Message:
            return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, request: Request) -> None:
        if not self._keys or request.url.path in _OPEN:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1")
        # All keys are compared, so that the time does not depend on which one it is.
        right = [hmac.compare_digest(key, own) for own in self._keys]
        if not any(right) or scheme.lower() != "bearer":
            message = "the API key is missing or wrong: it belongs into the header Authorization: Bearer <key>"
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _read(self, request: Request, receive: Receive) -> bytes | None:
        """The body; None if the client disconnects. If the body is too large, some more of it is read and dropped,
        since clients that are still sending when the connection is closed do not see the answer.
        """
        max_size = self._limits.max_body
        announced = request.headers.get("content-length", "")
        size, parts = int(announced) if announced.isdecimal() and len(announced) <= 20 else 0, []
        more, arrived = True, 0
        while more and max(size, arrived) <= _DROPPED * max_size:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            arrived += len(part)
            if max(size, arrived) <= max_size:
                parts.append(part)
            more = message.get("more_body", False)
        if max(size, arrived) > max_size:
            message_text = f"the body has more than {max_size} bytes, which are the most"
            raise ApiError(413, message_text, code="body_too_large", headers={"Connection": "close"})
        return b"".join(parts)
