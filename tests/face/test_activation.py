"""Gated activations against their definition in float64: strided inputs, outputs poisoned, fp8."""

from __future__ import annotations

import math

import pytest
import torch

import quire
from helpers.rounding import check_fp8, check_rounded
from quire import activation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = 5e-7  # of float32, relative to the product of both halves: near 0, gelu cancels
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FUNCTIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
devices = pytest.mark.parametrize("device", DEVICES)
kinds = pytest.mark.parametrize("kind", FUNCTIONS)


def rows(rng, dtype, device, dim):
    """[..., 2 * dim] of one to four dimensions, sliced from a tensor whose other elements are NaN."""
    spare, lead = rng.choice((0, 3, 8)), rng.choice(((), (1,), (5,), (70,), (4, 3), (2, 3, 2)))
    x = torch.full((*(n + 1 for n in lead), 2 * dim + spare), torch.nan, dtype=dtype, device=device)
    x = x[(*(slice(1, None) for _ in lead), slice(2 * dim))]
    return x.copy_(torch.randn(x.shape) * rng.choice((1e-2, 1.0, 20.0)))


def exact(kind, x):
    """The result, and the product of both halves."""
    gate, up = x.double().cpu().chunk(2, -1)
    return FUNCTIONS[kind](gate) * up, gate * up


def nan_rows(rng, shape, device, dtype):
    """NaN rows, some elements apart."""
    spare = rng.choice((0, 8)) if len(shape) == 2 else 0
    return torch.full((*shape[:-1], shape[-1] + spare), torch.nan, device=device).to(dtype)[..., : shape[-1]]


@pytest.mark.interpret
@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_act_and_mul_matches_float64(kind, dtype, device, rng):
    for dim in (rng.choice((1, 7, 64, 111, 128)), rng.choice((512, 1024, 1500, 3420))):
        x = rows(rng, dtype, device, dim)
        (expected, product), before = exact(kind, x), x.clone()
        out = rng.choice((None, nan_rows(rng, expected.shape, device, dtype)))
        result = getattr(activation, f"{kind}_and_mul")(x, out=out)
        assert out is None or result is out
        check_rounded(result, expected, dtype, PRECISION, product)
        assert torch.equal(x, before)


@devices
@kinds
def test_act_and_mul_of_large_numbers_has_no_nan(kind, device):
    gate = torch.tensor([-3e38, -1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4], device=device)
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    result = getattr(activation, f"{kind}_and_mul")(x)[0].cpu()
    torch.testing.assert_close(result, gate.clamp(min=0).cpu(), rtol=1e-6, atol=1e-7)


@pytest.mark.interpret
@devices
@pytest.mark.parametrize("fp8", FP8, ids=str)
@kinds
def test_act_and_mul_quant_matches_float64(kind, fp8, device, rng):
    for dim in (rng.choice((7, 64, 111)), rng.choice((512, 1500))):
        dtype, number = rng.choice(DTYPES), rng.choice((0.002, 0.1, 1.0, 10.0))
        x = rows(rng, dtype, device, dim)
        expected, product = exact(kind, x)
        out = nan_rows(rng, expected.shape, device, fp8)
        scale = rng.choice((number, torch.tensor([number], device=device), torch.tensor(number, device=device)))
        assert getattr(activation, f"{kind}_and_mul_quant")(out, x, scale) is None
        check_fp8(out, expected, number, product.abs() * PRECISION)


@devices
def test_act_and_mul_of_no_rows_is_empty(device):
    assert activation.silu_and_mul(torch.zeros(0, 64, device=device)).shape == (0, 32)
    assert activation.gelu_and_mul(torch.zeros(3, 0, 64, device=device)).shape == (3, 0, 32)


