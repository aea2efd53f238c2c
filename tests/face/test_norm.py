"""Norms against their definition in float64: strided inputs, outputs poisoned, a residual, fp8."""

from __future__ import annotations

import pytest
import torch

import quire
from helpers.interpret import INTERPRETED
from helpers.rounding import check_fp8, check_rounded
from quire import norm
from quire.kernels.gpu.launch import is_aligned

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = 5e-7  # of float32
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
EPS = 1e-6
devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows(rng, dtype, device, dim):
    """[tokens, dim] or [tokens, heads, dim], sliced from a tensor whose other elements are NaN."""
    tokens, heads, spare = (
        rng.choice((1, 3, 9 if INTERPRETED else 70)),
        rng.choice((0, 1, 5)),
        rng.choice((0, 3, 8)),
    )
    whole = torch.full((tokens + 1, heads + 1, dim + spare), torch.nan, dtype=dtype, device=device)
    x = whole[1:, 1:, :dim] if heads else whole[1:, 0, :dim]
    return x.copy_(torch.randn(x.shape) * rng.choice((1e-2, 1.0, 30.0)))


def weights(rng, dim, device, count=1):
    return [torch.randn(dim).to(rng.choice(DTYPES)).to(device) for _ in range(count)]


def exact(x, weight, bias=0.0, beta=None, eps=EPS):
    x = x.double().cpu()
    if beta is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double().cpu() + bias)
    return x if beta is None else x + beta.double().cpu()


def nan_like(x, dtype=None):
    return torch.full(x.shape, torch.nan, device=x.device).to(x.dtype if dtype is None else dtype)


def dims(rng):
    return rng.choice((1, 7, 64, 111, 128, 1024)), rng.choice((2048, 3584)), rng.choice((16384, 20000))


@pytest.mark.interpret
@devices
@dtypes
@pytest.mark.parametrize("gemma", [False, True], ids=["rmsnorm", "gemma"])
def test_rmsnorm_matches_float64(gemma, dtype, device, rng):
    call = norm.gemma_rmsnorm if gemma else norm.rmsnorm
    for dim in dims(rng):
        x, (weight,), eps = rows(rng, dtype, device, dim), weights(rng, dim, device), rng.choice((EPS, 1e-5, 0.5))
        expected, before = exact(x, weight, float(gemma), eps=eps), x.clone()
        out = rng.choice((None, nan_like(x), nan_like(x.mT).mT if x.stride(-1) != 1 else nan_like(x)))
        result = call(x, weight, eps, out=out)
        check_rounded(result, expected, dtype, PRECISION)
        assert out is None or result is out
        assert torch.equal(x, before)
        assert call(x, weight, eps, out=x) is x
        check_rounded(x, expected, dtype, PRECISION)
        if device == "cpu" or is_aligned(x, x.ndim - 1):  # else a GPU adds up rows in an order that suits `out`
            assert torch.equal(x, result)


@pytest.mark.interpret
@devices
@dtypes
@pytest.mark.parametrize("gemma", [False, True], ids=["rmsnorm", "gemma"])
def test_fused_add_rmsnorm_adds_and_writes_the_residual(gemma, dtype, device, rng):
    call = norm.gemma_fused_add_rmsnorm if gemma else norm.fused_add_rmsnorm
    for dim in dims(rng):
        x, (weight,) = rows(rng, dtype, device, dim), weights(rng, dim, device)
        residual = torch.randn(x.shape).to(device, dtype)
        total = x.double().cpu() + residual.double().cpu()
        assert call(x, residual, weight, EPS) is None
        check_rounded(residual, total, dtype, PRECISION)
        check_rounded(x, exact(total, weight, float(gemma)), dtype, PRECISION)


@pytest.mark.interpret
@devices
@dtypes
def test_layernorm_matches_float64(dtype, device, rng):
    for dim in dims(rng):
        x, (gamma, beta) = rows(rng, dtype, device, dim), weights(rng, dim, device, 2)
        check_rounded(norm.layernorm(x, gamma, beta, EPS), exact(x, gamma, beta=beta), dtype, PRECISION)


@pytest.mark.interpret
@devices
@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("kind", ["rmsnorm", "add", "layernorm"])
def test_norms_with_fp8_outputs_match_float64(kind, fp8, device, rng):
    for dim in dims(rng)[rng.choice((0, 1, 2)) :]:
        dtype, number = rng.choice(DTYPES), rng.choice((0.002, 0.1, 1.0, 10.0))
        x, (weight, beta) = rows(rng, dtype, device, dim), weights(rng, dim, device, 2)
        scale = rng.choice((number, torch.tensor([number], device=device), torch.tensor(number, device=device)))
        out, before, total = nan_like(x, fp8), x.clone(), x.double().cpu()
        if kind == "add":
            residual = torch.randn(x.shape).to(device, dtype)
            total = total + residual.double().cpu()
            norm.fused_add_rmsnorm_quant(out, x, residual, weight, scale, EPS)
            check_rounded(residual, total, dtype, PRECISION)
        elif kind == "layernorm":
            norm.layernorm_quant(out, x, weight, beta, scale, EPS)
        else:
            norm.rmsnorm_quant(out, x, weight, scale, EPS)
        check_fp8(out, exact(total, weight, beta=beta if kind == "layernorm" else None), number)
        assert torch.equal(x, before)


@devices
def test_norms_of_no_rows_are_empty(device):
    for shape in ((0, 64), (3, 0, 64), (0, 2, 20000)):
        x, weight = torch.zeros(shape, device=device), torch.ones(shape[-1], device=device)
        assert norm.rmsnorm(x, weight).shape == x.shape
        norm.fused_add_rmsnorm(x, x.clone(), weight)
        assert norm.layernorm(x, weight, weight).shape == x.shape


