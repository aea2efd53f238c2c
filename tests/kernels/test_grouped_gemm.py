"""Products of rows and the matrices of their experts, against float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.grouped_gemm import group_by_expert, grouped_gemm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PRECISION = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def choose(rng, tokens, top_k, num_experts):
    """Different experts for each token, int64 [tokens * top_k]; some experts have no token, and one may have all."""
    hot = rng.randrange(num_experts)
    rows = []
    for _ in range(tokens):
        row = rng.sample(range(0, num_experts, 2), top_k) if num_experts >= 2 * top_k else list(range(top_k))
        if rng.random() < 0.5 and hot not in row:
            row[rng.randrange(top_k)] = hot
        rows += row
    return torch.tensor(rows)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_group_by_expert_sorts_rows_by_expert(device, rng):
    for tokens in (1, rng.randint(2, 40), *((rng.randint(3000, 9000),) if device == "cuda" else ())):
        top_k, num_experts = rng.choice(((1, 1), (1, 3), (2, 8), (4, 32), (8, 60)))
        chosen = choose(rng, tokens, top_k, num_experts).to(device)
        order, position, ends = (x.cpu() for x in group_by_expert(chosen, num_experts))
        expected = chosen.cpu().argsort(stable=True)
        assert torch.equal(order, expected.int())
        assert torch.equal(position[expected], torch.arange(len(chosen)).int())
        assert torch.equal(ends, chosen.cpu().bincount(minlength=num_experts).cumsum(0).int())


@pytest.mark.interpret(dtype=[torch.float16, torch.float32])  # the interpreter cannot multiply bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_grouped_gemm_of_random_experts_matches_float64(device, dtype, transposed, rng):
    """The weights of experts without rows are NaN, as is the memory between the rows of x."""
    counts = (1, rng.randint(2, 30)) if device == "cpu" else (1, rng.randint(2, 30), rng.randint(100, 2000))
    for tokens in counts:
        top_k, num_experts = rng.choice(((1, 1), (1, 3), (2, 8), (4, 32)))
        n, k = rng.choice(((5, 9), (96, 64), (130, 264), (64, 200)))
        chosen = choose(rng, tokens, top_k, num_experts).to(device)
        order, position, ends = group_by_expert(chosen, num_experts)
        x = torch.full((tokens, k + 8), torch.nan).to(device, dtype)[:, :k].copy_(torch.randn(tokens, k))
        weight = torch.full((num_experts, n, k), torch.nan)
        used = chosen.cpu().unique()
        weight[used] = torch.randn(len(used), n, k)
        weight = weight.to(device, dtype)
        given = weight.mT.contiguous() if transposed else weight
        exact, size_of_terms = (
            torch.stack([f(weight[e].double().cpu()) @ f(x[i // top_k].double().cpu()) for i, e in enumerate(chosen)])
            for f in (lambda t: t, torch.abs)
        )
        gathered = grouped_gemm(x, order, ends, given, transposed)
        sorted_rows = grouped_gemm(x[order // top_k], None, ends, given, transposed)
        for out in (gathered, sorted_rows):
            assert (out.shape, out.dtype) == ((len(chosen), n), dtype)
            assert ((out[position].double().cpu() - exact).abs() <= PRECISION[dtype] * size_of_terms).all()
