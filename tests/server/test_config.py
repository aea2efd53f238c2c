"""`ServerConfig`: its flags, names, keys, TLS and the log of requests, through real clients."""

from __future__ import annotations

import json
import ssl
import subprocess
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from helpers.checkpoints import with_chat_template
from helpers.server import served, serving_process
from helpers.tls import make_certificate
from quire import __version__
from quire.cli.arguments import parser
from quire.cli.loading import config_of
from quire.cli.main import main
from quire.engine import LLM
from quire.server import ServerConfig, ServerLimits, config, create_app

VALUES = {
    "host": ("0.0.0.0", ["--host", "0.0.0.0"]),
    "port": (81, ["--port", "81"]),
    "api_processes": (3, ["--api-processes", "3"]),
    "served_model_name": (("a", "b"), ["--served-model-name", "a", "--served-model-name", "b"]),
    "api_key": (("k", "l"), ["--api-key", "k", "--api-key", "l"]),
    "api_key_file": (None, []),
    "chat_template": ("{{ x }}", ["--chat-template", "{{ x }}"]),
    "tool_format": ("hermes", ["--tool-format", "hermes"]),
    "reasoning_format": ("none", ["--reasoning-format", "none"]),
    "adapter": (("a=b", "c=d/e"), ["--adapter", "a=b", "--adapter", "c=d/e"]),
    "adapter_root": (Path("/"), ["--adapter-root", "/"]),
    "allowed_origin": (("http://a",), ["--allowed-origin", "http://a"]),
    "metrics_prefix": ("vllm", ["--metrics-prefix", "vllm"]),
    "log_level": ("info", ["--log-level", "info"]),
    "access_log": ("json", ["--access-log", "json"]),
    "ssl_certfile": (None, []),
    "ssl_keyfile": (None, []),
}


@pytest.mark.parametrize(
    ("device", "driver", "hidden", "count"),
    [
        ("auto", True, None, 2),
        ("auto", True, "0", 2),
        ("auto", True, "", 1),
        ("auto", True, "-1", 1),
        ("auto", False, None, 1),
        ("cuda:1", False, None, 2),
        ("cpu", True, None, 1),
    ],
)
def test_processes_by_default_are_two_for_a_gpu_and_else_one(monkeypatch, tmp_path, device, driver, hidden, count):
    monkeypatch.setattr(config, "_DRIVER", tmp_path if driver else tmp_path / "none")
    if hidden is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert ServerConfig().processes(device) == count
    assert ServerConfig(api_processes=3).processes(device) == 3


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=200, max_num_seqs=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_serve_without_flags_has_the_defaults():
    args = parser().parse_args(["serve"])
    assert (config_of(ServerConfig, args), config_of(ServerLimits, args)) == (ServerConfig(), ServerLimits())


def test_serve_with_all_flags_has_their_values():
    assert list(VALUES) == [f.name for f in fields(ServerConfig)]
    words = [word for _, given in VALUES.values() for word in given]
    limits = {"max_body": 9, "max_queue": 8, "max_n": 7, "max_tokens": 6, "grace": 5.5}
    words += [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args = parser().parse_args(["serve", *words])
    assert config_of(ServerConfig, args) == ServerConfig(**{name: value for name, (value, _) in VALUES.items()})
    assert config_of(ServerLimits, args) == ServerLimits(**limits)


def test_served_model_name_several_are_all_served(llm):
    with served(llm, name=["first", "second/b"]) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        assert [model.id for model in client.models.list()] == ["first", "second/b"]
        assert client.models.retrieve("second/b").root == "first"
        for name in ("first", "second/b"):
            assert client.completions.create(model=name, prompt="x", max_tokens=1).model == "first"
        with pytest.raises(openai.NotFoundError, match="there is no model 'third': this is 'first' or 'second/b'"):
            client.completions.create(model="third", prompt="x")
    with pytest.raises(ValueError, match="a name of the model must have"):
        create_app(llm, name=["a", ""])


def test_api_keys_each_of_several_is_accepted(llm):
    with served(llm, api_key=["one", "two"]) as url:
        for key, status in (("one", 200), ("two", 200), ("onetwo", 401), ("tw", 401)):
            assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_api_key_file_has_keys_beside_those_of_flags(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# of the team\none\n\n two \n  # three\n", encoding="utf-8")
    assert ServerConfig(api_key=("zero",), api_key_file=file).keys() == ["zero", "one", "two"]
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"api_key_file = .*keys': it is not text in UTF-8"):
        ServerConfig(api_key_file=file).keys()
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"api_key_file = .*keys': it has no keys"):
        ServerConfig(api_key_file=file).keys()


