"""A planned batch as a value, and one run of it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.definition.checks import check, is_int
from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec
from quire.definition.tensors import as_scale, check_lse, check_qkv, check_tensor, outputs
from quire.kernels import registry
from quire.kernels.attention import attend
from quire.kernels.call import Call, Replay
from quire.kernels.family import Family
from quire.wrappers.arguments import LayerArgs, RunArgs
from quire.wrappers.workspace import Workspace


class Plan(NamedTuple):
    """A planned batch: the rows and keys of each request, the layer, and the memory of runs. It never changes.

    Attributes:
        spec: the layer; runs may override its window, soft cap, scale and sinks.
        qo, kv: the query rows and the keys of each request, on the wrapper's device.
        mask, items: custom masks, or the items of prompts, of the requests.
        max_q_len: the most query tokens that a request has, 0 if it is not known.
        layer: the arguments that `spec` was made of; None if a later plan must not be compared with them.
        backend: "auto", or the name of a kernel family: what the caller asked for.
        family: the kernel family that computes the layer. Another one may compute a run that changes the layer, or that
            this one refuses.
        float_workspace: float32, for partial states of tiles; None if the kernels need none.
        int_workspace: int32, zeros before and after each run.
        int_size: bytes of the int workspace that this plan needs, beyond what every wrapper has.
    """

    spec: AttentionSpec
    qo: RaggedLayout
    kv: PageTable | RaggedLayout
    mask: PackedMask | None
    items: Items | None
    max_q_len: int
    layer: LayerArgs | None
    backend: str
    family: Family
    float_workspace: Tensor | None
    int_workspace: Tensor | None
    int_size: int

    def replace(self, **changes: Any) -> Plan:
        """This plan with some fields of its spec changed and checked again; None is a field's default. It is this very
        plan if they are equal.
        """
        spec = self.spec.replace(**changes)
        if spec == self.spec:
            return self
        family = registry.choose(spec, self.qo.indptr.device, self.backend, self.max_q_len)
        return self._replace(spec=spec, family=family, layer=None)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, args: RunArgs, *, check_pages: bool = False
    ) -> tuple[Tensor, Tensor | None, Replay | None]:
        """Check the tensors of one run against the plan, and compute it.

        Args:
            q: [tokens, num_qo_heads, head_dim_qk].
            k, v: [pages, page_size, num_kv_heads, head_dim], or rows [tokens, num_kv_heads, head_dim].
            check_pages: read page ids that lie on a device, and check them against the size of the cache.

        Returns:
            (out, lse, replay): lse is None unless it is wanted, replay unless the run can be replayed.

        Raises:
            ValueError: a tensor that does not fit the plan, or a layer that no kernel family computes.
        """
        spec, device = args.spec or self.spec, self.qo.indptr.device
        if args.latent is None:
            check_qkv(q, k, v, spec, device)
        q_pe, k_pe, pe_gain = args.latent or (None, None, 1.0)
        if check_pages and isinstance(self.kv, PageTable):
            self.kv.to("cpu").check_pool(len(k))
        scales = (
            as_scale(args.q_scale, "q_scale", spec.num_qo_heads),
            as_scale(args.k_scale, "k_scale", spec.num_kv_heads),
            as_scale(args.v_scale, "v_scale", spec.num_kv_heads),
        )
        if args.sinks is not None:
            check_tensor(args.sinks, "sinks", (spec.num_qo_heads,), None, device)
        wanted = args.return_lse or args.lse is not None
        plain = args.lse_base == "log2" and args.lse_layout == "NH"  # which is what kernels write
        if wanted and not plain:
            lse: Tensor | None = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
            check_lse(args.lse, q.shape[:2], args.lse_base, args.lse_layout, device)
            out, _ = outputs(q.shape[0], spec, device, args.out, None, False)
        else:  # len() of a tensor takes microseconds
            out, lse = outputs(q.shape[0], spec, device, args.out, args.lse, wanted)
        call = Call(
            q, k, v, self.qo, self.kv, spec, self.mask, args.sinks, *scales, self.items, q_pe, k_pe, pe_gain,
            self.max_q_len, self.float_workspace, self.int_workspace,
        )  # fmt: skip
        replay = attend(
            call,
            out,
            lse,
            self.backend,
            self.family if spec is self.spec else None,
            window_left=args.window_left,
            logits_soft_cap=args.logits_soft_cap,
            sm_scale=args.sm_scale,
        )
        if wanted and not plain:
            assert lse is not None
            lse = lse * math.log(2) if args.lse_base == "ln" else lse
            lse = lse.T.contiguous() if args.lse_layout == "HN" else lse
            lse = lse if args.lse is None else args.lse.copy_(lse)
        return out, lse, replay if plain else None


def make_plan(
    spec: AttentionSpec,
    qo: RaggedLayout,
    kv: PageTable | RaggedLayout,
    mask: PackedMask | None,
    items: Items | None,
    max_q_len: int,
    layer: LayerArgs | None,
    backend: str,
    family: Family,
    workspace: Workspace,
) -> Plan:
    """A plan, with the memory that its family asks for. The arguments but `workspace` are the attributes of `Plan`.

    Raises:
        ValueError: the caller's float workspace is too small.
    """
    device = workspace.device
    kv_tokens = kv.indices.shape[0] * kv.page_size if spec.batch_invariant and isinstance(kv, PageTable) else 0
    batch_size = kv.batch_size if kv_tokens else 0
    floats, ints = _float_workspace_size(family, spec, device, max_q_len, batch_size, kv_tokens), 0
    if spec.batch_invariant:
        ints = family.int_workspace_size(spec, device, max_q_len, kv.batch_size, kv_tokens)
    float_workspace, int_workspace = workspace.take(floats, ints)
    return Plan(spec, qo, kv, mask, items, max_q_len, layer, backend, family, float_workspace, int_workspace, ints)


@lru_cache(maxsize=4096)
def _float_workspace_size(family: Family, *of: Any) -> int:
    """`Family.float_workspace_size`, which chooses tile sizes and so takes longer than the rest of a plan."""
    return family.float_workspace_size(*of)


def longest_request(rows: RaggedLayout, given: int | None, use_cuda_graph: bool, device: torch.device) -> int:
    """The most query tokens of a request: as given, or where it is known without waiting, and holds for later plans of
    a captured graph too; or 0.

    Raises:
        ValueError: what is given is no int, or too small.
    """
    known = rows.longest if device.type != "cpu" and not use_cuda_graph else 0
    if given is None:
        return known
    check(is_int(given) and given >= known, "max_token_per_sequence", given, f"an integer, no less than {known}")
    return given
