"""The formats of DeepSeek V3 and R1 (type<sep>name, and the arguments in a block of code) and of V3.1 (name<sep>{...}),
both between marks with characters of their own.
"""

from __future__ import annotations

import re

from quire.server.chat_output.marked import MarkedCallParser

_NAME, _SEPARATOR = r"([^\s<{]+)", "<｜tool▁sep｜>"


class DeepSeekParser(MarkedCallParser):
    """Reads each call after its mark. Those of the list of calls are left out."""

    begin = "<｜tool▁call▁begin｜>"
    openers = ("<｜tool▁calls▁begin｜>",)
    closers = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    header = re.compile(rf"\s*(?:[^\s<{{]+{_SEPARATOR}\s*{_NAME}\s*```(?:json)?\s*|{_NAME}\s*{_SEPARATOR}\s*)")
    takes_lists = False
