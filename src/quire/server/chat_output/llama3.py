"""The format of Llama 3.1 to 3.3: the output is {"name": ..., "parameters": {...}}, after <|python_tag|> or not, or
several of these with semicolons between them.
"""

from __future__ import annotations

from quire.server.chat_output.marked import MarkedCallParser


class Llama3Parser(MarkedCallParser):
    """Reads calls after <|python_tag|>, and calls of offered functions at the start of the output and after calls."""

    begin = "<|python_tag|>"
    closers = (";",)
    bare = True
