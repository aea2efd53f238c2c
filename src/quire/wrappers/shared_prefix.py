"""Decode of requests that begin with the same pages: each of these is read once for all of them (a cascade)."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec, check
from quire.definition.tensors import outputs
from quire.kernels import merge, registry
from quire.wrappers.base import AttentionWrapper, Scale
from quire.wrappers.prefixes import shared_prefixes

LEAST_TOKENS = 128  # keys of a prefix, against which a row's state, written and read again, is little
LEAST_BYTES = 32 << 20  # that a group saves: about what is read in the time that the launches of a level take


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The parts of a plan whose requests share pages: each request's own keys, and levels of what groups of neighbours
    share.

    Attributes:
        groups: runs of neighbouring requests that share pages, on all levels.
        levels: how often what follows shared pages is shared again, by fewer requests; 1 or more.
        tokens_saved: keys that a run does not read again.
        parts: a wrapper for each part, the requests' own first.
    """

    groups: int
    levels: int
    tokens_saved: int
    parts: tuple[AttentionWrapper, ...] = field(repr=False)

    def run(
        self,
        q: Tensor,
        cache: Tensor | tuple[Tensor, Tensor],
        spec: AttentionSpec,
        out: Tensor | None,
        lse: Tensor | None,
        sinks: Tensor | None,
        return_lse: bool,
        **options: Scale | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One layer: each part's state, in float32, and their merge. The arguments are those of the decode's `run`."""
        result, sums = outputs(len(q), spec, q.device, out, lse, True)
        assert sums is not None
        levels = []
        for i, part in enumerate(self.parts):
            own = sinks if i == 0 else None  # a sink counts once
            levels.append(part.run(q, cache, sinks=own, return_lse=True, **options))
        merge.merge_levels(levels, result, sums)
        return (result, sums) if return_lse else result


def check_shared_prefix(
    wrapper: AttentionWrapper, pos_encoding_mode: str, window_left: int, batch_invariant: bool
) -> None:
    """Refuse what does not go with shared prefixes, naming the argument."""
    asked = "shared_prefix"
    graph = wrapper.is_cuda_graph_enabled
    check(not graph, asked, True, "with use_cuda_graph, a captured graph would not see how a later plan is cut")
    check(not batch_invariant, asked, True, "bits depend on who shares, and are asked to be batch-invariant")
    check(pos_encoding_mode == "NONE", "pos_encoding_mode", pos_encoding_mode, "NONE with shared_prefix")
    check(window_left < 0, "window_left", window_left, "-1, no window, with shared_prefix")
    capturing = wrapper.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    check(not capturing, asked, True, "such a plan reads the tables, and cannot be captured in a graph")


def find_shared_prefix(
    wrapper: AttentionWrapper, tables: Iterable[Tensor], page_size: int, q_len: int, layer: dict[str, Any]
) -> SharedPrefix | None:
    """What the requests of a plan share, as plans of the parts; None where that is too little.

    Args:
        wrapper: what has just been planned; the parts are copies of it.
        tables: the plan's indptr, indices and last_page_len; this waits for the devices that they lie on.
        layer: the plan's arguments of `AttentionWrapper._plan_layer`.

    Raises:
        ValueError: a table on a device says what cannot be, or float_workspace_buffer is too small for a part.
    """
    spec, (indptr, indices, last) = wrapper._planned(), tables
    indptr = indptr.cpu()
    table = PageTable(indptr, indices[: int(indptr[-1])].cpu(), last.cpu().contiguous(), page_size)
    page = page_size * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo) * spec.kv_dtype.itemsize
    states = table.batch_size * q_len * spec.num_qo_heads * spec.head_dim_vo * 8  # written, and read again
    worth = -(-(LEAST_BYTES + states) // page)
    levels, own = shared_prefixes(table, q_len, -(-LEAST_TOKENS // page_size), worth)
    if not levels:
        return None
    layer = {**layer, "o_data_type": torch.float32}
    parts = [_part(wrapper, wrapper._qo, own, q_len, layer)]
    for level in levels:
        rows = RaggedLayout(level.qo.indptr.to(wrapper.device, non_blocking=True))
        parts.append(_part(wrapper, rows, level.kv, level.longest, {**layer, "causal": False}))
    wrapper._scratch_size = max(part._scratch_size for part in (wrapper, *parts))
    saved = sum(level.pages_saved for level in levels) * page_size
    return SharedPrefix(sum(level.groups for level in levels), len(levels), saved, tuple(parts))


def _part(
    wrapper: AttentionWrapper, qo: RaggedLayout, kv: PageTable, max_q_len: int, layer: dict[str, Any]
) -> AttentionWrapper:
    """A copy of a wrapper with a plan of its own. Where the family that `backend` names has no kernels for so many
    query tokens, the first that has is taken.
    """
    part, name = copy(wrapper), wrapper._family
    if name != "auto" and registry.why_not(name, wrapper._planned(), wrapper.device, max_q_len) is not None:
        part._family = "auto"
    part._forget()
    tables = (kv.indptr, kv.indices, kv.last_page_len)
    indptr, indices, last = (x.to(wrapper.device, non_blocking=True) for x in tables)
    part._plan_layer(qo, PageTable(indptr, indices, last, kv.page_size), None, max_q_len=max_q_len, **layer)
    return part
