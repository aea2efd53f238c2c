"""Code that comes with a checkpoint runs with trust_remote_code=True only, and nobody is asked."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from transformers import AutoConfig

from helpers.checkpoints import change_config, save_with_tokenizer
from helpers.paths import ROOT
from quire.cli import main
from quire.engine import LLM, SamplingParams

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
from pathlib import Path
from transformers import LlamaForCausalLM
{imported}

class OwnForCausalLM(LlamaForCausalLM):
    pass

Path({marker!r}).touch()
"""
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass

Path({marker!r}).touch()
"""
NEEDED = "needs code that comes with it, which is run with trust_remote_code=True (--trust-remote-code) only"


@pytest.fixture
def folder(tmp_path):
    return save_with_tokenizer("llama", tmp_path / "model")


@pytest.fixture
def marker(tmp_path):
    """A file that the code makes when it is run."""
    return tmp_path / "was run"


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    def asked(prompt=""):
        raise AssertionError(f"a question is asked: {prompt}")

    monkeypatch.setattr("builtins.input", asked)


def with_model(folder, marker):
    """A checkpoint of a type that Transformers does not have."""
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    imported = "from .configuration_own import OwnConfig"
    (folder / "modeling_own.py").write_text(
        MODEL.format(marker=str(marker), imported=imported) + "OwnForCausalLM.config_class = OwnConfig\n"
    )
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    return change_config(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=code)


def with_class(folder, marker, model_type):
    """A checkpoint with code for its model alone: for a type of Transformers."""
    (folder / "modeling_own.py").write_text(MODEL.format(marker=str(marker), imported=""))
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    return change_config(folder, model_type=model_type, architectures=["OwnForCausalLM"], auto_map=code)


def with_tokenizer(folder, marker, name="OwnTokenizer"):
    """A checkpoint whose tokenizer is code."""
    (folder / "tokenization_own.py").write_text(TOKENIZER.format(marker=str(marker)))
    file = folder / "tokenizer_config.json"
    code = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name, "auto_map": code}))
    return folder


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_llm_with_a_model_of_code_is_refused(load_format, folder, marker):
    with pytest.raises(ValueError, match="trust_remote_code") as raised:
        LLM(with_model(folder, marker), num_pages=64, load_format=load_format)
    assert str(raised.value) == f"{folder} {NEEDED}"
    assert not marker.exists()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_llm_with_code_for_a_type_without_causal_language_models_is_refused(load_format, folder, marker):
    with pytest.raises(ValueError, match="trust_remote_code") as raised:
        LLM(with_class(folder, marker, "vit"), num_pages=64, load_format=load_format)
    assert str(raised.value) == f"{folder} {NEEDED}"
    assert not marker.exists()


def test_llm_with_a_tokenizer_of_code_is_refused(folder, marker):
    with pytest.raises(ValueError, match="trust_remote_code") as raised:
        LLM(with_tokenizer(folder, marker), num_pages=64)
    assert str(raised.value) == f"the tokenizer of {folder} {NEEDED}"
    assert not marker.exists()


def test_llm_with_code_beside_a_model_of_transformers_runs_without_it(folder, marker):
    with LLM(folder, num_pages=64) as llm:
        (expected,) = llm.generate(["import os"], SamplingParams(max_tokens=5, ignore_eos=True))
    with_tokenizer(with_class(folder, marker, "llama"), marker, name="PreTrainedTokenizerFast")
    with LLM(folder, num_pages=64) as llm:
        assert type(llm.model.network).__module__.startswith("transformers.")
        assert llm.generate(["import os"], SamplingParams(max_tokens=5, ignore_eos=True)) == [expected]
    assert not marker.exists()


def run(tmp_path, *arguments):
    """A command that is given "y" for an answer, with an empty cache of code."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_MODULES_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "quire", *arguments, "--device", "cpu"]
    return subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, env=variables, timeout=120)


@pytest.mark.slow
def test_command_with_code_runs_it_with_the_flag_alone(folder, marker, tmp_path):
    given = ["generate", "import os", "--max-tokens", "5", "--ignore-eos", "--json", "--model", str(folder)]
    expected = run(tmp_path, *given)
    with_tokenizer(with_model(folder, marker), marker)
    refused = run(tmp_path, *given)
    assert (refused.returncode, refused.stderr) == (2, f"quire: error: {folder} {NEEDED}\n")
    assert not marker.exists()
    done = run(tmp_path, *given, "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    ours, theirs = (json.loads(x.stdout.splitlines()[0])["token_ids"] for x in (done, expected))
    assert ours == theirs
    assert len(ours) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--model"],
        ["chat"],
        ["serve"],
        ["calibrate", "scales", "x", "--model"],
        ["bench", "throughput", "--device", "cpu", "--model"],
        ["bench", "latency", "--device", "cpu", "--model"],
    ],
    ids=" ".join,
)
def test_commands_that_load_a_model_have_the_flag(arguments, monkeypatch, tmp_path, folder, marker, capsys):
    """Each refuses code without the flag, and passes the flag on to Transformers. The server's engine, which is in
    another process, runs the code by then.
    """

    def load(folder, local_files_only, trust_remote_code):
        raise ValueError(f"trusted: {trust_remote_code}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quire.bench.cpu.ceilings", dict)
    command = [*arguments, str(with_model(folder, marker))]
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(f"quire: error: {folder} {NEEDED}\n")
    monkeypatch.setattr(AutoConfig, "from_pretrained", load)
    monkeypatch.setattr("quire.server.engine_process.load_tokenizer", lambda folder, trust: load(folder, True, trust))
    assert main([*command, "--trust-remote-code"]) == 2
    assert "trusted: True" in capsys.readouterr().err
    assert marker.exists() == (arguments == ["serve"])


def test_calls_that_may_load_code_say_whether_they_are_trusted():
    """Transformers asks on stdin if they do not."""
    found = 0
    for file in (ROOT / "src" / "quire").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                # `kind` is one of the classes that load models.
                if owner.startswith(("Auto", "kind")) and node.func.attr in ("from_pretrained", "from_config"):
                    found += 1
                    assert "trust_remote_code" in {keyword.arg for keyword in node.keywords}, (file, node.lineno)
    assert found >= 6
