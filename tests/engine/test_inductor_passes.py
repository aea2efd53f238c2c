"""What `inductor_passes.py` knows of torch.compile, and what it replaces in graphs before they are compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import torch._dynamo.config
import torch._inductor.config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from quire.engine.inductor_passes import (
    COMPILE_ERRORS,
    KNOWN_VERSIONS,
    Replacements,
    compiling,
    replace_products,
    replace_topk,
)


def test_known_version_is_installed():
    """On another version, compare inductor_passes.py with the code of torch, and then change KNOWN_VERSIONS."""
    assert torch.__version__.startswith(tuple(f"{version}." for version in KNOWN_VERSIONS))


@pytest.mark.parametrize("overlapping", [True, False])
def test_compiling_changes_the_settings_within_the_context_alone(overlapping):
    def settings():
        inductor = torch._inductor.config
        return torch._dynamo.config.specialize_float, inductor.combo_kernels, inductor.triton.enable_pdl

    before = settings()
    with compiling(overlapping):
        assert settings() == (True, True, overlapping)
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


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "replaced"),
    [
        (8, torch.bfloat16, "cuda", True),
        (16, torch.bfloat16, "cuda", True),
        (17, torch.bfloat16, "cuda", False),
        (1, torch.float32, "cuda", True),
        (2, torch.float32, "cuda", False),
        (8, torch.bfloat16, "cpu", False),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_replace_products_of_few_rows_on_a_gpu_calls_quire(rows, dtype, device, replaced, has_bias):
    """Traced without memory, so that no GPU is needed."""
    with FakeTensorMode():
        x, weight, bias = (torch.empty(shape, dtype=dtype, device=device) for shape in ((rows, 16), (4, 16), (4,)))

    def forward(x, weight, bias):
        transposed = torch.ops.aten.permute.default(weight, [1, 0])
        return torch.addmm(bias, x, transposed) if has_bias else torch.mm(x, transposed)

    traced = make_fx(forward, tracing_mode="real")(x, weight, bias)
    replace_products(traced.graph)
    product = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    torchs = torch.ops.aten.addmm.default if has_bias else torch.ops.aten.mm.default
    assert product.target == (torch.ops.quire.skinny_gemm.default if replaced else torchs)
    if replaced:
        names = [None if each is None else each.name for each in product.args]
        assert names == ["x_1", "weight_1", "bias_1" if has_bias else None]


def test_replace_products_of_transposed_weights_leaves_them():
    with FakeTensorMode():
        x, weight = (torch.empty(4, 4, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    traced = make_fx(torch.mm, tracing_mode="real")(x, weight)
    replace_products(traced.graph)
    assert torch.ops.aten.mm.default in {node.target for node in traced.graph.nodes}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_compiled_product_of_few_rows_on_a_gpu_calls_quire(rows):
    x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (rows, 7))

    def forward(x, weight):
        assert len(x) <= 8
        return torch.nn.functional.linear(x, weight)

    if rows > 1:
        torch._dynamo.mark_dynamic(x, 0)
    with compiling(True), torch.inference_mode():
        found, (code,) = run_and_get_code(torch.compile(forward), x, weight)
    assert "quire.skinny_gemm" in code
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_compiled_topk_on_a_gpu_calls_quire():
    x = torch.rand(5, 64, device="cuda")
    with compiling(True), torch.inference_mode():
        (values, indices), (code,) = run_and_get_code(torch.compile(lambda x: x.softmax(-1).topk(8)), x)
    assert "quire.topk" in code
    assert torch.equal(indices, x.topk(8).indices)
    torch.testing.assert_close(values, x.softmax(-1).topk(8).values)
