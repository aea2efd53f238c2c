"""Timing on a GPU beside peers: Quire in their place, the CPU in the GPU's, and tables of made-up results."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

import quire
from helpers import flash_attn
from quire.bench import cpu, dense, flash_attention, peers
from quire.bench.cells import Cell
from quire.bench.plot import plot

pytest.importorskip("triton")
from quire.bench import gpu


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that is the CPU, with Quire as its FlashInfer and its FlashAttention-3, and without cuDNN."""
    make = Cell.make
    device = SimpleNamespace(L2_cache_size=0, total_memory=1 << 40, major=9, minor=0)
    monkeypatch.setattr(Cell, "make", lambda cell, _device: make(cell))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "_MIN_BYTES", 0)
    monkeypatch.setattr(gpu, "ceilings", lambda: {"read_gb_s": 1e3, "matmul_tflop_s": 1e3})
    monkeypatch.setattr(gpu, "host_seconds", lambda call: cpu.medians([call], 1)[0])
    monkeypatch.setattr(gpu, "captured", list)
    monkeypatch.setattr(
        gpu, "seconds_in_turns", lambda graphs, rounds: [sum(cpu.medians(g, rounds)) / len(g) for g in graphs]
    )
    monkeypatch.setattr(peers, "flashinfer", lambda: quire)
    monkeypatch.setattr(flash_attention, "module", lambda: flash_attn)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kernels", "fa3"),
    [
        (["decode 4:2 d64 3x40", "decode 6:2 d64 3 mixed 100", "decode 4:2 d64 fp8 2x50"], ["cuda", "fa2"], []),
        (
            ["prefill ragged 4:2 d64 2x33", "prefill 4:2 d64 2x33", "prefill 4:2 d64 2x9@50"],
            ["fa2", "fa3"],
            ["varlen", "kvcache", "kvcache"],
        ),
        (
            ["prefill p4 6:2 d64 3x1@50+2x9@40", "prefill p1 4:2 d64 3x2@40 device", "prefill ragged 4:4 d64 2x4+1x9"],
            ["fa2", "fa3"],
            ["kvcache", "kvcache", "varlen"],
        ),
        (
            ["prefill mla3 p4 2x5@40", "prefill mla2 p16 1x9@30", "prefill mla4 1x3@20+2x1@9"],
            ["fa2", "fa3"],
            ["kvcache", "kvcache", "kvcache"],
        ),
        (["decode mla3 p4 2x40", "decode mla3 3 mixed 100", "decode mla2 p1 fp8 2x9"], ["fa2", "fa3"], []),
    ],
)
def test_bench_gpu_with_stand_ins_has_complete_rows(names, kernels, fa3, pretended):
    found = [json.loads(json.dumps(result, allow_nan=False)) for result in gpu.bench(names, "auto", 1)]
    assert [len(result["cells"]) for result in found] == [1, 2, 3]
    result = found[-1]
    assert (result["flashinfer"], result["fa3"]) == (quire.__version__, flash_attn.__version__)
    for name, row in zip(names, result["cells"], strict=True):
        assert row["cell"] == name
        assert row["family"] == "cpu"
        assert list(row["flashinfer"]) == kernels
        for found in (row, *row["flashinfer"].values(), *row.get("fa3", {}).values()):
            assert found["error"] < 3e-3
            assert min(found["us"], found["plan_host_us"], found["run_host_us"]) > 0
        assert (row["sdpa_us"] is None) == ("fp8" in name or "@" in name or "+" in name)
    assert [kernel for row in result["cells"] for kernel in row.get("fa3", {})] == fa3
    lines = gpu.table(result).splitlines()
    assert len(lines) == 2 + 3 + (4 if fa3 else 2)
    assert all("geometric mean of 3 of 3 cells" in line for line in lines[6::2])


def test_bench_gpu_without_peers_has_no_ratio(pretended, monkeypatch):
    monkeypatch.setattr(peers, "flashinfer", lambda: None)
    monkeypatch.setattr(flash_attention, "module", lambda: None)
    (result,) = gpu.bench(["prefill 4:2 d64 3x40"], "auto", 1)
    assert not {"flashinfer", "fa3"} & result.keys()
    assert not {"flashinfer", "fa3"} & result["cells"][0].keys()
    assert result["cells"][0]["sdpa_us"] > 0
    assert "ratio" not in gpu.table(result)


