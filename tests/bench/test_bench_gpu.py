"""Timing on a GPU beside FlashInfer: Quire in its place, the CPU in the GPU's, and tables of made-up results."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

import quire
from quire.bench import cpu, peers
from quire.bench.cells import Cell
from quire.bench.plot import plot

pytest.importorskip("triton")
from quire.bench import gpu


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that is the CPU, with Quire as its FlashInfer."""
    make = Cell.make
    device = SimpleNamespace(L2_cache_size=0, total_memory=1 << 40, major=9, minor=0)
    monkeypatch.setattr(Cell, "make", lambda cell, _device: make(cell))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "_MIN_BYTES", 0)
    monkeypatch.setattr(gpu, "ceilings", lambda: {"read_gb_s": 1e3, "matmul_tflop_s": 1e3})
    monkeypatch.setattr(gpu, "host_seconds", lambda call: cpu.medians([call], 1)[0])
    monkeypatch.setattr(gpu, "graph_seconds", lambda runs, rounds: sum(cpu.medians(runs, rounds)) / len(runs))
    monkeypatch.setattr(peers, "flashinfer", lambda: quire)


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        (["decode 4:2 d64 3x40", "decode 6:2 d64 3 mixed 100", "decode 4:2 d64 fp8 2x50"], ["cuda", "fa2"]),
        (["prefill ragged 4:2 d64 2x33", "prefill 4:2 d64 2x33", "prefill 4:2 d64 2x9@50"], ["fa2", "fa3"]),
        (["decode mla3 p4 2x40", "decode mla3 3 mixed 100", "decode mla2 p1 fp8 2x9"], ["fa2", "fa3"]),
    ],
)
def test_rows_from_end_to_end(names, kernels, pretended):
    found = [json.loads(json.dumps(result, allow_nan=False)) for result in gpu.bench(names, "auto", 1)]
    assert [len(result["cells"]) for result in found] == [1, 2, 3]
    result = found[-1]
    assert result["flashinfer"] == quire.__version__
    for name, row in zip(names, result["cells"], strict=True):
        assert row["cell"] == name
        assert list(row["flashinfer"]) == kernels
        for found in (row, *row["flashinfer"].values()):
            assert found["error"] < 3e-3
            assert min(found["us"], found["plan_host_us"], found["run_host_us"]) > 0
        assert (row["sdpa_us"] is None) == ("fp8" in name or "@" in name)
    lines = gpu.table(result).splitlines()
    assert len(lines) == 2 + 3 + 2
    assert "geometric mean of 3 of 3 cells" in lines[-1]


def test_without_flashinfer(pretended, monkeypatch):
    monkeypatch.setattr(peers, "flashinfer", lambda: None)
    (result,) = gpu.bench(["decode 4:2 d64 3x40"], "auto", 1)
    assert "flashinfer" not in result
    assert "flashinfer" not in result["cells"][0]
    assert "FlashInfer" not in gpu.table(result)


class Strange(quire.BatchDecodeWithPagedKVCacheWrapper):
    """Can't do without tensor cores, and is wrong with them."""

    def plan(self, *args, **options):
        if not self.use_tensor_cores:
            raise NotImplementedError("Unsupported group_size: 7")
        super().plan(*args, **options)

    def run(self, *args, **options):
        return super().run(*args, **options) * self.factor


@pytest.mark.parametrize(("factor", "told"), [(1.5, "error 5.0e-01 against the oracle"), (float("nan"), "error nan")])
def test_what_fails_is_told_and_does_not_count(factor, told, pretended, monkeypatch):
    monkeypatch.setattr(Strange, "factor", factor, raising=False)
    row = gpu.measure("decode 4:2 d64 3x40", "auto", 1, SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Strange))
    assert row["flashinfer"]["cuda"] == {"failed": "NotImplementedError: Unsupported group_size: 7"}
    assert list(row["flashinfer"]["fa2"]) == ["failed"]
    assert row["flashinfer"]["fa2"]["failed"].startswith(told)
    assert peers.best(row) is None


def test_which_kernels_there_are():
    decode, prefill = Cell.parse("decode 8x2k"), Cell.parse("prefill 8x2k")
    tensor_cores = {name: options["use_tensor_cores"] for name, options in peers.kernels(decode, (9, 0)).items()}
    assert tensor_cores == {"cuda": False, "fa2": True}
    assert list(peers.kernels(prefill, (9, 0))) == ["fa2", "fa3"]
    assert list(peers.kernels(prefill, (8, 0))) == list(peers.kernels(prefill, (10, 0))) == ["fa2"]


