"""What is replaced in the graphs of decoder layers before Inductor compiles them."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from quire.steps import topk  # noqa: F401, which registers torch.ops.quire.topk


class ReplaceTopK(CustomGraphPass):
    """Let `quire.steps.topk` choose experts. Inductor calls torch for it, which launches two kernels, each of which
    takes longer than the kernel that computes probabilities.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
            dim = node.args[2] if len(node.args) > 2 else -1
            largest = len(node.args) < 4 or node.args[3]
            if largest and dim in (-1, node.args[0].meta["val"].ndim - 1):
                node.target, node.args = torch.ops.quire.topk.default, node.args[:2]

    def uuid(self) -> bytes:
        """What Inductor's cache of compiled graphs knows the pass by."""
        return get_hash_for_files((__file__,))
