"""The engine and the server in processes of their own: each ends with the other, whatever ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from helpers.server import serving_process
from quire.engine import EngineConfig, SamplingParams
from quire.server import EngineClient, EngineProcess

LONG = {"prompt": "import os\n", "max_tokens": 2000, "ignore_eos": True}
SMALL = ("--num-pages", "4000")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")


def engine_of(pid):
    """The process of the engine of a server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def is_alive(pid):
    """Whether a process runs; one that has ended may still be in the table of processes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_ended(pid, seconds=20.0):
    end = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < end, "the process goes on"
        time.sleep(0.05)


async def killed_under_load(url, pid, number):
    """The answers to requests, half of them streamed, of which all run when a signal is sent to a process."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        bodies = [{**LONG, "stream": i % 2 == 0} for i in range(12)]
        sent = [asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body)) for body in bodies]
        while (await client.get(f"{url}/server_info")).json()["stats"]["running"] < 12:
            await asyncio.sleep(0.02)
        os.kill(pid, number)
        return await asyncio.gather(*sent, return_exceptions=True)


def test_serve_engine_killed_ends_requests_with_errors_and_the_server():
    with serving_process(*SMALL, QUIRE_API_KEY="") as (process, url):
        answers = asyncio.run(killed_under_load(url, engine_of(process.pid), signal.SIGKILL))
        assert process.wait(20) == 1
        printed = process.stderr.read()
    assert printed == "quire: error: the engine's process was ended by SIGKILL\n"
    for i, answer in enumerate(answers):
        assert answer.status_code == (200 if i % 2 == 0 else 500)
        text = answer.text
        if i % 2 == 0:
            *_, text, done, end = answer.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
        error = json.loads(text.removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("engine_error", "the engine failed: its process has ended")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGABRT, marks=pytest.mark.slow)])
def test_serve_server_killed_ends_the_engine(number):
    with serving_process(*SMALL, QUIRE_API_KEY="") as (process, url):
        engine = engine_of(process.pid)
        answers = asyncio.run(killed_under_load(url, process.pid, number))
        assert process.wait(20) == -number
        until_ended(engine)
    assert all(isinstance(answer, httpx.TransportError) for answer in answers)


def test_engine_process_client_left_while_loading_ends():
    process = EngineProcess().process
    assert process.wait(20) != 0


@pytest.mark.slow
def test_serve_signals_to_the_engine_alone_have_no_effect():
    with serving_process(*SMALL, QUIRE_API_KEY="") as (process, url):
        engine = engine_of(process.pid)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine, number)
            time.sleep(0.1)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        until_ended(engine)


def test_serve_process_of_http_has_neither_torch_nor_the_model():
    with serving_process(*SMALL, QUIRE_API_KEY="") as (process, url):
        body = {"prompt": "import os\n", "max_tokens": 3, "logprobs": 2, "structured_outputs": {"regex": "[a-z]+"}}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "libtorch" in Path(f"/proc/{engine_of(process.pid)}/maps").read_text()


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [("/nowhere", FileNotFoundError, "there is no model folder /nowhere"), (__file__, FileNotFoundError, "is a file")],
)
def test_engine_process_that_cannot_load_raises_what_the_engine_raises(model, error, message):
    with EngineProcess(model) as process, pytest.raises(error, match=message):
        process.connect()


def test_engine_process_killed_while_loading_is_an_error():
    with EngineProcess() as process:
        process.process.kill()
        with pytest.raises(RuntimeError, match="was ended by SIGKILL before the model was loaded"):
            process.connect()


async def token_ids(engine, prompt, max_tokens):
    """The tokens of a completion, and why it ended."""
    parts, ended = [], asyncio.Event()

    def sink(index, part):
        parts.append(part)
        if part.finish_reason is not None:
            ended.set()

    engine.start([prompt], [SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)], sink)
    await asyncio.wait_for(ended.wait(), 60)
    return [token for part in parts for token in part.token_ids], parts[-1].finish_reason


@pytest.mark.slow
def test_engine_process_of_three_clients_serves_each_and_ends_with_the_first():
    config = EngineConfig(device="cpu", num_pages=1000, batch_invariant=True)
    with EngineProcess(config=config, clients=3) as process:
        first = process.connect()
        second, third = (
            EngineClient(sock, first.name, first.info, first.tokenizer) for sock in process.further_sockets
        )

        async def run():
            prompts = [[5, 6, 7], [5, 6, 8], [300, 301]]
            clients = (first, second, third)
            before = (await second.state()).stats.generated_tokens
            together = await asyncio.gather(*(token_ids(c, p, 20) for c, p in zip(clients, prompts, strict=True)))
            alone = [await token_ids(first, prompt, 20) for prompt in prompts]
            assert together == alone
            assert (await third.state()).stats.generated_tokens == before + 120
            works = [asyncio.ensure_future(token_ids(client, prompts[0], 1500)) for client in clients]
            while (await first.state()).stats.running < 3:
                await asyncio.sleep(0.01)
            third.leave()
            assert (await works[2])[1] == "cancelled"
            while (await first.state()).stats.running > 2:
                await asyncio.sleep(0.01)
            assert (await token_ids(second, prompts[1], 20)) == alone[1]
            first.leave()
            return [(await work)[1] for work in works[:2]]

        left, ended = asyncio.run(run())
        assert left == "cancelled"
        assert ended in ("cancelled", "error")
        assert process.end() == "the engine's process ended with exit code 0"
