"""The program of a follower that the leader starts."""

from __future__ import annotations

import socket

from quire.engine.load import load_runner
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.follower import serve


def main(descriptor: int) -> None:
    """Serve the leader at the other end of a socket."""
    serve(Channel(socket.socket(fileno=descriptor)), load_runner)
