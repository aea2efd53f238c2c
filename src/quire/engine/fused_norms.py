"""Fuses the sum of the ranks' products, the addition of the residual and the RMS norm into one operation in the graph
of a compiled layer. Otherwise they would be two kernels, each of which takes as long as its launch in a step of few
tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
# The operations of a norm after the sum, which is cast to float32 before them, unless it is of that type.
_STATISTICS = (_aten.pow.Tensor_Scalar, _aten.mean.dim, _aten.add.Tensor, _aten.rsqrt.default, _aten.mul.Tensor)


@dataclass(frozen=True)
class _Norm:
    """The nodes of the operations that are replaced."""

    total: fx.Node
    normed: fx.Node
    residual: fx.Node
    weight: fx.Node
    eps: float


def fuse_norms(graph: fx.Graph) -> None:
    """Replace sums of ranks (`Ranks.sum`) that are followed by a residual and an RMS norm, as Llama has it: in float32,
    rounded and then multiplied by the weight. The fused operation rounds once, after the multiplication. Other norms
    stay as they are.
    """
    if not hasattr(torch.ops.quire, "all_reduce"):
        return
    for node in graph.find_nodes(op="call_function", target=torch.ops.quire.all_reduce.default):
        found = _norm_after(node)
        if found is None:
            continue
        x, ranks = node.args
        with graph.inserting_before(found.total):
            args = (x, found.residual, found.weight, found.eps, ranks)
            both = graph.call_function(torch.ops.quire.all_reduce_norm.default, args)
            both.meta["val"] = found.total.meta["val"], found.normed.meta["val"]
            for index, old in enumerate((found.total, found.normed)):
                new = graph.call_function(operator.getitem, (both, index))
                new.meta["val"] = old.meta["val"]
                old.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def _norm_after(node: fx.Node) -> _Norm | None:
    """The residual and the norm that follow a sum of ranks."""
    total = _user(node, _aten.add.Tensor)
    if total is None or len(node.users) > 1 or total.kwargs:
        return None
    (residual,) = [each for each in total.args if each is not node] or [node]
    value = total.meta["val"]
    if not isinstance(residual, fx.Node) or _form(residual) != _form(node):
        return None
    is_wide = value.dtype == torch.float32
    path = _path(total, _STATISTICS if is_wide else (_CAST, *_STATISTICS, _CAST))
    if path is None:
        return None
    wide = total if is_wide else path[0]
    square, mean, plus, _, scaled = path if is_wide else path[1:-1]
    normed = _user(path[-1], _aten.mul.Tensor)
    facts = [
        square.args[1:] == (2,),
        mean.args[1:] == ([-1], True),
        isinstance(plus.args[1], float),
        wide in scaled.args,
        is_wide or (wide.args[1] == torch.float32 and path[-1].args[1] == value.dtype),
    ]
    if normed is None or not all(facts):
        return None
    weight: Any
    (weight,) = [each for each in normed.args if each is not path[-1]] or [path[-1]]
    eps: Any = plus.args[1]
    return _Norm(total, normed, residual, weight, eps) if _is_weight(weight, value) else None


def _form(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    """The shape and the dtype of the tensor of a node."""
    value = node.meta["val"]
    return value.shape, value.dtype


def _is_weight(node: Any, value: torch.Tensor) -> bool:
    """Whether a node is a parameter with an element for each feature of a value, and of its dtype."""
    is_parameter = isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
    return is_parameter and _form(node) == (value.shape[-1:], value.dtype)


def _path(node: fx.Node, targets: Sequence[Any]) -> list[fx.Node] | None:
    """The nodes of these targets, each of which is the only user of its kind of the one before."""
    found: list[fx.Node] = []
    for target in targets:
        user = _user(found[-1] if found else node, target)
        if user is None:
            return None
        found.append(user)
    return found


def _user(node: fx.Node, target: Any) -> fx.Node | None:
    """The only user of a node that is a call of the target."""
    users = [user for user in node.users if user.target == target]
    return users[0] if len(users) == 1 else None