@devices
def test_compiled_activations_equal_eager(device):
    def step(x, out, scale):
        activation.silu_and_mul_quant(out, x, scale)
        return activation.silu_and_mul(x), activation.gelu_and_mul(x), activation.gelu_tanh_and_mul(x)

    x, scale = torch.randn(2, 5, 64, device=device), torch.full((1,), 0.5, device=device)
    here, there = (torch.zeros(2, 5, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    torch.compiler.reset()
    expected = step(x, here, scale)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(x, there, scale)
    for a, b in zip((*expected, here), (*results, there), strict=True):
        assert torch.equal(a.float(), b.float())


@devices
def test_act_and_mul_passes_opcheck(device):
    args = (torch.zeros(5, 32, device=device), torch.randn(5, 64, device=device), None, 1.0, "silu")
    torch.library.opcheck(torch.ops.quire.act_and_mul.default, args)


@pytest.mark.gpu
def test_captured_activation_replayed_reads_new_input():
    x, out = torch.randn(6, 8192, device="cuda"), torch.zeros(6, 4096, device="cuda")
    activation.silu_and_mul(x, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        activation.silu_and_mul(x, out)
    x.normal_()
    graph.replay()
    check_rounded(out, exact("silu", x)[0], torch.float32, PRECISION)


X = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("silu_and_mul", {"input": torch.ones(3, 7)}, r"input has shape \[3, 7\]: the last dimension must be 2 \* dim"),
        ("silu_and_mul", {"input": torch.ones(3, 0)}, r"input has shape \[3, 0\]"),
        ("silu_and_mul", {"input": torch.tensor(1.0)}, r"input has shape \[\]"),
        ("silu_and_mul", {"input": 1.0}, r"input is a float"),
        ("silu_and_mul", {"input": X.double()}, r"input.dtype = torch.float64"),
        ("silu_and_mul", {"input": torch.ones(8, 3).mT}, r"input has strides \[1, 3\]: the last one must be 1"),
        ("gelu_and_mul", {"out": torch.ones(3, 8)}, r"out has shape \[3, 8\]: it must be \[3, 4\]"),
        ("gelu_and_mul", {"out": torch.ones(3, 4).half()}, r"out is torch.float16"),
        ("gelu_and_mul", {"out": torch.ones(4).expand(3, 4)}, r"out has strides \[0, 1\]: elements overlap"),
        ("gelu_tanh_and_mul", {"input": X.clone().requires_grad_()}, r"input requires grad"),
        (
            "gelu_tanh_and_mul",
            {"input": torch.ones(3, 2, 8), "out": torch.ones(3, 3, 4)[:, :2]},
            r"out has strides \[12, 4, 1\]: its rows must be equally far apart",
        ),
        ("silu_and_mul_quant", {"out": torch.ones(3, 4)}, r"out.dtype = torch.float32 is not supported"),
        ("silu_and_mul_quant", {"out": None}, r"out is a NoneType"),
        ("silu_and_mul_quant", {"scale": -1.0}, r"scale = -1.0 is not supported: a positive number"),
        ("silu_and_mul_quant", {"scale": "1"}, r"scale = '1' is not supported"),
    ],
)
def test_activation_with_wrong_arguments_is_refused(call, given, message):
    good = {"input": X, **({"out": torch.zeros(3, 4).to(torch.float8_e5m2), "scale": 1.0} if "quant" in call else {})}
    with pytest.raises(ValueError, match=message):
        getattr(activation, call)(**{**good, **given})


def test_activation_module_is_an_attribute_of_quire():
    assert quire.activation is activation
    assert quire.silu_and_mul is activation.silu_and_mul


@devices
@kinds
def test_act_and_mul_row_in_a_batch_equals_the_row_alone(kind, device, rng):
    x = torch.randn(
        8, 2 * rng.choice((40, 111, 1024)), device=device, dtype=rng.choice((torch.bfloat16, torch.float16))
    )
    together = getattr(activation, f"{kind}_and_mul")(x)
    alone = [getattr(activation, f"{kind}_and_mul")(row[None]) for row in x]
    assert torch.equal(together, torch.cat(alone))
