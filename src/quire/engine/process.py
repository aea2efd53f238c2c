"""The program that hosts an engine: `quire.server.EngineProcess` starts it."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.config import EngineConfig
from quire.engine.embedding import EmbeddingParams
from quire.engine.messages import Frames, Ready, as_failed, frame, receive
from quire.engine.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM

# Seconds for an orderly end after the other process has left. After that, what still runs is given up.
_GRACE = 10.0
# Tokens of a prompt for which the CPU has another kernel than for short ones.
_LONG = 256


def main(*descriptors: int) -> None:
    """Make an engine, and serve the processes at the other ends of sockets, until the engine or the first of them ends.
    The exit code is 0 if the first one has ended the engine, or has left.

    The first message of the first socket is a model, an `EngineConfig`, and the folders of adapters by their names,
    pickled.

    Args:
        descriptors: of the sockets.
    """
    socks, frames = [socket.socket(fileno=descriptor) for descriptor in descriptors], Frames()
    sock = socks[0]
    first = _first_message(sock, frames)
    if first is None:
        return
    loaded = threading.Event()
    threading.Thread(target=_end_with_client, args=(sock, loaded), daemon=True).start()
    try:
        llm = _load(*pickle.loads(first))
    except BaseException as error:
        failed = as_failed(error)
        if failed.kind == "" or os.environ.get("QUIRE_DEBUG"):
            traceback.print_exc()
        sock.sendall(frame(failed))
        sys.exit(1)
    # Objects that were loaded stay alive, so garbage collections need not scan them.
    gc.freeze()
    gc.enable()
    from quire.engine.host import EngineHost

    hosts = [EngineHost(llm, each) for each in socks]
    loaded.set()
    sock.sendall(frame(Ready(llm.name, llm.info)))
    hosts[0].start(frames)
    for host in hosts[1:]:
        host.start()
    hosts[0].ended.wait()
    threading.Thread(target=_end_later, daemon=True).start()
    llm.close()
    sys.exit(0 if hosts[0].closed else 1)


def _first_message(sock: socket.socket, frames: Frames) -> bytes | None:
    """The first message; None if the other process has ended before it was whole."""
    while data := receive(sock):
        for content in list(frames.add(data)):
            return bytes(content)
    return None


def _end_with_client(sock: socket.socket, loaded: threading.Event) -> None:
    """End this process if the other one ends while the model is loaded. It sends nothing until then."""
    try:
        data = sock.recv(1, socket.MSG_PEEK)
    except OSError:
        data = b""
    if not data and not loaded.is_set():
        os._exit(1)


def _end_later() -> None:
    time.sleep(_GRACE)
    os._exit(1)


def _load(source: Any, config: EngineConfig, adapters: Mapping[str, str | Path]) -> LLM:
    """The engine of a checkpoint. It has completed a short and a long prompt, which compiles the CPU's kernels in a new
    installation: the first requests would wait for that.
    """
    from quire.engine.llm import LLM

    llm = LLM(source, config, adapters=adapters)
    for length in sorted({min(length, llm.max_len - 1) for length in (1, _LONG)} - {0}):
        prompt = [llm.model.vocab_size // 3] * length
        if llm.model.is_headless:
            llm.embed(prompt, EmbeddingParams("last"))
        else:
            llm.generate(prompt, SamplingParams(max_tokens=1))
    return llm