def test_bench_gpu_with_named_peers_times_them_alone(pretended, monkeypatch):
    (result,) = gpu.bench(["prefill ragged 4:2 d64 3x40"], "auto", 1, peers.names("fa3"))
    (row,) = result["cells"]
    assert "flashinfer" not in row.keys() | result.keys()
    assert (list(row["fa3"]), row["sdpa_us"]) == (["varlen"], None)
    (result,) = gpu.bench(["prefill ragged 4:2 d64 3x40"], "auto", 1, peers.names(""))
    assert "fa3" not in result["cells"][0]
    monkeypatch.setattr(flash_attention, "module", lambda: None)
    with pytest.raises(ValueError, match="--peers sdpa,fa3: fa3 is not installed"):
        next(gpu.bench(["prefill 4:2 d64 3x40"], "auto", 1, ["sdpa", "fa3"]))
    with pytest.raises(ValueError, match="--peers fa3,fa4: 'fa4' is unknown; there are fa3, flashinfer, cudnn"):
        peers.names("fa3,fa4")


@pytest.mark.parametrize("name", ["cudnn", "flex"])
def test_dense_peers_of_ragged_whole_prompts_match_the_oracle(name, pretended, monkeypatch):
    """torch's own kernel for cuDNN's, and FlexAttention without a C++ compiler."""
    compile = torch.compile
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(dense, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile(f, backend="eager", dynamic=dynamic))
    peer = peers.installed([name], (9, 0))[name]
    assert peer.version == {"cudnn": "9.10.2", "flex": torch.__version__}[name]
    row = gpu.measure("prefill ragged 6:2 d64 3x40", "auto", 1, {name: peer})
    (found,) = row[name].values()
    assert found["error"] < 3e-3
    for other in ("prefill 4:2 2x33", "prefill ragged 4:2 2x9@50", "prefill ragged 4:2 2x3+1x9", "decode 4:2 3x40"):
        assert name not in gpu.measure(other, "auto", 1, {name: peer}, baseline=False)


def test_bench_gpu_of_a_declined_cell_has_the_reason(pretended, tmp_path):
    (result,) = gpu.bench(["prefill 4:2 d64 3x40"], "hopper", 1, ["fa3"])
    (row,) = result["cells"]
    assert "us" not in row
    assert row["fa3"]["kvcache"]["us"] > 0
    head, _, line, _, summary = gpu.table(result).splitlines()
    assert head.startswith("| cell | Quire µs (TFLOP/s) | FA3 µs (TFLOP/s) | ratio to FA3 | of 1,000 TFLOP/s |")
    assert line.startswith("| prefill 4:2 d64 3x40 | failed |")
    assert summary.startswith("Quire (hopper) failed: prefill 4:2 d64 3x40 (")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot(result, tmp_path / "rates.png")


class Strange(quire.BatchDecodeWithPagedKVCacheWrapper):
    """Can't do without tensor cores, and is wrong with them."""

    def plan(self, *args, **options):
        if not self.use_tensor_cores:
            raise NotImplementedError("Unsupported group_size: 7")
        super().plan(*args, **options)

    def run(self, *args, **options):
        return super().run(*args, **options) * self.factor


@pytest.mark.parametrize(("factor", "reason"), [(1.5, "error 5.0e-01 against the oracle"), (float("nan"), "error nan")])
def test_bench_gpu_failed_peer_has_reason_and_no_ratio(factor, reason, pretended, monkeypatch):
    monkeypatch.setattr(Strange, "factor", factor, raising=False)
    strange = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Strange, __version__="0.7.2")
    monkeypatch.setattr(peers, "flashinfer", lambda: strange)
    row = gpu.measure("decode 4:2 d64 3x40", "auto", 1, peers.installed(["flashinfer"], (9, 0)))
    assert row["flashinfer"]["cuda"] == {"failed": "NotImplementedError: Unsupported group_size: 7"}
    assert list(row["flashinfer"]["fa2"]) == ["failed"]
    assert row["flashinfer"]["fa2"]["failed"].startswith(reason)
    assert peers.best(row) is None


def test_peers_kernels_of_each_operation_and_architecture_are_listed():
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


