"""The server's start: the address before the model, and kernels before the first request; and a hurried end."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from helpers.server import serving_process
from quire.cli.main import main
from quire.engine import LLM
from quire.server import bind, create_app, serve


def test_serve_port_in_use_is_named_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "/nowhere", "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    remedy = "end the program that listens there, or choose another port (0 takes a free one)"
    assert (out, err) == ("", f"quire: error: port {port} of 127.0.0.1 is in use: {remedy}\n")


def test_serve_host_of_another_machine_is_named(capsys):
    assert main(["serve", "/nowhere", "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "host = '192.0.2.1', port = 0: can't listen there" in capsys.readouterr().err


def test_bind_refuses_connections_until_the_application_is_served():
    with bind(port=0) as bound:
        address = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
    for host in ("127.0.0.1", "localhost"):
        with bind(host, address[1]) as again:
            assert again.getsockname() == address


def test_serve_address_that_another_program_took_after_bind_is_named():
    with LLM(num_pages=2) as llm, bind(port=0) as bound, bind(port=bound.getsockname()[1]) as other:
        other.listen()
        with pytest.raises(OSError, match=f"port {other.getsockname()[1]} of 127.0.0.1 is in use"):
            serve(create_app(llm), bound=bound)


@pytest.mark.slow
def test_first_requests_of_a_new_installation_compile_nothing(tmp_path):
    """Every compiled kernel is in a file of Numba's cache."""

    def files():
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}

    with serving_process("--num-pages", "300", NUMBA_CACHE_DIR=str(tmp_path), QUIRE_API_KEY="") as (_, url):
        before = files()
        assert before
        for prompt in ("x", "x = 1\n" * 20, "import os\n" * 200):
            for fields in ({"n": 3}, {"temperature": 1, "top_p": 0.9, "logprobs": 3}, {"presence_penalty": 1}):
                body = {"prompt": prompt, "max_tokens": 5, **fields}
                assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200
        assert files() == before


@pytest.mark.slow
def test_serve_two_sigints_answer_requests_and_print_no_traceback():
    """Also with a request whose body never arrives. Without the second SIGINT it would take 300 s."""

    async def load(process, url):
        async with httpx.AsyncClient(timeout=90) as client:
            body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
            bodies = [{**body, "stream": i % 2 == 0} for i in range(20)]
            sent = [asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body)) for body in bodies]
            while 'num_requests_running{model_name="tiny"} 20' not in (await client.get(f"{url}/metrics")).text:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            # The connection of this request may be closed while it is sent.
            with suppress(httpx.TransportError):
                while (await client.get(f"{url}/health")).status_code == 200:
                    await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            return await asyncio.gather(*sent)

    arguments = ("--grace", "300", "--served-model-name", "tiny", "--num-pages", "8000")
    with serving_process(*arguments, QUIRE_API_KEY="") as (process, url):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            answers = asyncio.run(load(process, url))
            assert process.wait(25) == 0
        printed = process.stderr.read()
    assert printed.splitlines() == ["quire: 20 completions are ended at the second SIGINT"]
    assert [answer.status_code for answer in answers] == [200, 503] * 10
    assert all('"code":"unavailable"' in answer.text.replace(": ", ":") for answer in answers)
