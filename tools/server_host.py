"""The server's time for a token: HTTP, text and event streams, with an engine that computes nothing.

    PYTHONPATH=src python tools/server_host.py --streams 384 --output 256 --period 10

The engine is a process that gives each request a token every --period milliseconds, from when all requests are there,
and sends them as a real one does. The client is a process that reads bytes and counts events. Each round has the
clients' rate of tokens; events per token, which are fewer than 1 where the server is late and sends several tokens at
once; the server's CPU time for a token; the longest time between two turns of its event loop, also while the requests
come, all at once; and how many of the engine's steps were late because the server did not read. Needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import selectors
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from quire.engine import messages
from quire.engine.model_info import ModelInfo
from quire.engine.params import LIBRARY_DEFAULTS
from quire.engine.reading import import_tokenizers, load_tokenizer
from quire.engine.stats import Stats

PROMPT_TOKENS = 400
MAX_LEN = 4096
_fork = multiprocessing.get_context("fork")


def run_engine(sock: socket.socket, vocab_size: int, streams: int, period: float, late: Any) -> None:
    """Give each request a token in each period, once there are `streams` of them."""
    arrived: dict[int, int] = {}

    def read() -> None:
        frames = messages.Frames()
        while data := messages.receive(sock):
            for content in frames.add(data):
                message = messages.to_host.decode(content)
                if isinstance(message, messages.Start):
                    for i, request in enumerate(message.requests):
                        arrived[message.first + i] = int(request.params.max_tokens or 0)
                elif isinstance(message, messages.GetState):
                    sock.sendall(messages.frame(messages.State(message.key, Stats(pages=1), 0.0, [])))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    tokens = [random.randrange(vocab_size // 8, vocab_size - 1) for _ in range(1 << 12)]
    while True:
        if len(arrived) < streams:
            time.sleep(1e-3)
            continue
        left, due = arrived.copy(), time.perf_counter()
        arrived.clear()
        details: messages.Details | None = messages.Details()
        while left:
            updates = [
                messages.NumberedUpdate(number, [tokens[(number + count) % len(tokens)]], details)
                for number, count in left.items()
            ]
            for update in updates:
                if left[update.number] == 1:
                    update.details = messages.Details("length")
            sock.sendall(messages.frame(messages.StepUpdates(updates)))
            left = {number: count - 1 for number, count in left.items() if count > 1}
            details, due = None, due + period
            late.value += time.perf_counter() > due
            time.sleep(max(0.0, due - time.perf_counter()))


def run_server(sock: socket.socket, folder: Path, port: Any, held: Any) -> None:
    """Serve the engine at the other end of a socket."""
    import_tokenizers()
    from quire.server import create_app, serve
    from quire.server.engine_client import EngineClient

    tokenizer = load_tokenizer(folder, False)
    info = ModelInfo(
        folder=str(folder),
        vocab_size=len(tokenizer),
        context=MAX_LEN,
        max_len=MAX_LEN,
        max_num_seqs=MAX_LEN,
        end_ids=frozenset(),
        media_tokens={},
        default_params=LIBRARY_DEFAULTS,
        runner="",
        supports_all_logits=True,
        is_headless=False,
        embedding_size=None,
        pooling="auto",
        device="",
        dtype="",
    )

    def started(server: Any) -> None:
        port.value = server.address[1]
        asyncio.get_running_loop().watching = asyncio.ensure_future(watch(held))  # type: ignore[attr-defined]

    # As the command does: collections need not look at what was loaded.
    gc.freeze()
    serve(create_app(EngineClient(sock, "model", info, tokenizer)), port=0, started=started)


async def watch(held: Any) -> None:
    """Keep the longest time for which the event loop did nothing else."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(1e-3)
        held.value = max(held.value, time.perf_counter() - begun - 1e-3)


def read_streams(port: int, streams: int, output: int) -> dict[str, float]:
    """Read as many streams at once, as fast as they come."""
    fields = {"prompt": [300 + i % 3000 for i in range(PROMPT_TOKENS)], "max_tokens": output, "stream": True}
    body = json.dumps({**fields, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    selector, ends = selectors.DefaultSelector(), {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_READ)
        ends[connection] = b""
    begun, first = time.perf_counter(), 0.0
    events = 0
    for connection in ends:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
    while ends:
        for key, _ in selector.select():
            connection = key.fileobj  # type: ignore[assignment]
            data = connection.recv(1 << 16)
            first = first or time.perf_counter()
            events += data.count(b"data: {")
            ends[connection] = (ends[connection] + data)[-16:]
            if not data or b"[DONE]" in ends[connection]:
                selector.unregister(connection)
                connection.close()
                del ends[connection]
    seconds, tokens = time.perf_counter() - first, streams * output
    return {
        "first_s": round(first - begun, 3),
        "tokens_per_s": round(tokens / seconds),
        "events_per_token": round(events / tokens, 3),
    }


def cpu_seconds(pid: int | None) -> float:
    """The CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="a folder whose tokenizer makes the text; default: the bundled model"
    )
    parser.add_argument("--streams", type=int, default=384)
    parser.add_argument("--output", type=int, default=256, help="tokens of each")
    parser.add_argument(
        "--period", type=float, default=10.0, help="milliseconds of a step; 0: as fast as they are read"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the result")
    args = parser.parse_args()
    own, other = messages.connected_sockets()
    port, late = _fork.Value("i", 0), _fork.Value("i", 0)
    held = _fork.Value("d", 0.0)
    folder = args.model or Path(messages.__file__).parents[1] / "models" / "tiny-python"
    given = (other, 4096, args.streams, args.period / 1e3, late)
    engine = _fork.Process(target=run_engine, args=given, daemon=True)
    server = _fork.Process(target=run_server, args=(own, folder, port, held), daemon=True)
    engine.start()
    server.start()
    own.close()
    other.close()
    while not port.value:
        time.sleep(0.05)
        assert server.is_alive()
    rounds = []
    for _ in range(args.rounds):
        late.value, held.value = 0, 0.0
        before = cpu_seconds(server.pid)
        row = read_streams(port.value, args.streams, args.output)
        used = (cpu_seconds(server.pid) - before) / (args.streams * args.output)
        row |= {"server_us_per_token": round(used * 1e6, 1), "loop_held_ms": round(held.value * 1e3, 1)}
        rounds.append(row | {"late_steps": late.value})
        print(rounds[-1], flush=True)
    server.terminate()
    server.join()
    if args.out:
        from quire.bench.cpu import machine

        given_options = {name: value for name, value in vars(args).items() if name in ("streams", "output", "period")}
        result = {**machine(), "operation": "server_host", **given_options, "runs": rounds}
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
