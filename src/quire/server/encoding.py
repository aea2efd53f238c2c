"""JSON of large answers, made without keeping other requests waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

_T = TypeVar("_T")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
# Characters that end a line for some clients that read streams by lines. JSON has them in strings alone.
_LINE_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})
# Elements of a list that one call encodes.
_SLICE = 64
_writers = ThreadPoolExecutor(2, "quire-writers")


def encode(value: Any) -> str:
    """The JSON of a value, on one line."""
    return on_one_line(_encode(value))


def on_one_line(text: str) -> str:
    """JSON without line ends of Unicode, which are escaped."""
    return text if text.isascii() else text.translate(_LINE_ENDS)


async def in_thread(function: Callable[..., _T], *args: Any) -> _T:
    """The result of a function that makes a large answer, in one of a few threads. The event loop goes on meanwhile, as
    long as no single call of a C function takes long.
    """
    return await asyncio.get_running_loop().run_in_executor(_writers, function, *args)


def pieces(value: Any) -> Iterator[str]:
    """The JSON of a value, in parts that are encoded one by one: nothing else in the process runs while the encoder
    does. Objects are cut at their fields and long lists into slices, whose elements should be small. An iterator is
    encoded as a list. Its elements are made one by one, so that a garbage collection, for which everything waits, does
    not have to scan all of them.
    """
    if isinstance(value, dict):
        for i, (key, inner) in enumerate(value.items()):
            yield f"{',' if i else '{'}{encode(key)}:"
            yield from pieces(inner)
        yield "}" if value else "{}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and len(value) > _SLICE):
        elements, begin = iter(value), "["
        while part := list(islice(elements, _SLICE)):
            yield begin + encode(part)[1:-1]
            begin = ","
        yield "]" if begin == "," else "[]"
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield "," if i else "["
            yield from pieces(inner)
        yield "]" if value else "[]"
    else:
        yield encode(value)
