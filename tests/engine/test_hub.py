"""Names of the Hugging Face hub are downloaded to its cache, from a server in this process that speaks its protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from huggingface_hub import constants

from helpers.checkpoints import change_config, save_with_tokenizer
from helpers.hub_server import Repository, hub_server
from helpers.paths import ROOT
from helpers.server import served, serving_process
from quire.cli import main
from quire.engine import LLM, EngineConfig, SamplingParams
from quire.engine.hub import checkpoint_folder, download_weights, is_hub_name, model_name
from quire.engine.load import load_model

NAME = "some-one/Tiny.model_1"
NEEDED = {
    "config.json",
    "1_Pooling/config.json",
    "model.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A repository with more files than a model needs."""
    folder = save_with_tokenizer("llama", tmp_path_factory.mktemp("repository"))
    others = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "model.gguf", "modeling_own.py")
    folders = ("original/params.json", "original/model.safetensors", "onnx/model.onnx", "2_Dense/model.safetensors")
    for name in (*others, *folders, "1_Pooling/config.json", ".gitattributes"):
        (folder / name).parent.mkdir(exist_ok=True)
        # A file is downloaded once if it has the contents of another.
        (folder / name).write_text(json.dumps({"name": name}))
    return folder


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """A hub with one model, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    with hub_server() as server:
        server.repositories[NAME] = Repository(checkpoint)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture
def offline(monkeypatch):
    """A function after whose call huggingface_hub asks nobody."""
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def own(hub, folder):
    """The repository of the hub's model, with a copy of its files that a test may change."""
    hub.repositories[NAME].folder = shutil.copytree(hub.repositories[NAME].folder, folder)
    return hub.repositories[NAME]


def tokens(model, **options):
    with LLM(model, num_pages=64, **options) as llm:
        return llm.generate(["import os"], GREEDY)[0].token_ids


def download(**options):
    folder = checkpoint_folder(NAME, **options)
    download_weights(NAME, folder)
    return folder


