"""Several processes that speak HTTP for one engine: whoever answers, the answer is that of the whole server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from helpers.paths import ROOT
from helpers.server import serving_process
from helpers.server_processes import clients_by_process, connections_to_each, engine_and_http
from helpers.tls import make_certificate
from quire.engine import LLM, shipped_model
from quire.server import ServerConfig, ServerLimits
from quire.server.app import AppOptions, app_of
from quire.server.counts import Counts
from quire.server.engine_client import attached
from quire.server.run import RunOptions, uvicorn_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")

LONG = {"prompt": "import os\n", "max_tokens": 2000, "ignore_eos": True, "stream": True}
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def server():
    """The port of a server with two processes, and their ids."""
    arguments = ("--api-processes", "2", "--num-pages", "8000", "--max-num-seqs", "3", "--max-queue", "4")
    arguments += ("--max-adapters", "1", "--adapter-root", str(ROOT / "examples" / "adapters"))
    with serving_process(*arguments, QUIRE_API_KEY="") as (process, url):
        yield int(url.rpartition(":")[2]), engine_and_http(process.pid)[1]


@pytest.fixture
def connections(server):
    """Three connections to each process."""
    port, pids = server
    made = connections_to_each(pids, port, 3)
    yield [made[pid] for pid in pids]
    for connection in [each for some in made.values() for each in some]:
        connection.close()


def metric(text, name):
    return float(re.search(rf"^quire:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])


def in_engine(connection):
    """The completions that the engine has."""
    text = connection.get("/metrics")[1]
    return metric(text, "num_requests_running") + metric(text, "num_requests_waiting")


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("count", [0, 65])
def test_api_processes_outside_their_bounds_are_refused(count):
    with pytest.raises(ValueError, match=f"api_processes = {count}: it must be from 1 to 64"):
        ServerConfig(api_processes=count)


def shares(pids, port, count):
    """The part of the clients that each process has when all are connected."""
    until(lambda: sum(len(found) for found in clients_by_process(pids, port).values()) == count)
    return [len(found) / count for found in clients_by_process(pids, port).values()]


def test_connections_that_wait_at_once_are_spread_evenly(server):
    """The clients come while no process runs, so that the first one to go on finds all of them."""
    port, pids = server
    with ExitStack() as stack:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(384)]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert min(shares(pids, port, 384)) > 0.4
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        for client in clients:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_connections_that_come_one_by_one_are_spread_evenly(server):
    """A process that the system does not run for a while has fewer at first, and then more of those that follow. That
    may be at the end of the first 240 clients, so as many may follow these.
    """
    port, pids = server
    with ExitStack() as stack:
        count, found = 0, [0.0]
        while count < 240 or (min(found) <= 0.4 and count < 480):
            for _ in range(24):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                time.sleep(0.005)
            count += 24
            found = shares(pids, port, count)
        assert min(found) > 0.4


def test_requests_to_all_processes_have_equal_answers(connections):
    body = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0}
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda each: each.post("/v1/completions", body), [c for some in connections for c in some])
        )
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    assert all(answer["usage"]["completion_tokens"] == 12 for _, answer in answers)


def test_adapters_that_one_process_loads_are_known_to_all_when_it_answers(connections):
    (first, *_), (second, *_) = connections
    body = {"prompt": "class Queue", "max_tokens": 1}
    for i, (asked, other) in enumerate([(first, second), (second, first)] * 5):
        name = f"a{i}"
        loaded = asked.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "typed"})
        answers = [each.post("/v1/completions", {**body, "model": name}) for each in (other, asked)]
        unloaded = other.post("/v1/unload_lora_adapter", {"lora_name": name})
        refused = [each.post("/v1/completions", {**body, "model": name})[0] for each in (asked, other)]
        assert (loaded[0], unloaded[0], refused) == (200, 200, [404, 404])
        assert [(status, answer["model"]) for status, answer in answers] == [(200, name)] * 2
    for connection in (first, second):
        text = connection.get("/metrics")[1]
        counted = dict(re.findall(r'^quire:adapter_requests_total{adapter="(\w+)".*} (\S+)$', text, re.MULTILINE))
        assert counted == {**{f"a{i}": "2.0" for i in range(10)}, "other": "0.0"}


def test_metrics_and_state_of_each_process_are_those_of_the_server(connections):
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
             "request_prompt_tokens_sum", "e2e_request_latency_seconds_count")  # fmt: skip

    def values():
        texts = [some[0].get("/metrics")[1] for some in connections]
        # Nothing has changed between the answers of the processes.
        assert len({tuple(metric(text, name) for name in names) for text in texts}) == 1
        return [metric(texts[0], name) for name in names]

    before = values()
    for some, count in zip(connections, (1, 3), strict=True):
        for _ in range(count):
            assert some[1].post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True})[0] == 200
    assert [after - b for after, b in zip(values(), before, strict=True)] == [20, 4, 16, 12, 4]
    for path in ("/v1/models", "/health", "/version", "/server_info"):
        answers = [some[0].get(path) for some in connections]
        assert answers[0] == answers[1], path
    info = connections[0][0].get("/server_info")[1]
    assert (info["api_processes"], info["limits"]["max_connections"]) == (2, 4096)
    states = [some[0].get("/engine_state")[1] for some in connections]
    assert states[0]["started"] == states[1]["started"]
    assert states[0]["steps"] == states[1]["steps"]
    assert all(state["accepts_requests"] for state in states)


def test_further_process_has_no_torch(server):
    for pid in server[1]:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_completions_beyond_the_queue_are_refused_by_every_process(connections):
    first, second = connections
    rejected = metric(first[0].get("/metrics")[1], "num_rejected_total")
    first[1].begin("/v1/completions", {**LONG, "n": 2})
    first[2].begin("/v1/completions", {**LONG, "n": 2})
    second[1].begin("/v1/completions", {**LONG, "n": 2})
    until(lambda: second[0].get("/load")[1] == {"server_load": 6})
    assert first[0].get("/load")[1] == {"server_load": 6}
    for some in connections:
        status, answer = some[0].post("/v1/completions", {**LONG, "n": 2, "stream": False})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert "6 completions are running or waiting, and the server holds 7 at most" in answer["error"]["message"]
        until(lambda asked=some[0]: in_engine(asked) == 6)
    assert metric(first[0].get("/metrics")[1], "num_rejected_total") == rejected + 4
    for each in (*first[1:], second[1]):
        each.close()
    until(lambda: second[0].get("/load")[1] == {"server_load": 0})
    until(lambda: in_engine(first[0]) == 0)


def test_limit_of_connections_is_divided_among_processes():
    with LLM(num_pages=2) as llm:
        client, options = attached(llm), AppOptions(limits=ServerLimits(max_connections=10))
        for processes, most in ((1, 10), (3, 4)):
            counts = Counts(processes)
            config = uvicorn_config(app_of(client, options, counts), RunOptions())
            assert config.http.limits.max_connections == most
            counts.close()


@pytest.mark.slow
def test_adapters_are_known_to_all_processes_when_the_answer_comes(tmp_path):
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from helpers.adapters import save_adapter

    save_adapter(
        AutoModelForCausalLM.from_pretrained(shipped_model()), tmp_path / "one", r=4, target_modules=["q_proj"]
    )
    arguments = ("--api-processes", "2", "--num-pages", "100", "--max-adapters", "2", "--adapter-root", str(tmp_path))
    with serving_process(*arguments, "--adapter", f"first={tmp_path / 'one'}", QUIRE_API_KEY="") as (process, url):
        port, pids = int(url.rpartition(":")[2]), engine_and_http(process.pid)[1]
        made = connections_to_each(pids, port, 1)
        one, other = (made[pid][0] for pid in pids)
        for name in ("a", "b", "c", "d"):
            assert one.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "one"})[0] == 200
            body = {"model": name, "prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
            assert [each.post("/v1/completions", body)[0] for each in (other, one)] == [200, 200]
            assert other.get("/v1/models") == one.get("/v1/models")
            assert other.post("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
            assert [each.post("/v1/completions", body)[0] for each in (one, other)] == [404, 404]
        assert one.post("/v1/completions", {**body, "model": "first"})[0] == 200
        for each in (one, other):
            counted = re.findall(
                r'^quire:adapter_requests_total{adapter="(\w+)".*} (\S+)$', each.get("/metrics")[1], re.M
            )
            assert dict(counted) == {**dict.fromkeys("abcd", "2.0"), "first": "1.0", "other": "0.0"}


@pytest.mark.slow
def test_keys_template_names_and_log_are_those_of_every_process(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    arguments = (
        *("--api-processes", "2", "--num-pages", "100", "--api-key-file", str(tmp_path / "keys")),
        *("--chat-template", TEMPLATE, "--served-model-name", "tiny", "--metrics-prefix", "vllm"),
        *("--access-log", "json", "--reasoning-format", "none"),
    )
    with serving_process(*arguments, stdout=subprocess.PIPE, QUIRE_API_KEY="other") as (process, url):
        port, pids = int(url.rpartition(":")[2]), engine_and_http(process.pid)[1]
        without, made, other = (connections_to_each(pids, port, 1, key=key) for key in ("", "secret", "other"))
        for pid in pids:
            assert without[pid][0].get("/v1/models")[0] == 401
            assert other[pid][0].get("/v1/models")[0] == 200
            status, answer = made[pid][0].get("/v1/models")
            assert (status, [model["id"] for model in answer["data"]]) == (200, ["tiny"])
            assert "vllm:num_requests_running" in made[pid][0].get("/metrics")[1]
            tokens = made[pid][0].post("/tokenize", {"messages": [{"role": "user", "content": "a b"}]})[1]["tokens"]
            assert made[pid][0].post("/detokenize", {"tokens": tokens})[1] == {"prompt": "<a b>"}
            assert "prompt.js" in without[pid][0].get("/")[1]
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=20)
        assert process.returncode == 0
    lines = [json.loads(line) for line in printed.splitlines()]
    by_client = {
        pid: [line["path"] for line in lines if line["client"].endswith(f":{made[pid][0].port}")] for pid in pids
    }
    assert all(paths == ["/v1/models", "/metrics", "/tokenize", "/detokenize"] for paths in by_client.values())
    assert len(lines) == 14


@pytest.mark.slow
def test_tls_is_spoken_by_every_process(tmp_path):
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    arguments = ("--api-processes", "2", "--num-pages", "100", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    with serving_process(*arguments, QUIRE_API_KEY="") as (process, url):
        assert url.startswith("https://")
        port, pids = int(url.rpartition(":")[2]), engine_and_http(process.pid)[1]
        # A client that does not speak TLS.
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert other.recv(100) == b""
        for some in connections_to_each(pids, port, 4, context=context).values():
            for connection in some:
                assert connection.get("/health") == (200, {"status": "ok"})
