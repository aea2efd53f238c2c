"""Decode of requests that begin with the same pages, each of which is read once for all of them (a cascade)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec
from quire.definition.tensors import outputs
from quire.kernels import merge, registry
from quire.kernels.ops import traced
from quire.wrappers.arguments import RunArgs
from quire.wrappers.plan import Plan, Result
from quire.wrappers.prefixes import shared_prefixes
from quire.wrappers.workspace import Workspace

# Shorter prefixes save less than it costs to write and read the partial states of their rows.
MIN_TOKENS = 128
# The bytes that a group must save: about as many as memory delivers while one more level is launched.
MIN_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """A plan whose requests share pages, in parts: the keys that each request has for itself, and levels of prefixes
    that groups of neighbouring requests share.

    Attributes:
        groups: runs of neighbouring requests that share pages, on all levels.
        levels: the number of levels, 1 or more. Pages of a level are shared by fewer requests than those before them.
        tokens_saved: keys that a run reads less often than it would without shared prefixes.
        whole: the plan of the whole batch, without shared prefixes.
        parts: the plan of the requests' own keys, then the plans of the levels.
    """

    groups: int
    levels: int
    tokens_saved: int
    whole: Plan = field(repr=False)
    parts: tuple[Plan, ...] = field(repr=False)

    def run(self, plan: Plan, q: Tensor, cache: Any, k: Tensor, v: Tensor, args: RunArgs) -> Result:
        """One layer: the partial states of all parts in float32, and their merge. `plan` is that of the whole batch."""
        out, lse = outputs(len(q), plan.spec, q.device, args.out, args.lse, True)
        assert lse is not None
        states: list[tuple[Tensor, Tensor]] = []
        for i, part in enumerate(self.parts):
            # A sink counts once.
            sinks = args.sinks if i == 0 else None
            options = args.q_scale, args.k_scale, args.v_scale, args.logits_soft_cap, args.sm_scale
            key, state = part.repeat(q, cache, (None, None, sinks), True, options)
            if state is None:
                own = args._replace(window_left=None, sinks=sinks, out=None, lse=None, return_lse=True)
                state = part.run(q, k, v, own, key)
            states.append(state)  # type: ignore[arg-type]
        merge.merge_levels(states, out, lse)
        if not traced(q):
            plan.capture.note()
        return (out, lse) if args.return_lse else out


def check_shared_prefix(spec: AttentionSpec, use_cuda_graph: bool, device: torch.device) -> None:
    """Refuse arguments of a plan that do not go with shared prefixes, naming them: those of layers that see keys by
    their positions, among others, since positions begin anew in each part.
    """
    name, mask = "shared_prefix", spec.mask
    graph = "with use_cuda_graph, a captured graph would not see how a later plan is cut"
    check(not use_cuda_graph, name, True, graph)
    invariant = "bits depend on which requests share pages, and have to be batch-invariant"
    check(not spec.batch_invariant, name, True, invariant)
    check(spec.pos_encoding == "NONE", "pos_encoding_mode", spec.pos_encoding, "NONE with shared_prefix")
    check(mask.window_left < 0, "window_left", mask.window_left, "-1, no window, with shared_prefix")
    check(not mask.depends_on_positions, "mask", mask, "causal or none with shared_prefix")
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    check(not capturing, name, True, "such a plan reads the tables, and cannot be captured in a graph")


def find_shared_prefix(plan: Plan, tables: Sequence[Tensor], workspace: Workspace) -> SharedPrefix | None:
    """Find what the requests of a plan share; None where that saves too little.

    Args:
        plan: the whole batch, as just planned.
        tables: its indptr, indices and last_page_len as given; this waits for the devices that they lie on.
        workspace: of the wrapper. Parts run one after another in the same memory.

    Raises:
        ValueError: a table on a device that contradicts itself, or a float workspace that is too small for a part.
    """
    assert isinstance(plan.kv, PageTable)
    spec, q_len = plan.spec, plan.max_q_len
    page_size, (indptr, indices, last) = plan.kv.page_size, tables
    indptr = indptr.cpu()
    table = PageTable(indptr, indices[: int(indptr[-1])].cpu(), last.cpu().contiguous(), page_size)
    page = page_size * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo) * spec.kv_dtype.itemsize
    # The bytes that a level adds: its float32 partial states are written, and read again.
    states = table.batch_size * q_len * spec.num_qo_heads * spec.head_dim_vo * 8
    min_saved_pages = -(-(MIN_BYTES + states) // page)
    levels, own = shared_prefixes(table, q_len, -(-MIN_TOKENS // page_size), min_saved_pages)
    if not levels:
        return None
    spec = spec.replace(o_dtype=torch.float32)
    parts = [_part(plan, spec, plan.qo, own, q_len, workspace)]
    for level in levels:
        rows = RaggedLayout(level.qo.indptr.to(workspace.device, non_blocking=True))
        parts.append(_part(plan, spec.replace(causal=False), rows, level.kv, level.longest, workspace))
    saved = sum(level.pages_saved for level in levels) * page_size
    return SharedPrefix(sum(level.groups for level in levels), len(levels), saved, plan, tuple(parts))


def _part(
    whole: Plan,
    spec: AttentionSpec,
    qo: RaggedLayout,
    kv: PageTable,
    max_q_len: int,
    workspace: Workspace,
) -> Plan:
    """The plan of a part. If the family that `backend` names has no kernels for its number of query tokens, the first
    family that has such kernels computes it.
    """
    backend, device = whole.backend, workspace.device
    if backend != "auto" and registry.why_not(backend, whole.spec, device, max_q_len) is not None:
        backend = "auto"
    indptr, indices, last = (x.to(device, non_blocking=True) for x in (kv.indptr, kv.indices, kv.last_page_len))
    pages = PageTable(indptr, indices, last, kv.page_size)
    family = registry.choose(spec, device, backend, max_q_len)
    part = whole.with_tables(qo, pages).changed(spec=spec, family=family, max_q_len=max_q_len, backend=backend)
    return part.with_memory(workspace)
