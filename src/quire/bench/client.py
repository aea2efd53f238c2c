"""What clients of OpenAI's interface over HTTP share: the connection, the model's name, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx


class Refused(RuntimeError):
    """A request that failed.

    Attributes:
        kind: what went wrong, in words that are the same for all such failures: "HTTP 429", "no connection".
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind


def connected(url: str, api_key: str | None) -> httpx.AsyncClient:
    """A client of the server at `url`, with or without /v1 at its end. It opens as many connections as it has requests,
    so that none waits in it, and waits for answers without a limit of its own.

    Raises:
        ValueError: `url` is not one of HTTP.
    """
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ValueError(f"--url {url}: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"--url {url}: it must be like http://127.0.0.1:8000")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=30))


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the first model that the server lists at /v1/models.

    Raises:
        Refused: it lists none, or does not answer.
    """
    return (await _listed(client))[0][0]


async def adapters(client: httpx.AsyncClient) -> list[str]:
    """The names of the adapters that the server lists at /v1/models: those with a parent.

    Raises:
        Refused: it lists nothing, or does not answer.
    """
    return [name for name, parent in await _listed(client) if parent is not None]


async def _listed(client: httpx.AsyncClient) -> list[tuple[str, str | None]]:
    """The names of the models at /v1/models, at least one, and of their parents."""
    try:
        answer = await client.get("/v1/models", timeout=30)
        _accepted(answer)
        models = [(str(model["id"]), model.get("parent")) for model in answer.json()["data"]]
        if not models:
            raise LookupError
        return models
    except httpx.HTTPError as error:
        raise Refused(kind_of(error), f"{client.base_url} ({error})") from error
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Refused("no models", f"{client.base_url} lists none at /v1/models; name one") from None


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a stream of server-sent events, each as soon as it is there.

    Raises:
        Refused: the server answers with an error or sends one, or the stream ends before [DONE].
    """
    done = False
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
            _accepted(answer)
            # Lines end with a line feed. httpx would also split them at separators that JSON may contain.
            rest = b""
            async for part in answer.aiter_bytes():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    if line[5:].strip() == b"[DONE]":
                        # The rest is read, so that the connection can be used again.
                        done = True
                    elif not done:
                        yield _event(line[5:])
    except httpx.HTTPError as error:
        if not done:
            raise Refused(kind_of(error), str(error)) from error
    if not done:
        raise Refused("stream cut off", "it ended before [DONE]")


def _event(text: bytes) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Refused("broken event", repr(text[:100]))
    if event.get("error"):
        raise Refused("error in the stream", _message(event))
    return event


def _accepted(answer: httpx.Response) -> None:
    """Raise the error of an answer, which has been read if its status is one of an error."""
    if answer.status_code != 200:
        try:
            message = _message(answer.json())
        except ValueError:
            message = answer.text
        raise Refused(f"HTTP {answer.status_code}", message[:500])


def _message(body: Any) -> str:
    """The message of an error in OpenAI's form, or else all of it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def kind_of(error: httpx.HTTPError) -> str:
    """The kind of a failure below HTTP."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no connection"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return "connection lost"
    return type(error).__name__