def test_table_of_decode_has_times_and_rates():
    assert gpu.table(made_up()).splitlines() == [
        "| cell | Quire µs | FlashInfer µs | ratio | gather + SDPA µs | GB/s | of 3,000 GB/s | error |"
        " host: plan µs | run µs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| decode gqa4 p16 1x1k | 20.0 | 10.0 cuda | 0.50 | 41 | 300 | 10% | 2.3e-03 | 19 | 11 |",
        "| decode 28:4 p16 64x2k | 100.0 | 200.0 fa2 | 2.00 | 400 | 2,700 | 90% | 2.3e-03 | 19 | 11 |",
        "| decode gqa4 p16 fp8 64 mixed 256k | 200.0 | failed | - | - | 2,000 | 67% | 2.3e-03 | 19 | 11 |",
        "",
        "FlashInfer's time over Quire's, geometric mean of 2 of 3 cells: 1.00.",
        "",
        "FlashInfer failed: decode gqa4 p16 fp8 64 mixed 256k (no).",
    ]


def made_up_prefill():
    """Results as of an H100 with all peers."""
    host = {"plan_host_us": 19.2, "run_host_us": 10.9, "error": 2.3e-3}
    return made_up() | {
        "fa3": "3.0",
        "cudnn": "9.10.2",
        "cells": [
            {
                "cell": "prefill ragged 8x2k",
                "family": "hopper",
                "us": 500.0,
                **host,
                "tflop_s": 500.0,
                "fa3": {"varlen": {"us": 400.0, **host}},
                "flashinfer": {"fa2": {"us": 1000.0, **host}, "fa3": {"us": 625.0, **host}},
                "cudnn": {"sdpa": {"us": 500.0, **host}},
                "sdpa_us": 800.0,
            },
            {
                "cell": "prefill p16 fp8 60x1@4k+4x500@4k device",
                "family": "triton",
                "us": 100.0,
                **host,
                "tflop_s": 70.0,
                "fa3": {"kvcache": {"failed": "RuntimeError: query and key\nmust have the same dtype" + "!" * 99}},
                "flashinfer": {"fa2": {"us": 140.0, **host}, "fa3": {"failed": "no"}},
                "sdpa_us": None,
            },
        ],
    }


def test_table_of_prefill_has_times_and_rates_of_all_peers():
    reason = "RuntimeError: query and key must have the same dtype" + "!" * (120 - 52)
    assert gpu.table(made_up_prefill()).splitlines() == [
        "| cell | Quire µs (TFLOP/s) | FA3 µs (TFLOP/s) | FlashInfer µs (TFLOP/s) | cuDNN µs (TFLOP/s) | ratio to FA3 |"
        " dense SDPA µs (TFLOP/s) | of 700 TFLOP/s | error | host: plan µs | run µs | family |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| prefill ragged 8x2k | 500.0 (500) | 400.0 (625) | 625.0 (400) fa3 | 500.0 (500) | 0.80 | 800.0 (312) | 71% |"
        " 2.3e-03 | 19 | 11 | hopper |",
        "| prefill p16 fp8 60x1@4k+4x500@4k device | 100.0 (70) | failed | 140.0 (50) fa2 | - | - | - | 10% |"
        " 2.3e-03 | 19 | 11 | triton |",
        "",
        "FA3's time over Quire's, geometric mean of 1 of 2 cells: 0.80.",
        "",
        "FlashInfer's time over Quire's, geometric mean of 2 of 2 cells: 1.32.",
        "",
        "cuDNN's time over Quire's, geometric mean of 1 of 2 cells: 1.00.",
        "",
        f"FA3 failed: prefill p16 fp8 60x1@4k+4x500@4k device ({reason}...).",
    ]


def test_plot_of_decode_has_bars_ratios_and_the_ceiling(tmp_path, monkeypatch):
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


def test_plot_of_prefill_has_bars_of_all_peers(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    plot(made_up_prefill() | {"flashinfer": "0.7.2"}, tmp_path / "rates.png")
    (axes,) = drawn[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["ragged, 8 × 2k", "fp8, tables on device, 60 × 1 of 4k + 4 × 500 of 4k"]
    places = dict(zip(labels, axes.get_yticks(), strict=True))
    bars = {bars.get_label(): [round(bar.get_width(), 3) for bar in bars] for bars in axes.containers}
    assert bars == {"Quire": [500, 70], "FA3 3.0": [625], "FlashInfer 0.7.2": [400, 50], "cuDNN 9.10.2": [500]}
    spans = sorted((bar.get_y(), bar.get_y() + bar.get_height()) for bars in axes.containers for bar in bars)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans)), "bars overlap"
    written = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert written["0.80×"] == places["ragged, 8 × 2k"]
    assert "vs FA3" in written
    save(drawn[0], tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_several_layers_has_the_default_one_first(tmp_path, monkeypatch):
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


def test_peers_with_compat_installed_find_only_the_real_flashinfer(tmp_path, monkeypatch):
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
