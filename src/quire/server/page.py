"""The page at /: plain HTML, CSS and JavaScript that use the server as any other client does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    "/": "page.html",
    **{f"/static/{name}": name for name in ("page.css", "api.js", "prompt.js", "engine.js", "chart.js", "icon.svg")},
}
# The files of the page, which everybody may read: they have no data.
PATHS = tuple(_FILES)

# Browsers run and load only what this server sends, and no other page may frame this one.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page and its files, which are not part of the interface that /openapi.json describes."""
    for path, name in _FILES.items():
        app.add_route(path, _endpoint(name), methods=["GET"], include_in_schema=False)


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    body, kind = (_FOLDER / name).read_bytes(), _TYPES[Path(name).suffix]

    async def file(request: Request) -> Response:
        return Response(body, headers=_HEADERS, media_type=kind)

    return file