def made_up():
    """Results as of an H100 with FlashInfer."""
    host = {"plan_host_us": 19.2, "run_host_us": 10.9, "error": 2.3e-3}
    return {
        "device": "a GPU",
        "date": "2026-11-21",
        "quire": "0.1.0",
        "ceilings": {"read_gb_s": 3000.0, "matmul_tflop_s": 700.0},
        "cells": [
            {
                "cell": "decode gqa4 p16 1x1k",
                "us": 20.0,
                **host,
                "gb_s": 300.0,
                "flashinfer": {"cuda": {"us": 10.0, **host}, "fa2": {"us": 12.0, **host}},
                "sdpa_us": 41.0,
            },
            {
                "cell": "decode 28:4 p16 64x2k",
                "us": 100.0,
                **host,
                "gb_s": 2700.0,
                "flashinfer": {"cuda": {"failed": "ValueError: group_size"}, "fa2": {"us": 200.0, **host}},
                "sdpa_us": 400.0,
            },
            {
                "cell": "decode gqa4 p16 fp8 64 mixed 256k",
                "us": 200.0,
                **host,
                "gb_s": 2000.0,
                "flashinfer": {"cuda": {"failed": "no"}, "fa2": {"failed": "no"}},
                "sdpa_us": None,
            },
        ],
    }


def test_the_table():
    assert gpu.table(made_up()).splitlines() == [
        "| cell | Quire µs | FlashInfer µs | ratio | gather + SDPA µs | GB/s | of 3,000 GB/s | error |"
        " host: plan µs | run µs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| decode gqa4 p16 1x1k | 20.0 | 10.0 cuda | 0.50 | 41 | 300 | 10% | 2.3e-03 | 19 | 11 |",
        "| decode 28:4 p16 64x2k | 100.0 | 200.0 fa2 | 2.00 | 400 | 2,700 | 90% | 2.3e-03 | 19 | 11 |",
        "| decode gqa4 p16 fp8 64 mixed 256k | 200.0 | failed | - | - | 2,000 | 67% | 2.3e-03 | 19 | 11 |",
        "",
        "FlashInfer's time over Quire's, geometric mean of 2 of 3 cells: 1.00.",
    ]


def test_the_picture(tmp_path, monkeypatch):
    """A bar for each cell, FlashInfer's where it computed the cell, with the ratio, and the ceiling as a line."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    plot(made_up() | {"flashinfer": "0.7.2"}, tmp_path / "rates.png")
    (figure,) = drawn
    (axes,) = figure.axes
    bars = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert bars == {"Quire": [300.0, 2700.0, 2000.0], "FlashInfer 0.7.2": [600.0, 1350.0]}
    assert [list(line.get_xdata()) for line in axes.lines] == [[3000.0, 3000.0]]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["1 × 1k", "28 heads over 4, 64 × 2k", "fp8, 64 mixed, 256k in all"]
    heights = dict(zip(labels, axes.get_yticks(), strict=True))
    written = {text.get_text(): text.get_position()[1] for text in axes.texts if "×" in text.get_text()[-1]}
    assert written == {"0.50×": heights[labels[0]], "2.00×": heights[labels[1]]}
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > 3000
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == ["FlashInfer 0.7.2", "Quire", "memory read rate: 3,000 GB/s"]
    save(figure, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_puts_the_default_layer_first_by_tokens(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    names = ["prefill ragged 8x512", "prefill 4x512@16k", "prefill mha d64 p1 fp16 2x100", "prefill 8x2k"]
    result = made_up() | {"cells": [{"cell": name, "tflop_s": 100.0} for name in names]}
    plot(result, tmp_path / "rates.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "8 × 2k",
        "4 × 512 of 16k",
        "ragged, 8 × 512",
        "32 heads over 32, head_dim 64, pages of 1, fp16, 2 × 100",
    ]


def test_the_stand_in_is_never_taken_for_flashinfer(tmp_path, monkeypatch):
    """Neither where nothing is installed, nor before one that is."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("BatchDecodeWithPagedKVCacheWrapper = 'theirs'\n")
    info = tmp_path / "flashinfer_python-0.7.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from quire.bench import peers
assert peers.flashinfer().BatchDecodeWithPagedKVCacheWrapper == "theirs"
del sys.modules["flashinfer"]
import quire.compat
try:
    peers.flashinfer()
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "flashinfer means Quire in this process" in done.stdout, done.stderr

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(peers, "version", absent)
    monkeypatch.setitem(sys.modules, "flashinfer", quire)
    assert peers.flashinfer() is None
