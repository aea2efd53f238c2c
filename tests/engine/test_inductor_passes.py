"""What `inductor_passes.py` knows of torch.compile, and what it replaces in graphs before they are compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import torch._dynamo.config
import torch._inductor.config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from quire.engine.inductor_passes import COMPILE_ERRORS, KNOWN_VERSIONS, Replacements, compiling, replace_topk


def test_known_version_is_installed():
    """On another version, compare inductor_passes.py with the code of torch, and then change KNOWN_VERSIONS."""
    assert torch.__version__.startswith(tuple(f"{version}." for version in KNOWN_VERSIONS))


@pytest.mark.parametrize("tokens", [1, 2])
def test_compiling_changes_the_settings_within_the_context_alone(tokens):
    def settings():
        inductor = torch._inductor.config
        return torch._dynamo.config.specialize_float, inductor.combo_kernels, inductor.triton.enable_pdl

    before = settings()
    with compiling(tokens):
        assert settings() == (True, True, tokens == 1)
        assert isinstance(torch._inductor.config.post_grad_custom_pre_pass, Replacements)
    assert settings() == before


@pytest.mark.parametrize("limit", [False, True], ids=["unsupported", "recompiled"])
def test_compile_errors_are_what_torch_compile_raises(limit):
    def unsupported(x):
        torch._dynamo.graph_break()
        return x

    def doubled(x):
        return x * 2

    compiled = torch.compile(doubled if limit else unsupported, fullgraph=True, dynamic=False, backend="eager")
    # pytest's monkeypatch would remove the setting afterwards, which is an alias of another one.
    with torch._dynamo.config.patch(recompile_limit=1):
        if limit:
            compiled(torch.ones(1))
        with pytest.raises(COMPILE_ERRORS):
            compiled(torch.ones(2))


@pytest.mark.parametrize(
    ("choose", "replaced"),
    [
        (lambda x: x.topk(3), True),
        (lambda x: x.topk(3, dim=1, sorted=False), True),
        (lambda x: x.topk(3, dim=0), False),
        (lambda x: x.topk(3, largest=False), False),
    ],
)
def test_replace_topk_of_largest_elements_of_rows_calls_quire(choose, replaced):
    x = torch.rand(5, 9)
    traced = make_fx(choose, tracing_mode="fake")(x)
    replace_topk(traced.graph)
    traced.recompile()
    targets = {node.target for node in traced.graph.nodes}
    assert (torch.ops.quire.topk.default in targets, torch.ops.aten.topk.default in targets) == (replaced, not replaced)
    for found, expected in zip(traced(x), choose(x), strict=True):
        assert torch.equal(found.sort().values, expected.sort().values)


@pytest.mark.gpu
def test_compiled_topk_on_a_gpu_calls_quire():
    x = torch.rand(5, 64, device="cuda")
    with compiling(5), torch.inference_mode():
        (values, indices), (code,) = run_and_get_code(torch.compile(lambda x: x.softmax(-1).topk(8)), x)
    assert "quire.topk" in code
    assert torch.equal(indices, x.topk(8).indices)
    torch.testing.assert_close(values, x.softmax(-1).topk(8).values)
