"""The format of Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from quire.server.chat_output.marked import MarkedCallParser


class HermesParser(MarkedCallParser):
    """Reads calls between <tool_call> and </tool_call>."""

    begin = "<tool_call>"
    closers = ("</tool_call>",)
