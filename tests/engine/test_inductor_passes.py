"""What is replaced in the graphs of layers before they are compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from quire.engine.compiled_layers import compiling
from quire.engine.inductor_passes import ReplaceTopK


@pytest.mark.parametrize(
    ("choose", "replaced"),
    [
        (lambda x: x.topk(3), True),
        (lambda x: x.topk(3, dim=1, sorted=False), True),
        (lambda x: x.topk(3, dim=0), False),
        (lambda x: x.topk(3, largest=False), False),
    ],
)
def test_the_largest_elements_of_rows_are_chosen_by_quire(choose, replaced):
    x = torch.rand(5, 9)
    traced = make_fx(choose, tracing_mode="fake")(x)
    ReplaceTopK()(traced.graph)
    traced.recompile()
    targets = {node.target for node in traced.graph.nodes}
    assert (torch.ops.quire.topk.default in targets, torch.ops.aten.topk.default in targets) == (replaced, not replaced)
    for found, expected in zip(traced(x), choose(x), strict=True):
        assert torch.equal(found.sort().values, expected.sort().values)


@pytest.mark.gpu
def test_compiled_code_chooses_by_quire():
    x = torch.rand(5, 64, device="cuda")
    with compiling(5), torch.inference_mode():
        (values, indices), (code,) = run_and_get_code(torch.compile(lambda x: x.softmax(-1).topk(8)), x)
    assert "quire.topk" in code
    assert torch.equal(indices, x.topk(8).indices)
    torch.testing.assert_close(values, x.softmax(-1).topk(8).values)
