"""Errors in the form of OpenAI's interface: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

_TEXTS = "a string, a list of token ids, or a list of either"
_KINDS = {
    "prompt": _TEXTS,
    "input": _TEXTS,
    "stop": "a string, or a list of strings",
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: of HTTP.
        message: for people.
        param: the field of the request that is wrong, if one is.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code, self.headers = code, headers

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # The message may quote half a character of the request.
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The error for a field that is wrong."""
    return ApiError(400, message, param, code)


def invalid(error: ValueError, param: str | None = None) -> ApiError:
    """The error for a ValueError of the engine, whose message may begin with "name = " or "name has "."""
    named = re.match(r"(\w+) (?:=|has) ", str(error))
    return bad(named[1] if named else param, str(error))


def add_handlers(app: FastAPI) -> None:
    """Answer all errors of an application in OpenAI's form."""

    async def ours(request: Request, error: Any) -> JSONResponse:
        return error.response()

    async def validation(request: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            message, where = f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", []
        elif not where:
            message = f"the body must be a JSON object, with Content-Type: application/json ({first['msg']})"
        elif where[0] in _KINDS and len(where) > 1:
            # This is a mismatch with one of several types.
            message = f"{where[0]} must be {_KINDS[where[0]]}"
        else:
            message = f"{'.'.join(where)}: {first['msg']}"
        return bad(where[0] if where else None, message).response()

    async def http(request: Request, error: Any) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    async def other(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"{type(error).__name__}: {error}").response()

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, other)
