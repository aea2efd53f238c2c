"""The log of requests: uvicorn's lines of text, or a JSON object in each line for programs."""

from __future__ import annotations

import copy
import json
import logging
from datetime import UTC, datetime
from typing import Any

from uvicorn.config import LOGGING_CONFIG


class JsonFormatter(logging.Formatter):
    """Writes a record of uvicorn's log of requests as a JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.args, tuple)
        client, method, path, version, status = record.args
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "client": client, "method": method, "path": path}
        return json.dumps({**fields, "http_version": version, "status": status})


def log_config(form: str | None) -> dict[str, Any]:
    """The configuration of uvicorn's logs, with requests in the form "text" or "json"; None: as for "text"."""
    config = copy.deepcopy(LOGGING_CONFIG)
    if form == "json":
        config["formatters"]["access"] = {"()": JsonFormatter}
    return config
