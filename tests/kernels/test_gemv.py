"""The product of one row and a matrix against float64, and as a part of compiled layers."""

from __future__ import annotations

import pytest
import torch

from helpers.interpret import INTERPRETED
from quire.bench.batches import relative_error
from quire.engine.projections import replace_linears
from quire.kernels.gemv import fits, gemv
from quire.steps import product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Triton's interpreter truncates what it stores as bfloat16 instead of rounding it.
PRECISION = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2 if INTERPRETED else 6e-3}


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_gemv_of_random_sizes_matches_float64(device, dtype, rng):
    for size in (rng.randint(1, 70), 1024, rng.choice((2056, 3072, 4096, 14336))):
        rows = rng.choice((1, 5, 64, 131))
        whole = torch.full((rows + 2, size), torch.nan, dtype=dtype, device=device)
        weight = whole[1:-1].copy_(torch.randn(rows, size))
        x = torch.randn(*rng.choice(((1,), (1, 1), ())), size).to(dtype).to(device)
        bias = rng.choice((None, torch.randn(rows).to(dtype).to(device)))
        assert fits(x, weight, bias)
        out = gemv(x, weight, bias)
        row, matrix = x.double().cpu(), weight.double().cpu().T
        added = torch.zeros(rows) if bias is None else bias.double().cpu()
        size_of_terms = row.abs() @ matrix.abs() + added.abs()
        assert out.shape == (*x.shape[:-1], rows)
        assert out.dtype == dtype
        assert ((out.cpu() - (row @ matrix + added)).abs() <= PRECISION[dtype] * size_of_terms).all()


def test_fits_of_unsupported_tensors_is_false():
    x, weight = torch.randn(1, 8), torch.randn(4, 8)
    assert fits(x, weight, None)
    assert fits(x, weight, torch.zeros(4))
    assert not fits(x, weight.bfloat16(), None)
    assert not fits(x.double(), weight.double(), None)  # it adds up in float32
    assert not fits(x, torch.randn(8, 4).T, None)
    assert not fits(x, weight, torch.zeros(4, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_layers_of_a_single_token_call_gemv(dtype, rng):
    """Replayed from a graph, in which each launch overlaps the one before."""
    torch.manual_seed(rng.randrange(1 << 31))
    size, names = 256, []
    layers = [torch.nn.Linear(size, size, bias=bias) for bias in (True, False)]
    block = torch.nn.Sequential(torch.nn.SiLU(), layers[0], torch.nn.LayerNorm(size), layers[1])
    block = block.to("cuda", dtype).requires_grad_(False)
    replace_linears([block])
    assert type(layers[0]) is not torch.nn.Linear

    def record(graph, inputs):
        names.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    recorded, compiled = (torch.compile(block, fullgraph=True, dynamic=True, backend=b) for b in (record, "inductor"))
    for tokens in (1, 5):
        x = torch.randn(1, tokens, size).to("cuda", dtype)
        expected = block.double()(x.double())
        block.to(dtype)
        recorded(x)
        for _ in range(3):
            out = compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = compiled(x)
        replayed.fill_(torch.nan)
        for _ in range(20):
            graph.replay()
        for result in (out, replayed):
            assert relative_error(result.cpu(), expected.cpu()) < 4 * PRECISION[dtype]
    assert [sum("gemv" in name for name in each) for each in names] == [2, 0]


def test_product_on_the_cpu_equals_linear():
    x, weight, bias = torch.randn(1, 8), torch.randn(4, 8), torch.randn(4)
    assert torch.equal(product(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
