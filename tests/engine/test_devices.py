"""The device "auto", which is the default of LLM and of all commands."""

from __future__ import annotations

import io

import pytest
import torch

pytest.importorskip("transformers")

from quire.cli import main
from quire.engine import LLM, EngineConfig, SamplingParams, arguments, calibrate

# What an LLM calls, which the fixture `cpu_by_default` replaces later.
default_device = arguments.default_device

COMMANDS = {
    "generate": ["x"],
    "chat": [],
    "calibrate": ["scales", "x"],
}


@pytest.mark.parametrize(("there_is", "device"), [(True, "cuda"), (False, "cpu")])
def test_default_device_is_a_gpu_where_there_is_one(there_is, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is)
    assert default_device() == device


def test_usable_device_of_auto_is_the_default(monkeypatch):
    assert arguments.usable_device("auto") == torch.device("cpu")
    monkeypatch.setattr(arguments, "default_device", lambda: "meta")
    assert arguments.usable_device("auto") == torch.device("meta")
    assert arguments.usable_device("cpu") == arguments.usable_device(torch.device("cpu")) == torch.device("cpu")


def test_llm_without_a_device_takes_the_default(monkeypatch, tmp_path):
    assert EngineConfig().device == "auto"
    monkeypatch.setattr(arguments, "default_device", lambda: "abacus")
    with pytest.raises(ValueError, match="device = 'abacus' can't be used"):
        LLM(num_pages=8)
    with pytest.raises(ValueError, match="device = 'abacus' can't be used"):
        calibrate.calibrate(None, ["x"], tmp_path / "scales")
    LLM(num_pages=8, device="cpu").close()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_without_a_device_takes_the_default(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(arguments, "default_device", lambda: "abacus")
    assert main([command, *COMMANDS[command]]) == 2
    assert "device = 'abacus' can't be used" in capsys.readouterr().err


def test_serve_without_a_device_leaves_the_choice_to_the_process_of_the_engine(monkeypatch, capsys):
    def refuse(self, model, config, *others):
        raise ValueError(f"device = {config.device!r}")

    monkeypatch.setattr("quire.server.EngineProcess.__init__", refuse)
    assert main(["serve", "--port", "0"]) == 2
    assert "device = 'auto'" in capsys.readouterr().err


@pytest.mark.gpu
def test_llm_without_a_device_runs_on_the_gpu(monkeypatch):
    monkeypatch.setattr(arguments, "default_device", default_device)
    with LLM(num_pages=64, max_num_seqs=2, max_batched_tokens=64, compile=False) as llm:
        assert llm.model.device.type == "cuda"
        assert len(llm.generate("x = ", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
