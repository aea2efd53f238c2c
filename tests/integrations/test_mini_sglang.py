"""The driver of mini-sglang, as far as it runs without a GPU and without mini-sglang."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.paths import ROOT
from quire.bench.workloads import SHAPES

DRIVER = runpy.run_path(str(ROOT / "tools" / "mini_sglang.py"))


def test_write_checkpoint_tiny_shape_is_read_by_transformers(tmp_path, monkeypatch):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300}
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["qwen3-0.6b"] | small)
    DRIVER["write_checkpoint"]("tiny", tmp_path / "model")
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.hidden_size == 64
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert tokenizer.eos_token_id == 256


@pytest.mark.parametrize(
    ("others", "share"), [([[1, 2, 3], [4, 5, 6]], 1.0), ([[1, 9, 3], [4, 5, 6]], 4 / 6), ([[0, 2, 3], [0, 5, 6]], 0.0)]
)
def test_equal_share_counts_tokens_before_a_difference(others, share):
    assert DRIVER["equal_share"]([[1, 2, 3], [4, 5, 6]], others) == pytest.approx(share)


def test_run_without_mini_sglang_returns_the_error(tmp_path):
    args = SimpleNamespace(path=str(tmp_path), requests=1)
    result = DRIVER["run"]("quire", args, tmp_path)
    assert result["kernels"] == "quire"
    assert "No module named 'minisgl'" in result["error"]


def test_main_unknown_kernels_are_refused(capsys):
    with pytest.raises(SystemExit):
        DRIVER["main"](["--kernels", "quire,other"])
    assert "--kernels quire,other: other is none of quire, flashinfer" in capsys.readouterr().err
