"""The formats of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}], and [TOOL_CALLS]name[ARGS]{...} since its
tokenizers' version 11, with [CALL_ID]... after the name, or without [ARGS], in some models.
"""

from __future__ import annotations

import re

from quire.server.chat_output.marked import MarkedCallParser


class MistralParser(MarkedCallParser):
    """Reads the calls after each [TOOL_CALLS]."""

    begin = "[TOOL_CALLS]"
    header = re.compile(r"\s*(?:([^\s\[{]+)\s*(?:\[CALL_ID\][^\s\[{]*\s*)?(?:\[ARGS\]\s*)?)?")
