"""Ranks that torchrun has started: all run one program, and meet in `LLM`."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from quire.engine.config import EngineConfig
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.errors import RankError

_HOST = "127.0.0.1"
_KEY = "quire/leader"
# The most seconds between the first and the last rank that makes its `LLM`.
_SECONDS = 120.0


def rank_of(config: EngineConfig) -> int | None:
    """The rank that torchrun has given to this process; None if it was not started by torchrun.

    Raises:
        ValueError: torchrun has started another number of processes than the configuration's ranks, or some on other
            machines.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    for variable, what in (("WORLD_SIZE", "processes"), ("LOCAL_WORLD_SIZE", "processes on this machine")):
        found = int(os.environ[variable])
        if found != config.num_ranks:
            raise ValueError(f"{config.ranks_option}: torchrun has started {found} {what}")
    return int(os.environ["RANK"])


def connect() -> Channel:
    """The connection to rank 0, of another rank.

    Raises:
        RankError: rank 0 does not come to its `LLM` in time.
    """
    try:
        port = int(_store().get(_KEY))
    except RuntimeError as error:
        raise RankError(f"rank 0 has not made an LLM within {_SECONDS:g} s") from error
    channel = Channel(socket.create_connection((_HOST, port)))
    channel.send(int(os.environ["RANK"]))
    return channel


def accept(size: int) -> list[tuple[int, socket.socket]]:
    """The other ranks, and the connections to them, in order.

    Raises:
        RankError: one does not come to its `LLM` in time.
    """
    found: list[tuple[int, socket.socket]] = []
    with socket.create_server((_HOST, 0)) as listener:
        listener.settimeout(_SECONDS)
        _store().set(_KEY, str(listener.getsockname()[1]))
        for _ in range(size - 1):
            try:
                sock, _ = listener.accept()
            except TimeoutError as error:
                raise RankError(f"{size - 1 - len(found)} ranks have not made an LLM within {_SECONDS:g} s") from error
            found.append((int(Channel(sock, _SECONDS).receive()), sock))
    return sorted(found, key=lambda each: each[0])


def _store() -> Any:
    """The store of torchrun's agent."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, timeout=timedelta(seconds=_SECONDS))
