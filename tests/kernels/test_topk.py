"""The largest elements of rows, against torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.topk import topk

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_topk_of_different_elements_equals_torch(device, dtype, rng):
    """The elements are different, and a NaN and infinities are among them; the memory between rows is NaN."""
    for size, k in ((1, 1), (128, 8), (rng.randint(33, 250), rng.randint(1, 32)), (rng.randint(4, 9), 4)):
        batch = (rng.randint(1, 5), *((rng.randint(1, 3),) if rng.random() < 0.5 else ()))
        order = torch.rand(*batch, size).argsort(-1)
        x = torch.full((*batch, size + 3), torch.nan, dtype=dtype, device=device)[..., :size].copy_(order - size // 2)
        x[order == size - 1], x[order == 0] = rng.choice((torch.nan, torch.inf, -0.25)), -torch.inf
        values, indices = topk(x, k)
        expected = x.cpu().topk(k)
        torch.testing.assert_close(values.cpu(), expected.values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(indices.cpu(), expected.indices)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_topk_of_equal_elements_has_different_indices(device, rng):
    x = torch.zeros(3, 40, device=device)
    x[:, rng.randrange(40)] = -0.0
    values, indices = topk(x, 32)
    assert (values == 0).all()
    assert all(len(row.unique()) == 32 for row in indices)


@pytest.mark.parametrize("device", DEVICES)
def test_topk_of_unsupported_sizes_calls_torch(device):
    long, doubles = torch.rand(2, 5000, device=device), torch.rand(2, 50, device=device, dtype=torch.float64)
    for x, k in ((long, 5), (doubles, 5), (doubles.float(), 40), (doubles.float()[:0], 3)):
        values, indices = topk(x, k)
        assert torch.equal(values, x.topk(k).values)
        assert torch.equal(x.gather(-1, indices), values)
    with pytest.raises(RuntimeError, match="out of range"):
        topk(doubles.float(), 51)


def test_topk_passes_opcheck():
    torch.library.opcheck(torch.ops.quire.topk.default, (torch.rand(2, 3, 7), 4))