def test_serve_missing_key_file_is_named_before_the_model_is_loaded(capsys, tmp_path):
    assert main(["serve", "/nowhere", "--port", "0", "--api-key-file", str(tmp_path / "none")]) == 2
    assert f"api_key_file = '{tmp_path / 'none'}': it can't be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": ("a",)}, "adapter = 'a': it must be NAME=FOLDER"),
        ({"adapter": ("a=",)}, "adapter = 'a=': it must be NAME=FOLDER"),
        ({"adapter": ("=b",)}, "adapter '': a name of 1 to 128 letters"),
        ({"adapter": ("a b=c",)}, "adapter 'a b': a name of 1 to 128 letters"),
        ({"adapter": ("a=b", "a=c")}, "adapter = 'a=c': b has this name, too"),
        ({"adapter_root": Path(__file__)}, "test_config.py': there is no such folder"),
    ],
)
def test_adapters_that_are_none_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**fields)


@pytest.mark.parametrize("flags", [["--adapter", "a=b"], ["--adapter-root", "/"]])
def test_serve_adapters_without_room_is_an_error_before_the_model_is_loaded(flags, capsys):
    assert main(["serve", "/nowhere", "--port", "0", *flags]) == 2
    assert "max_adapters = 0: --adapter and --adapter-root need --max-adapters" in capsys.readouterr().err


def test_version_ping_and_load_endpoints_answer(llm):
    with served(llm) as url:
        assert httpx.get(f"{url}/version").json() == {"version": __version__}
        for method in ("GET", "POST"):
            assert httpx.request(method, f"{url}/ping").json() == {"status": "ok"}
        assert httpx.get(f"{url}/load").json() == {"server_load": 0}
        body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert httpx.get(f"{url}/load").json() == {"server_load": 2}


def test_tls_clients_that_trust_the_certificate_are_served(llm, tls):
    context = ssl.create_default_context(cafile=tls[0])
    given = {"model": "tiny-python", "prompt": "import", "max_tokens": 40, "temperature": 0}
    with served(llm, run={"tls": tls}) as url, httpx.Client(verify=context) as http:
        assert url.startswith("https://")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", http_client=http, max_retries=0) as client:
            whole = client.completions.create(**given)
            parts = client.completions.create(**given, stream=True)
            assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health")


def test_tls_wrong_files_are_named_before_the_model_is_loaded(tls, tmp_path, capsys):
    cert, key = tls
    for given, text in (
        (["--ssl-keyfile", str(key)], "it needs ssl_certfile"),
        (["--ssl-certfile", str(cert)], "they are not a certificate and its key"),
        (["--ssl-certfile", str(key), "--ssl-keyfile", str(key)], "they are not a certificate and its key"),
        (["--ssl-certfile", str(tmp_path / "none")], "it can't be read: No such file"),
    ):
        assert main(["serve", "/nowhere", "--port", "0", *given]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_serve_chat_template_of_file_or_text_replaces_the_checkpoints(tmp_path):
    folder = with_chat_template(tmp_path / "model", "the checkpoint's")
    text = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(text)
    for given in (str(file), text):
        with serving_process(str(folder), "--num-pages", "9", "--chat-template", given) as (_, url):
            messages = {"messages": [{"role": "user", "content": "import os"}]}
            tokens = httpx.post(f"{url}/tokenize", json=messages).json()["tokens"]
            rendered = httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json()["prompt"]
            assert rendered == "# import os\n"
            assert httpx.post(f"{url}/v1/chat/completions", json={**messages, "max_tokens": 2}).status_code == 200


def test_serve_wrong_chat_template_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    broken, binary = tmp_path / "broken.jinja", tmp_path / "binary.jinja"
    broken.write_text("{% for message in messages %}\n{{ message.content }}")
    binary.write_bytes(b"\xff\xfe")
    for given, text in (
        (str(broken), "chat_template is not a Jinja template: line 2: Unexpected end of template"),
        ("{{ messages | shouted }}", "line 1: No filter named 'shouted'"),
        (str(tmp_path / "none"), f"chat_template = {str(tmp_path / 'none')!r}: it can't be read: No such file"),
        (str(binary), "it is not text in UTF-8"),
    ):
        assert main(["serve", "/nowhere", "--port", "0", "--chat-template", given]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_serve_access_log_in_json_has_a_line_for_each_request(tls):
    given = ["--access-log", "json", "--ssl-certfile", str(tls[0]), "--ssl-keyfile", str(tls[1]), "--num-pages", "9"]
    with serving_process(*given, stdout=subprocess.PIPE) as (process, url):
        assert httpx.get(f"{url}/health?a=1", verify=False).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={}, verify=False).status_code == 400
        process.terminate()
        lines = [json.loads(line) for line in process.stdout]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/health?a=1", 200),
        ("POST", "/v1/completions", 400),
    ]
    assert all(line["client"].startswith("127.0.0.1:") and line["http_version"] == "1.1" for line in lines)
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in lines)
