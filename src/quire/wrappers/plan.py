"""A planned batch as a value, its runs, and the launches by which runs are repeated."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from quire.definition.checks import check, is_int
from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec
from quire.definition.tensors import as_scale, check_lse, check_qkv, check_tensor, outputs
from quire.kernels import registry, torch_internals
from quire.kernels.attention import attend
from quire.kernels.call import Call, Replay
from quire.kernels.family import Family
from quire.kernels.ops import traced
from quire.wrappers.arguments import LayerArgs, RunArgs
from quire.wrappers.capture import CaptureGuard
from quire.wrappers.workspace import Workspace

Result = Tensor | tuple[Tensor, Tensor]
Key = tuple[Any, ...]
# For each key of `Plan.repeat`: (replay, whether the output has q's shape and dtype, bytes from k to v in memory).
Launches = dict[Key, tuple[Replay, bool, int]]
# When a plan has kept this number of launches, it drops them all. Layers have fewer different runs than that.
_MAX_LAUNCHES = 64


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
        int_size: bytes of the int workspace that a batch-invariant plan needs in all; 0 for other plans.
        check_pages: runs read page ids that lie on a device, and check them against the size of the cache.
        capture: the `CaptureGuard` to which each launched run is reported.
        launches: the launches by which `repeat` repeats runs; None if none are kept.
    """

    spec: AttentionSpec
    qo: RaggedLayout
    kv: PageTable | RaggedLayout
    family: Family
    capture: CaptureGuard
    mask: PackedMask | None = None
    items: Items | None = None
    max_q_len: int = 0
    layer: LayerArgs | None = None
    backend: str = "auto"
    float_workspace: Tensor | None = None
    int_workspace: Tensor | None = None
    int_size: int = 0
    check_pages: bool = False
    launches: Launches | None = None

    def with_tables(self, qo: RaggedLayout, kv: PageTable | RaggedLayout) -> Plan:
        """This plan over other tables, for requests that are at most as long."""
        # Plan(...) takes twice as long.
        return tuple.__new__(Plan, (self[0], qo, kv, *self[3:-1], None if self.launches is None else {}))

    def changed(self, **fields: Any) -> Plan:
        """This plan with other fields, with which no later plan is compared."""
        return self._replace(**fields, layer=None, launches=None if self.launches is None else {})

    def with_memory(self, workspace: Workspace) -> Plan:
        """This plan with the memory that its family asks for.

        Raises:
            ValueError: the caller's float workspace is too small.
        """
        spec, kv = self.spec, self.kv
        device, ints = workspace.device, 0
        kv_tokens = kv.indices.shape[0] * kv.page_size if spec.batch_invariant and isinstance(kv, PageTable) else 0
        sizes = (spec, device, self.max_q_len, kv.batch_size if kv_tokens else 0, kv_tokens)
        floats = _float_workspace_size(self.family, *sizes)
        if spec.batch_invariant:
            ints = self.family.int_workspace_size(spec, device, self.max_q_len, kv.batch_size, kv_tokens)
        float_workspace, int_workspace = workspace.take(floats, ints)
        return self._replace(float_workspace=float_workspace, int_workspace=int_workspace, int_size=ints)

    def replace(self, **changes: Any) -> Plan:
        """This plan with some fields of its spec changed and checked again; None is a field's default. Returns this
        plan itself if nothing changes.
        """
        spec = self.spec.replace(**changes)
        if spec == self.spec:
            return self
        family = registry.choose(spec, self.qo.indptr.device, self.backend, self.max_q_len)
        return self.changed(spec=spec, family=family)

    def repeat(
        self,
        q: Tensor,
        cache: Any,
        others: tuple[Tensor | None, Tensor | None, Tensor | None],
        return_lse: bool,
        options: tuple[Any, ...] | None = None,
        pe: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Key | None, Result | None]:
        """Launch a run again, if there was an equal one: the same kernel at other addresses, without the checks of the
        run, which take most of its time on the host.

        Two runs are equal if the shapes, strides, dtypes and devices of their tensors are, and all their other
        arguments with their types. Launches are kept where the kernel family returns them, and not of runs that
        torch.compile traces, that would need gradients, or whose device is not the current one.

        Args:
            cache: k and v as the caller gave them, one tensor or a pair.
            others: out, lse and sinks.
            options: all other arguments of the run; None if the caller gave none, as is usual.
            pe: the rotary parts of a latent layer's queries and keys.

        Returns:
            (key, result): result is None if the run has to be computed, and then `run` keeps its launch under the key;
            the key is None if it must not be kept.
        """
        if is_compiling() or self.launches is None or type(q) is not Tensor:
            return None, None
        k, v = cache if isinstance(cache, tuple) and len(cache) == 2 else (cache, cache)
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            return None, None
        device = self.qo.indptr.device.index
        # A launch needs its device to be the current one.
        if torch_internals.current_device() != device:
            return None, None
        (out, lse, sinks), (q_pe, k_pe) = others, pe
        try:
            if torch.is_grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (q_pe is not None and q_pe.requires_grad) or (k_pe is not None and k_pe.requires_grad)
                or (out is not None and out.requires_grad) or (lse is not None and lse.requires_grad)
            ):  # fmt: skip
                # The checks of a run without a kept launch refuse this one.
                return None, None
            key = (
                q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                None if v is k else _kind(v), None if out is None else _kind(out),
                None if lse is None else _kind(lse), None if sinks is None else _kind(sinks), return_lse,
                options and (options, tuple(map(type, options))),
                None if q_pe is None else _kind(q_pe), None if k_pe is None else _kind(k_pe),
            )  # fmt: skip
            kept = self.launches.get(key)
        except (AttributeError, TypeError):
            # The checks refuse what is no tensor and values without a hash.
            return None, None
        if kept is None:
            return key, None
        replay, alike, v_offset = kept
        stream = torch_internals.current_raw_stream(device)
        # The default stream cannot be captured.
        if stream:
            self.capture.note()
        if out is None:
            out = torch.empty_like(q) if alike else outputs(len(q), self.spec, q.device, None, None, False)[0]
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        k_address = k.data_ptr()
        addresses = (
            q.data_ptr(), None if q_pe is None else q_pe.data_ptr(),
            k_address, k_address + v_offset if v is k else v.data_ptr(), None if k_pe is None else k_pe.data_ptr(),
            out.data_ptr(), None if lse is None else lse.data_ptr(), None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        if not replay(addresses, stream):
            return key, None
        return key, (out, lse) if return_lse else out  # type: ignore[return-value]

    def run(self, q: Tensor, k: Tensor, v: Tensor, args: RunArgs, key: Key | None = None) -> Result:
        """Check the tensors of one run against the plan, and compute it.

        Args:
            q: [tokens, num_qo_heads, head_dim_qk].
            k, v: [pages, page_size, num_kv_heads, head_dim], or rows [tokens, num_kv_heads, head_dim].
            key: what `repeat` returned for the run.

        Returns:
            out, or (out, lse) with args.return_lse.

        Raises:
            ValueError: a tensor that does not fit the plan, or a layer that no kernel family computes.
        """
        spec, device = args.spec or self.spec, self.qo.indptr.device
        if args.latent is None:
            check_qkv(q, k, v, spec, device)
        q_pe, k_pe, pe_gain = args.latent or (None, None, 1.0)
        if self.check_pages and isinstance(self.kv, PageTable):
            self.kv.to("cpu").check_pool(len(k))
        if args.sinks is not None:
            check_tensor(args.sinks, "sinks", (spec.num_qo_heads,), None, device)
        wanted = args.return_lse or args.lse is not None
        # Kernels write this form of the LSE.
        is_kernel_form = args.lse_base == "log2" and args.lse_layout == "NH"
        if wanted and not is_kernel_form:
            lse: Tensor | None = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
            check_lse(args.lse, q.shape[:2], args.lse_base, args.lse_layout, device)
            out, _ = outputs(q.shape[0], spec, device, args.out, None, False)
        else:
            # len() of a tensor takes microseconds.
            out, lse = outputs(q.shape[0], spec, device, args.out, args.lse, wanted)
        call = Call(
            q, k, v, self.qo, self.kv, spec, mask=self.mask, sinks=args.sinks,
            q_scale=as_scale(args.q_scale, "q_scale", spec.num_qo_heads),
            k_scale=as_scale(args.k_scale, "k_scale", spec.num_kv_heads),
            v_scale=as_scale(args.v_scale, "v_scale", spec.num_kv_heads),
            items=self.items, q_pe=q_pe, k_pe=k_pe, pe_gain=pe_gain, max_q_len=self.max_q_len,
            float_workspace=self.float_workspace, int_workspace=self.int_workspace,
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
        if wanted and not is_kernel_form:
            assert lse is not None
            lse = lse * math.log(2) if args.lse_base == "ln" else lse
            lse = lse.T.contiguous() if args.lse_layout == "HN" else lse
            lse = lse if args.lse is None else args.lse.copy_(lse)
        if not traced(q):
            self.capture.note()
            if key is not None and replay is not None and is_kernel_form:
                self._keep(key, replay, q, k, v, out)
        return (out, lse) if args.return_lse else out  # type: ignore[return-value]

    def _keep(self, key: Key, replay: Replay, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Keep the launch of a run. k and v are those that kernels read."""
        assert self.launches is not None
        if len(self.launches) >= _MAX_LAUNCHES:
            self.launches.clear()
        alike = out.shape == q.shape and out.dtype == q.dtype and q.is_contiguous()
        self.launches[key] = replay, alike, v.data_ptr() - k.data_ptr()


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


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
