"""The sum of the ranks' products with the norm that follows, in graphs of compiled layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from torch._inductor.utils import run_and_get_code

from quire.engine.inductor_passes import compiling
from quire.engine.parallel.ranks import Ranks
from quire.engine.parallel.shard import RowwiseLinear

FEATURES = 48


class OneRank(Ranks):
    """A rank without others, which adds 1 to what it would sum, so that a sum that is left out is noticed."""

    def __init__(self):
        self.rank, self.size = 0, 1
        self._number = -1
        from quire.engine.parallel import ranks

        ranks._ranks[-1] = self

    def add(self, x):
        return x + 1


class Norm(nn.Module):
    """An RMS norm as Llama has it, or as Gemma has it, where the weight is an offset from 1 and multiplied before the
    result is rounded.
    """

    def __init__(self, is_gemma=False):
        super().__init__()
        self.is_gemma = is_gemma
        self.weight = nn.Parameter(torch.randn(FEATURES), requires_grad=False)

    def forward(self, x):
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (scaled * (1 + self.weight.float())).to(x.dtype) if self.is_gemma else self.weight * scaled.to(x.dtype)


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 5), (torch.bfloat16, 1)], ids=str)
@pytest.mark.parametrize(
    ("is_gemma", "factor", "is_fused"), [(False, None, True), (True, None, False), (False, 0.5, False)], ids=str
)
def test_layer_of_a_rank_compiled_has_the_outputs_of_an_eager_one(is_gemma, factor, is_fused, dtype, tokens):
    """As Llama has it, as Gemma has it, and as Granite has it, which multiplies before the residual is added."""
    linear = nn.Linear(FEATURES, FEATURES, bias=False)
    norm = Norm(is_gemma)
    linear.requires_grad_(False).to(dtype), norm.to(dtype)
    linear.__class__, linear.__dict__["ranks"] = RowwiseLinear, OneRank()

    def product(x):
        return linear(x) if factor is None else factor * linear(x)

    def layer(x, residual):
        first = residual + product(x)
        second = first + product(norm(first))
        return second, norm(second)

    inputs = torch.randn(2, 1, tokens, FEATURES, dtype=dtype).unbind()
    with torch.inference_mode(), compiling(tokens == 1):
        found, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True, dynamic=tokens > 1), *inputs)
        expected = layer(*inputs)
    # Each call is in the code, and so is its name.
    assert (code.count("torch.ops.quire.all_reduce_norm.default(") == 2) == is_fused
    assert ("torch.ops.quire.all_reduce.default(" in code) != is_fused
    bound = 8 * torch.finfo(dtype).eps
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)
