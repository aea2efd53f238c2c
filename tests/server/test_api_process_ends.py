"""The ends of a server of several processes: all of them end with each, whatever ends it, and answer what they can."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from helpers.paths import ROOT
from helpers.server import serving_process
from helpers.server_processes import children_of, connections_to_each, engine_and_http, is_alive, until_ended

LONG = {"prompt": "import os\n", "max_tokens": 2000, "ignore_eos": True}
ARGUMENTS = ("--api-processes", "3", "--num-pages", "8000")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes in /proc")


def outcome(connection, body):
    """The code of the error that a request ended with, "whole" without one, or "cut" if its connection ended."""
    try:
        _, answer = connection.post("/v1/completions", body)
    except (http.client.HTTPException, ConnectionError):
        return "cut"
    if body.get("stream"):
        *_, last, done, end = answer.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        answer = json.loads(last.removeprefix("data: "))
    return answer["error"]["code"] if "error" in answer else "whole"


def outcomes(made, bodies, signals):
    """What becomes of requests, `bodies` to each process, when signals are sent to processes while all run."""
    work = []
    for pid, some in made.items():
        work += [(pid, connection, body) for connection, body in zip(some, bodies, strict=False)]
    observer = made[work[0][0]][len(bodies)]
    with ThreadPoolExecutor(len(work)) as pool:
        found = [(pid, pool.submit(outcome, connection, body)) for pid, connection, body in work]
        end = time.monotonic() + 30
        while observer.get("/load")[1]["server_load"] + sum(each.done() for _, each in found) < len(work):
            assert time.monotonic() < end
            time.sleep(0.02)
        for pid, number in signals:
            os.kill(pid, number)
        results = {pid: [] for pid in made}
        for pid, each in found:
            results[pid].append(each.result())
    return results


def killed(index):
    """The outcomes of requests when process `index` gets SIGKILL, and what ends how: 0 is the engine, and the others
    are those that speak HTTP.
    """
    with serving_process(*ARGUMENTS, QUIRE_API_KEY="") as (process, url):
        engine, pids = engine_and_http(process.pid)
        victim = [engine, *pids][index]
        made = connections_to_each(pids, int(url.rpartition(":")[2]), 5)
        bodies = [{**LONG, "stream": i % 2 == 0} for i in range(4)]
        results = outcomes(made, bodies, [(victim, signal.SIGKILL)])
        code = process.wait(20)
        until_ended(engine, *pids)
        return list(results.values()), code, process.stderr.read()


@pytest.mark.slow
def test_engine_killed_ends_requests_of_all_processes_with_errors():
    results, code, printed = killed(0)
    assert results == [["engine_error"] * 4] * 3
    assert (code, printed) == (1, "quire: error: the engine's process was ended by SIGKILL\n")


@pytest.mark.slow
def test_first_process_killed_ends_requests_of_others_with_errors_and_all_processes():
    (first, *others), code, printed = killed(1)
    assert first == ["cut"] * 4
    assert others == [["unavailable"] * 4] * 2
    assert (code, printed) == (-signal.SIGKILL, "")


@pytest.mark.slow
def test_further_process_killed_ends_requests_of_others_with_errors_and_the_server():
    (first, second, third), code, printed = killed(2)
    assert second == ["cut"] * 4
    assert [first, third] == [["unavailable"] * 4] * 2
    assert (code, printed) == (1, "quire: error: HTTP process 2 of 3 was ended by SIGKILL\n")


@pytest.mark.slow
def test_sigterm_to_all_processes_answers_every_request():
    """As a service manager sends it. Short completions finish, long ones end with an error after the grace time."""
    with serving_process(*ARGUMENTS, "--grace", "4", QUIRE_API_KEY="") as (process, url):
        engine, pids = engine_and_http(process.pid)
        made = connections_to_each(pids, int(url.rpartition(":")[2]), 5)
        bodies = [{**LONG, "max_tokens": tokens, "stream": stream} for tokens in (60, 2000) for stream in (True, False)]
        results = outcomes(made, bodies, [(pid, signal.SIGTERM) for pid in (engine, *pids)])
        assert process.wait(20) == 0
        until_ended(engine, *pids)
        printed = process.stderr.read()
    assert list(results.values()) == [["whole"] * 2 + ["unavailable"] * 2] * 3
    assert printed == "quire: 6 completions are ended after the grace time\n"


@pytest.mark.slow
def test_second_sigint_ends_all_processes_at_once():
    with serving_process(*ARGUMENTS, "--grace", "300", QUIRE_API_KEY="") as (process, url):
        engine, pids = engine_and_http(process.pid)
        made = connections_to_each(pids, int(url.rpartition(":")[2]), 2)
        # A request whose body does not arrive holds its process for longer than that.
        for some in made.values():
            some[1].begin_without_body("/v1/completions")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert all(map(is_alive, pids))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        until_ended(engine, *pids)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 2])
def test_process_killed_while_the_model_is_loaded_ends_all(index):
    """The first process, or a further one, of which the first learns when the model is loaded."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--device", "cpu", *ARGUMENTS]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "QUIRE_API_KEY": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        try:
            end = time.monotonic() + 30
            while len(children_of(process.pid)) < 3:
                assert time.monotonic() < end
                time.sleep(0.01)
            children = children_of(process.pid)
            os.kill([process.pid, *children][index], signal.SIGKILL)
            code = process.wait(60)
            until_ended(*children)
            printed = process.stderr.read()
        finally:
            process.kill()
    if index == 0:
        assert code == -signal.SIGKILL
    else:
        assert (code, printed) == (1, "quire: error: HTTP process 2 of 3 was ended by SIGKILL\n")


@pytest.mark.slow
def test_model_that_cannot_be_loaded_ends_all_processes(tmp_path):
    command = [sys.executable, "-m", "quire", "serve", str(tmp_path / "none"), "--port", "0", "--api-processes", "2"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "QUIRE_API_KEY": ""}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=variables, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("quire: error: there is no model folder")
    assert done.stderr.count("\n") == 1
