"""How Inductor compiles decoder layers: its settings, and what is replaced in their graphs before.

This file alone reads private modules of torch.compile in the engine. They are those of KNOWN_VERSIONS of torch.
`tests/engine/test_inductor_passes.py` compares them with the installed version, and fails on others until somebody has
done so. It is imported when layers are compiled, since an import of Inductor takes long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo.config
import torch._inductor.config as inductor
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quire.engine import fused_norms
from quire.engine.fused_norms import fuse_norms

# This import registers torch.ops.quire.topk and torch.ops.quire.skinny_gemm.
from quire.steps import max_skinny_rows, topk  # noqa: F401

KNOWN_VERSIONS = ("2.11", "2.13")
# What torch.compile raises for code that it cannot compile.
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)


class Replacements(CustomGraphPass):
    """What is replaced in the graph of a compiled layer."""

    def __call__(self, graph: fx.Graph) -> None:
        replace_topk(graph)
        replace_products(graph)
        fuse_norms(graph)

    def uuid(self) -> bytes:
        """The identity of this pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__, fused_norms.__file__))


def replace_topk(graph: fx.Graph) -> None:
    """Let `quire.steps.topk` choose experts. Inductor calls torch for it, which launches two kernels, each of which
    takes longer than the kernel that computes probabilities.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
        dim = node.args[2] if len(node.args) > 2 else -1
        largest = len(node.args) < 4 or node.args[3]
        if largest and dim in (-1, node.args[0].meta["val"].ndim - 1):
            node.target, node.args = torch.ops.quire.topk.default, node.args[:2]


def replace_products(graph: fx.Graph) -> None:
    """Let `quire.steps.skinny_gemm` multiply few rows on a GPU where modelling code has a product that is not that of a
    layer, as routers of experts do.
    """
    aten = torch.ops.aten
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, x, transposed = node.args
            if node.kwargs or transposed.target != aten.permute.default or transposed.args[1] != [1, 0]:
                continue
            weight = transposed.args[0]
            tensors = [each.meta["val"] for each in (x, weight, *bias)]
            if _is_skinny(*tensors):
                node.target, node.args = torch.ops.quire.skinny_gemm.default, (x, weight, *(bias or [None]))
    graph.eliminate_dead_code()


def _is_skinny(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `skinny_gemm` multiplies tensors on a GPU, without a guard where the number of rows of x is not known."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    alike = all(each.is_cuda and each.is_contiguous() and each.dtype == x.dtype for each in tensors)
    is_row = bias is None or bias.ndim == 1
    return is_row and alike and statically_known_true(x.shape[0] <= max_skinny_rows(x.dtype))


@contextmanager
def compiling(overlapping: bool) -> Iterator[None]:
    """A context for calls that may compile; `overlapping` is whether launches of compiled kernels overlap.

    Numbers of modules, such as a norm's epsilon, are constants. What takes little time, such as the norms of queries
    and of keys, is computed by one kernel. The kernels of a few tokens take as long as their launches, so those overlap
    (programmatic dependent launch); steps of many tokens became slower by it (docs/notes/triton-experiments.md). No
    kernel writes to its inputs: those that did would be tuned with copies of them, whose launches take the host longer
    than most kernels run, so that all configurations looked alike.
    """
    options = {
        "combo_kernels": True,
        "inplace_buffers": False,
        "post_grad_custom_pre_pass": Replacements(),
        "triton.enable_pdl": overlapping,
    }
    with torch._dynamo.config.patch(specialize_float=True), inductor.patch(options):
        yield
