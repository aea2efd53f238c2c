"""The server's time for a token: HTTP, text and event streams, with an engine that computes nothing.

    PYTHONPATH=src python tools/server_host.py --streams 384 --output 256 --period 10 --api-processes 1

The engine is a process that gives each request a token every --period milliseconds, from when all requests are there,
and sends them as a real one does. The client is a process that reads bytes and counts events. Each round has the
clients' rate of tokens; events per token, which are fewer than 1 where the server is late and sends several tokens at
once; the server's CPU time for a token, of all its processes; the longest time between two turns of the event loop of
its first process, also while the requests come, all at once; and how many of the engine's steps were late because the
server did not read. Needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import pickle
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
VOCAB_SIZE = 4096
_REPORTED = ("streams", "output", "period", "api_processes")
_fork = multiprocessing.get_context("fork")


class Engine:
    """Gives each request of its clients a token in each step.

    Args:
        socks: connected to the clients.
        vocab_size: of the tokens.
    """

    def __init__(self, socks: list[socket.socket], vocab_size: int) -> None:
        self._socks = socks
        self._tokens = [random.randrange(vocab_size // 8, vocab_size - 1) for _ in range(1 << 12)]
        # The tokens that are left of each request, by its number, of each client.
        self._arrived: list[dict[int, int]] = [{} for _ in socks]

    def run(self, streams: int, period: float, late: Any) -> None:
        """Serve the requests whenever there are `streams` of them, with a step in each period."""
        for client in range(len(self._socks)):
            threading.Thread(target=self._read, args=(client,), daemon=True).start()
        while True:
            if sum(map(len, self._arrived)) < streams:
                time.sleep(1e-3)
                continue
            left, due = [dict(each) for each in self._arrived], time.perf_counter()
            for each in self._arrived:
                each.clear()
            details: messages.Details | None = messages.Details()
            while any(left):
                left = [self._step(client, requests, details) for client, requests in enumerate(left)]
                details, due = None, due + period
                late.value += time.perf_counter() > due
                time.sleep(max(0.0, due - time.perf_counter()))

    def _step(self, client: int, left: dict[int, int], details: messages.Details | None) -> dict[int, int]:
        """Send a token for each request of a client; return what is left of them."""
        if not left:
            return left
        updates = [
            messages.NumberedUpdate(number, [self._tokens[(number + count) % len(self._tokens)]], details)
            for number, count in left.items()
        ]
        for update in updates:
            if left[update.number] == 1:
                update.details = messages.Details("length")
        self._socks[client].sendall(messages.frame(messages.StepUpdates(updates)))
        return {number: count - 1 for number, count in left.items() if count > 1}

    def _read(self, client: int) -> None:
        sock, frames = self._socks[client], messages.Frames()
        while data := messages.receive(sock):
            for content in frames.add(data):
                message = messages.to_host.decode(content)
                if isinstance(message, messages.Start):
                    for i, request in enumerate(message.requests):
                        self._arrived[client][message.first + i] = int(request.params.max_tokens or 0)
                elif isinstance(message, messages.GetState):
                    sock.sendall(messages.frame(messages.State(message.key, Stats(pages=1), 0.0, [])))
        os._exit(0)


def run_engine(socks: list[socket.socket], streams: int, period: float, late: Any) -> None:
    Engine(socks, VOCAB_SIZE).run(streams, period, late)


def run_server(socks: list[socket.socket], folder: Path, port: Any, held: Any) -> None:
    """Serve the engine at the other ends of sockets, by as many processes."""
    import_tokenizers()
    from quire.server import EngineClient, bind
    from quire.server.app import AppOptions, app_of
    from quire.server.http_process import HttpJob
    from quire.server.http_processes import HttpProcesses
    from quire.server.run import RunOptions, run_app
    from quire.server.shared_server import serve_together

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
    options, run = AppOptions(), RunOptions()
    with bind(port=0) as bound, HttpProcesses(bound, socks[1:]) as others:
        app = app_of(EngineClient(socks[0], "model", info, tokenizer), options, others.counts)
        if not len(others):
            run_app(app, bound, run, started)
            return
        job = HttpJob(name="model", info=info, trust_remote_code=False, app=options, run=run)
        others.job = pickle.dumps(job)
        serve_together(app, bound, others, run, started)


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


def cpu_seconds(pids: list[int]) -> float:
    """The CPU time of processes."""
    texts = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in texts) / os.sysconf("SC_CLK_TCK")


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
    parser.add_argument("--api-processes", type=int, default=1, help="of the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the result")
    args = parser.parse_args()
    pairs = [messages.connected_sockets() for _ in range(args.api_processes)]
    own, other = ([pair[end] for pair in pairs] for end in (0, 1))
    port, late = _fork.Value("i", 0), _fork.Value("i", 0)
    held = _fork.Value("d", 0.0)
    folder = args.model or Path(messages.__file__).parents[1] / "models" / "tiny-python"
    given = (other, args.streams, args.period / 1e3, late)
    engine = _fork.Process(target=run_engine, args=given, daemon=True)
    server = _fork.Process(target=run_server, args=(own, folder, port, held), daemon=True)
    engine.start()
    server.start()
    for sock in (*own, *other):
        sock.close()
    while not port.value:
        time.sleep(0.05)
        assert server.is_alive()
    assert server.pid is not None
    further = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    pids, rounds = [server.pid, *map(int, further)], []
    for _ in range(args.rounds):
        late.value, held.value = 0, 0.0
        before = cpu_seconds(pids)
        row = read_streams(port.value, args.streams, args.output)
        used = (cpu_seconds(pids) - before) / (args.streams * args.output)
        row |= {"server_us_per_token": round(used * 1e6, 1), "loop_held_ms": round(held.value * 1e3, 1)}
        rounds.append(row | {"late_steps": late.value})
        print(rounds[-1], flush=True)
    server.terminate()
    server.join()
    if args.out:
        from quire.bench.cpu import machine

        given_options = {name: value for name, value in vars(args).items() if name in _REPORTED}
        result = {**machine(), "operation": "server_host", **given_options, "runs": rounds}
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
