"""The product of one or a few rows and a matrix against float64, and as a part of compiled layers."""

from __future__ import annotations

import pytest
import torch

from helpers.interpret import INTERPRETED
from quire.bench.batches import relative_error
from quire.engine.projections import replace_linears
from quire.kernels.skinny_gemm import is_skinny, max_skinny_rows, skinny_gemm
from quire.steps import product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_ROWS = max_skinny_rows(torch.float16)
# Triton's interpreter truncates what it stores as bfloat16 instead of rounding it.
PRECISION = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2 if INTERPRETED else 6e-3}


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_skinny_gemm_of_one_row_matches_float64(device, dtype, rng):
    for size in (rng.randint(1, 70), 1024, rng.choice((2056, 3072, 4096, 14336))):
        x = torch.randn(*rng.choice(((1,), (1, 1), ())), size)
        check(x.to(dtype).to(device), rng)


# Triton's interpreter does not multiply matrices of bfloat16.
@pytest.mark.interpret(dtype=[torch.float16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_skinny_gemm_of_a_few_rows_matches_float64(device, dtype, rng):
    for size in (rng.randint(1, 70), 1024, rng.choice((2056, 3072, 4096))):
        for few in (rng.randint(2, 8), rng.randint(9, MAX_ROWS)):
            x = torch.randn(*rng.choice(((), (1,))), few, size)
            check(x.to(dtype).to(device), rng)


@pytest.mark.gpu
def test_skinny_gemm_of_a_large_matrix_matches_float64(rng):
    """Up to 8 rows by Triton, and more by cuBLAS."""
    weight = torch.randn((1 << 15) + 8, 1032, device="cuda", dtype=torch.bfloat16)
    for few in (rng.randint(2, 8), rng.randint(9, MAX_ROWS)):
        x = torch.randn(1, few, 1032, device="cuda", dtype=torch.bfloat16)
        out, exact = skinny_gemm(x, weight, None), x.double() @ weight.double().T
        assert relative_error(out.cpu(), exact.cpu()) < PRECISION[torch.bfloat16]


def check(x, rng):
    """Compare the product of x and a matrix, around which the memory is NaN, with that of float64."""
    dtype, size, rows = x.dtype, x.shape[-1], rng.choice((1, 5, 64, 131))
    whole = torch.full((rows + 2, size), torch.nan, dtype=dtype, device=x.device)
    weight = whole[1:-1].copy_(torch.randn(rows, size))
    bias = rng.choice((None, torch.randn(rows).to(x)))
    assert is_skinny(x, weight, bias)
    out = skinny_gemm(x, weight, bias)
    exact_x, matrix = x.double().cpu(), weight.double().cpu().T
    added = torch.zeros(rows) if bias is None else bias.double().cpu()
    size_of_terms = exact_x.abs() @ matrix.abs() + added.abs()
    assert out.shape == (*x.shape[:-1], rows)
    assert out.dtype == dtype
    assert ((out.cpu() - (exact_x @ matrix + added)).abs() <= PRECISION[dtype] * size_of_terms).all()


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_skinny_gemm_of_a_row_does_not_depend_on_the_rows_beside_it(device, rng):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("torch computes it")
    weight = torch.randn(50, 1030).half().to(device)
    for most in (8, MAX_ROWS):
        x = torch.randn(most, 1030).half().to(device)
        few = rng.randint(most // 2 + 1, most - 1)
        expected = skinny_gemm(x, weight, None)[:few]
        beside = torch.cat([x[:few], torch.full_like(x[few:], torch.nan)])
        assert torch.equal(skinny_gemm(beside, weight, None)[:few], expected)
        assert torch.equal(skinny_gemm(x[:few], weight, None), expected)


def test_is_skinny_of_unsupported_tensors_is_false():
    x, weight = torch.randn(1, 8), torch.randn(4, 8)
    assert is_skinny(x, weight, None)
    assert is_skinny(x, weight, torch.zeros(4))
    assert not is_skinny(x, weight.bfloat16(), None)
    # It adds up in float32.
    assert not is_skinny(x.double(), weight.double(), None)
    assert not is_skinny(x, torch.randn(8, 4).T, None)
    assert not is_skinny(x, weight, torch.zeros(4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_is_skinny_depends_on_the_number_of_rows(dtype):
    weight = torch.randn(4, 8)
    rows = [n for n in range(20) if is_skinny(torch.randn(n, 8).to(dtype), weight.to(dtype), None)]
    assert rows == list(range(1, MAX_ROWS + 1))
    # Tensor cores would round float32.
    assert [n for n in range(20) if is_skinny(torch.randn(n, 8), weight, None)] == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_layers_of_few_tokens_call_skinny_gemm(dtype, rng):
    """Replayed from a graph, in which each launch overlaps the one before."""
    # Modules of one class share the number of times that they may be compiled.
    torch._dynamo.reset()
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
    for tokens in (30, 5, 1):
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
    found = [sum("skinny_gemm" in name for name in each) for each in names]
    assert found == ([0, 2, 2] if dtype == torch.bfloat16 else [0, 2])


def test_product_on_the_cpu_equals_linear():
    x, weight, bias = torch.randn(1, 8), torch.randn(4, 8), torch.randn(4)
    assert torch.equal(product(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
