"""How much a body of JSON may hold, checked before it is parsed: parsing a million small lists takes a second, in which
the server does nothing else.
"""

from __future__ import annotations

import re

from quire.server.errors import bad
from quire.server.limits import ServerLimits

# Bodies up to this size are parsed in milliseconds.
_SMALL = 1 << 16
# A string, or what is left of the body if the string does not end: otherwise each of its quotes would be tried as a
# beginning.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)


def check_body(body: bytes, limits: ServerLimits) -> None:
    """Raise the ApiError for a body of more values than the limits allow. What is no JSON is not refused here."""
    # These bounds include what is within strings, and most bodies are below the limits all the same.
    if len(body) <= _SMALL or (_fits(body, limits) and body.count(b'"') // 2 <= limits.max_strings):
        return
    outside, end = [], 0
    for count, string in enumerate(_STRING.finditer(body), 1):
        if count > limits.max_strings:
            raise _too_many("strings", limits.max_strings)
        outside.append(body[end : string.start()])
        end = string.end()
    outside.append(body[end:])
    rest = b"".join(outside)
    if _containers(rest) > limits.max_containers:
        raise _too_many("lists and objects", limits.max_containers)
    if rest.count(b",") > limits.max_values:
        raise _too_many("values", limits.max_values)


def _fits(text: bytes, limits: ServerLimits) -> bool:
    return _containers(text) <= limits.max_containers and text.count(b",") <= limits.max_values


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _too_many(what: str, most: int) -> Exception:
    return bad(None, f"the body has more than {most} {what}, which are the most", "body_too_large")