@devices
def test_rmsnorm_with_nan_in_one_row_leaves_the_others(device):
    x = torch.randn(5, 3, 128, device=device)
    expected = norm.rmsnorm(x, torch.ones(128, device=device))
    x[2, 1, 5] = torch.nan
    result = norm.rmsnorm(x, torch.ones(128, device=device))
    assert result[2, 1].isnan().all()
    result[2, 1] = expected[2, 1]
    assert torch.equal(result, expected)


@devices
def test_compiled_norms_equal_eager(device):
    def step(x, residual, weight, out, scale):
        norm.fused_add_rmsnorm(x, residual, weight)
        norm.rmsnorm_quant(out, x, weight, scale)
        return norm.gemma_rmsnorm(x, weight), norm.layernorm(x, weight, weight)

    def given():
        torch.manual_seed(5)
        x, residual, weight = (torch.randn(n, device=device) for n in ((6, 64), (6, 64), (64,)))
        return (
            x,
            residual,
            weight,
            torch.zeros(6, 64, device=device).to(torch.float8_e4m3fn),
            torch.ones(1, device=device),
        )

    torch.compiler.reset()
    here, there = given(), given()
    expected, results = step(*here), torch.compile(step, fullgraph=True, backend="aot_eager")(*there)
    for a, b in zip((*expected, *here), (*results, *there), strict=True):
        assert torch.equal(a.float(), b.float())


@devices
def test_norm_passes_opcheck(device):
    x, residual, weight = (torch.randn(n, device=device) for n in ((6, 64), (6, 64), (64,)))
    args = (torch.zeros_like(x), x, residual, weight, None, None, 1.0, EPS, 0.0, False)
    torch.library.opcheck(torch.ops.quire.norm.default, args)


@pytest.mark.gpu
def test_captured_norm_replayed_reads_new_input():
    x, residual, weight = (torch.randn(n, device="cuda") for n in ((6, 4096), (6, 4096), (4096,)))
    scale, out = torch.ones(1, device="cuda"), torch.zeros(6, 4096, device="cuda").to(torch.float8_e4m3fn)
    norm.fused_add_rmsnorm_quant(out, x, residual.clone(), weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm.fused_add_rmsnorm_quant(out, x, residual, weight, scale)
    x.normal_()
    scale.fill_(0.25)
    total = x + residual
    graph.replay()
    check_fp8(out, exact(total, weight), 0.25)
    assert torch.equal(residual, total)


X, W = torch.ones(3, 8), torch.ones(8)
FP8_OUT = torch.zeros(3, 8).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("rmsnorm", {"input": torch.ones(8)}, r"input has shape \[8\]: it must be \[tokens, dim\]"),
        ("rmsnorm", {"input": X.double()}, r"input.dtype = torch.float64 is not supported"),
        ("rmsnorm", {"input": torch.ones(8, 3).mT}, r"input has strides \[1, 3\]: the last one must be 1"),
        ("rmsnorm", {"input": [1.0]}, r"input is a list"),
        ("rmsnorm", {"weight": torch.ones(7)}, r"weight has shape \[7\]: it must be \[8\]"),
        ("rmsnorm", {"weight": W.to(torch.float8_e5m2)}, r"weight.dtype = torch.float8_e5m2"),
        ("rmsnorm", {"eps": -1.0}, r"eps = -1.0 is not supported: a number of at least 0"),
        ("rmsnorm", {"out": torch.ones(3, 7)}, r"out has shape \[3, 7\]: it must be \[3, 8\]"),
        ("rmsnorm", {"out": X.half()}, r"out is torch.float16: it must be torch.float32"),
        ("rmsnorm", {"out": torch.ones(8).expand(3, 8)}, r"out has strides \[0, 1\]: elements overlap"),
        ("rmsnorm", {"input": X.clone().requires_grad_()}, r"input requires grad"),
        ("fused_add_rmsnorm", {"residual": torch.ones(2, 8)}, r"residual has shape \[2, 8\]"),
        ("fused_add_rmsnorm", {"residual": X.half()}, r"residual is torch.float16"),
        ("fused_add_rmsnorm", {"input": torch.ones(8).expand(3, 8)}, r"input has strides \[0, 1\]: elements overlap"),
        ("layernorm", {"gemma": torch.ones(7)}, r"gemma has shape \[7\]"),
        ("layernorm", {"beta": None}, r"beta is a NoneType"),
        ("rmsnorm_quant", {"out": X.clone()}, r"out.dtype = torch.float32 is not supported"),
        ("rmsnorm_quant", {"scale": 0.0}, r"scale = 0.0 is not supported: a positive number"),
        ("rmsnorm_quant", {"scale": torch.ones(2)}, r"scale = \[2\] is not supported"),
        ("rmsnorm_quant", {"out": None}, r"out is a NoneType"),
    ],
)
def test_norms_with_wrong_arguments_are_refused(call, given, message):
    good = {"input": X.clone(), **({"gemma": W, "beta": W} if call == "layernorm" else {"weight": W})}
    good |= {"residual": X.clone()} if "add" in call else {}
    good |= {"out": FP8_OUT, "scale": 1.0} if "quant" in call else {}
    with pytest.raises(ValueError, match=message):
        getattr(norm, call)(**{**good, **given})


def test_rmsnorm_with_a_parameter_as_weight_returns_no_grad():
    weight = torch.nn.Parameter(torch.ones(8))
    assert not norm.rmsnorm(X, weight).requires_grad
    assert quire.rmsnorm is norm.rmsnorm