def refusal(kind, model=NAME, **options):
    with pytest.raises(kind) as raised:
        LLM(model, num_pages=64, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_llm_with_a_name_downloads_what_it_needs_and_runs(hub, checkpoint):
    assert tokens(NAME) == tokens(checkpoint)
    assert set(hub.downloads) >= NEEDED
    assert {Path(name).suffix for name in hub.downloads} <= {".json", ".safetensors", ".jinja"}
    assert [name for name in hub.downloads if name.endswith(".safetensors")] == ["model.safetensors"]
    assert [name for name in hub.downloads if "/" in name] == ["1_Pooling/config.json"]


def test_llm_with_a_name_that_is_in_the_cache_downloads_nothing(hub):
    first, downloads = tokens(NAME), len(hub.downloads)
    before = hub.requests
    assert tokens(NAME) == first
    assert len(hub.downloads) == downloads
    assert hub.requests == before + 1


def test_llm_with_dummy_weights_downloads_none(hub):
    with LLM(NAME, num_pages=64, load_format="dummy"):
        assert not any(name.endswith(".safetensors") for name in hub.downloads)


def test_llm_with_a_model_that_cannot_be_run_downloads_no_weights(hub, tmp_path):
    change_config(own(hub, tmp_path / "files").folder, quantization_config={"quant_method": "of_next_year"})
    assert "quant_method = 'of_next_year'" in refusal(ValueError)
    assert "config.json" in hub.downloads
    assert not any(name.endswith(".safetensors") for name in hub.downloads)


def test_checkpoint_folder_with_code_downloads_it(hub):
    checkpoint_folder(NAME)
    assert "modeling_own.py" not in hub.downloads
    checkpoint_folder(NAME, code=True)
    assert "modeling_own.py" in hub.downloads


@pytest.mark.parametrize("revision", ["v1.0", "b" * 40])
def test_load_model_with_a_revision_reads_its_files(revision, hub, tmp_path):
    repository = own(hub, tmp_path / "files")
    download()
    repository.revisions["v1.0"] = "b" * 40
    change_config(repository.folder, max_position_embeddings=128)
    device = torch.device("cpu")
    assert load_model(NAME, device, EngineConfig()).context == 256
    model = load_model(NAME, device, EngineConfig(revision=revision))
    assert model.context == 128
    assert model.folder.name == "b" * 40


def test_checkpoint_folder_after_a_new_commit_downloads_it(hub, tmp_path):
    repository = own(hub, tmp_path / "files")
    first = download()
    repository.revisions["main"] = "c" * 40
    change_config(repository.folder, max_position_embeddings=128)
    second = download()
    assert [folder.name[0] for folder in (first, second)] == ["a", "c"]
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 128


def test_llm_with_an_unknown_revision_names_it(hub):
    message = refusal(FileNotFoundError, revision="v2")
    assert message == f"revision = 'v2': {NAME} has no such branch, tag or commit"


def test_llm_with_a_folder_and_a_revision_is_refused(checkpoint):
    message = refusal(ValueError, checkpoint, revision="v2")
    assert message == f"revision = 'v2': {checkpoint} is a folder, and only names of the hub have revisions"


def test_llm_with_an_unknown_name_says_where_it_was_looked_for(hub):
    message = refusal(FileNotFoundError, "no/model")
    assert message == (
        f"there is no model folder no/model, and {hub.url} has no model of that name (a private one needs a token in "
        "HF_TOKEN)"
    )


def test_llm_with_a_gated_model_says_what_to_do(hub):
    hub.repositories[NAME].gated = True
    message = refusal(PermissionError)
    assert message == (
        f"{NAME} is gated: accept its terms at {hub.url}/{NAME}, and set HF_TOKEN to a token of your account"
    )


def test_llm_with_a_gated_model_and_a_token_runs(hub, monkeypatch):
    hub.repositories[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    assert len(tokens(NAME)) == 5


def test_llm_offline_with_a_model_in_the_cache_runs_without_a_request(hub, offline):
    expected = tokens(NAME)
    requests = hub.requests
    offline()
    assert tokens(NAME) == expected
    assert hub.requests == requests


def test_llm_offline_without_the_model_in_the_cache_says_so(hub, offline):
    offline()
    message = refusal(FileNotFoundError)
    where = f"the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it"
    assert message == f"{NAME} is not whole in {where}"
    assert refusal(FileNotFoundError, revision="v1") == f"{NAME} is not whole in revision v1 in {where}"
    assert hub.requests == 0


def test_llm_offline_without_the_weights_in_the_cache_is_refused(hub, offline):
    folder = checkpoint_folder(NAME)
    offline()
    message = refusal(FileNotFoundError)
    assert message.startswith(f"{NAME} is not whole in revision {folder.name} in the cache ")
    assert message.endswith("and HF_HUB_OFFLINE forbids to download it")


def test_llm_without_a_connection_says_so(hub, monkeypatch):
    # Nobody listens at the port of a server that has been closed.
    with hub_server() as closed:
        url = closed.url
    monkeypatch.setattr(constants, "ENDPOINT", url)
    message = refusal(ConnectionError)
    where = f"the cache {constants.HF_HUB_CACHE}, and downloading it from {url} fails: ConnectError: "
    assert message.startswith(f"{NAME} is not whole in {where}")


def test_llm_without_a_connection_runs_what_is_in_the_cache(hub, monkeypatch):
    expected = tokens(NAME)
    with hub_server() as closed:
        url = closed.url
    monkeypatch.setattr(constants, "ENDPOINT", url)
    assert tokens(NAME) == expected


def test_llm_with_a_file_that_the_hub_fails_to_send_says_so(hub):
    hub.repositories[NAME].failing = {"model.safetensors"}
    message = refusal(ConnectionError)
    assert f", and downloading it from {hub.url} fails: BadRequestError: " in message


def test_llm_after_a_download_that_was_cut_downloads_that_file_alone(hub, monkeypatch):
    hub.repositories[NAME].cut = {"model.safetensors"}
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert refusal(OSError).startswith(f"{NAME} could not be downloaded: ")
    folder = checkpoint_folder(NAME)
    assert not any(folder.glob("*.safetensors"))
    hub.repositories[NAME].cut = set()
    hub.downloads.clear()
    assert len(tokens(NAME)) == 5
    assert hub.downloads == ["model.safetensors"]


NAMES = {
    "Qwen/Qwen3-0.6B": True,
    "a_b/c.d": True,
    "/nowhere/model": False,
    "./some/model": False,
    "a/b/c": False,
    "gpt2": False,
    "../model": False,
    "here/model": False,
    "": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_is_hub_name_of_a_path_is_false(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert is_hub_name(name) == NAMES[name]


def test_llm_with_a_folder_of_two_parts_asks_no_hub(hub, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / NAME)
    assert tokens(NAME) == tokens(checkpoint)
    assert hub.requests == 0
    assert model_name(NAME) == "Tiny.model_1"


def test_server_of_a_name_of_the_hub_has_that_name(hub):
    httpx = pytest.importorskip("httpx")
    with LLM(NAME, num_pages=64) as llm, served(llm) as url:
        assert llm.name == NAME
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == [NAME]
        assert httpx.get(f"{url}/v1/models/{NAME}").json()["id"] == NAME
        body = {"model": NAME, "prompt": "import os", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).json()["model"] == NAME


def environment(hub, tmp_path):
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path)}
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", **cache}


@pytest.mark.slow
def test_serve_with_a_name_downloads_and_serves_it(hub, tmp_path):
    httpx = pytest.importorskip("httpx")
    with serving_process(NAME, "--num-pages", "64", **environment(hub, tmp_path)) as (_, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == NAME


@pytest.mark.slow
def test_generate_with_a_name_prints_no_progress_to_a_pipe(hub, tmp_path):
    command = [sys.executable, "-m", "quire", "generate", "import os", "--model", NAME, "--revision", "main", "--json"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment(hub, tmp_path)}
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, env=variables, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in hub.downloads
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "calibrate", "bench"])
def test_commands_with_an_unknown_name_print_one_line(command, hub, capsys, tmp_path, monkeypatch):
    # For the engine's process of the server.
    for name, value in environment(hub, tmp_path).items():
        monkeypatch.setenv(name, value)
    given = {
        "generate": ["x", "--model", "no/model"],
        "chat": ["no/model"],
        "serve": ["no/model", "--port", "0"],
        "calibrate": ["scales", "x", "--model", "no/model"],
        "bench": ["throughput", "--device", "cpu", "--model", "no/model"],
    }
    assert main([command, *given[command]]) == 2
    assert "quire: error: there is no model folder no/model, and " in capsys.readouterr().err.splitlines()[-1]
