"""`quire bench layers` with the CPU in the GPU's place: cells, what they compute, and tables of the results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.cli import main

pytest.importorskip("triton")
from quire.bench import cpu, gpu, layers, layers_table, peers

SMALL = [
    *("rmsnorm 64 x5", "layernorm 64 x5", "fused_add_rmsnorm 64 x5", "fused_add_rmsnorm_quant 64 x5"),
    *("silu_and_mul 32 x5", "gelu_and_mul 32 x5", "gelu_tanh_and_mul 32 x5", "gelu_and_mul_quant 32 x5"),
    *("silu_and_mul_quant 32 x5", "gelu_tanh_and_mul_quant 32 x5", "qk_norm_rope_append 4:2 x5"),
]


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that is the CPU, and a compiler that leaves functions as they are."""
    for name in ("empty", "randn", "rand", "ones", "randint", "randperm"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, make=make, **o: make(*a, **{k: v for k, v in o.items() if k != "device"})
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(L2_cache_size=1 << 14))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "graph_seconds", lambda runs, rounds: sum(cpu.medians(runs, rounds)) / len(runs))
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(layers, "_LARGE", 1 << 20)
    monkeypatch.setattr(peers, "flashinfer", lambda: None)


@pytest.mark.parametrize("name", SMALL)
def test_layer_cell_of_each_kind_equals_its_torch_formula(name, pretended):
    work = layers.LayerCell.parse(name).work()
    ours, theirs = ([x.clone() for x in work.inputs] for _ in range(2))
    here, there = work.ours(*ours), work.formula(*theirs)
    results = [*zip(ours, theirs, strict=True), *([(here, there)] if isinstance(there, torch.Tensor) else [])]
    if name.startswith("rmsnorm"):
        results = [(here, there)]
    for a, b in results:
        torch.testing.assert_close(
            a.float(), b.float(), rtol=0.15 if "quant" in name else 2e-2, atol=4e-2, equal_nan=True
        )


def test_bench_layers_with_a_plot_writes_table_and_plot(pretended, capsys, tmp_path):
    chosen = [word for name in SMALL[:2] for word in ("--cell", name)]
    assert main(["bench", "layers", *chosen, "--rounds", "1", "--plot", str(tmp_path / "layers.png")]) == 0
    table = capsys.readouterr().out
    assert "| rmsnorm 64 x5 |" in table
    assert "torch.compile µs" in table
    assert "FlashInfer" not in table
    assert (tmp_path / "layers.png").stat().st_size > 1000


def test_layers_table_of_a_failed_peer_has_the_reason(pretended):
    (result,) = layers.bench(["rmsnorm 64 x5"], 1, ["torch.compile"])
    result["cells"][0]["flashinfer"] = {"failed": "RuntimeError: no\ncompiler"}
    text = layers_table.table(result)
    assert "| failed |" in text
    assert "FlashInfer failed: rmsnorm 64 x5 (RuntimeError: no compiler)." in text
    with pytest.raises(ValueError, match="flashinfer is not installed"):
        next(layers.bench(["rmsnorm 64 x5"], 1, ["flashinfer"]))


WRONG = ["", "rmsnorm", "rmsnorm 64", "paint 64 x5", "rmsnorm 0 x5", "rmsnorm 64 x0", "rmsnorm 8:2 x5"]


@pytest.mark.parametrize("name", [*WRONG, "qk_norm_rope_append 8 x5"])
def test_layer_cell_parse_of_an_impossible_cell_is_refused(name):
    with pytest.raises(ValueError, match=f"cell '{name}'"):
        layers.LayerCell.parse(name)


def test_listed_layer_cells_are_parsed_and_different():
    assert len(set(map(layers.LayerCell.parse, layers.LAYERS))) == len(layers.LAYERS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_layers_without_a_gpu_is_refused(capsys):
    assert main(["bench", "layers"]) == 2
    assert "quire bench layers times kernels on a GPU" in capsys.readouterr().err


def test_bench_layers_with_an_unknown_peer_names_it(pretended, capsys):
    assert main(["bench", "layers", "--peers", "fa3"]) == 2
    assert "'fa3' is unknown; there are torch.compile, flashinfer" in capsys.readouterr().err
