"""What the attention wrappers share: the workspace, the device, the planned layer, one call of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec, as_dtype, check, is_int
from quire.definition.tensors import as_scale, check_layout, check_lse, check_qkv, check_tensor, outputs
from quire.kernels import registry
from quire.kernels.attend import attend, made
from quire.kernels.ops import asked, traced
from quire.wrappers.arguments import Scale, takes_sink, typed
from quire.wrappers.arguments import refuse as refuse
from quire.wrappers.buffers import check_workspace, fitting

DType = str | torch.dtype
# What repeats a run; whether its output is like q; where v begins in a cache of both; over which tables.
Repeated = tuple[registry.Repeat, bool, int, PageTable | RaggedLayout]
INT_WORKSPACE = 8 << 20  # bytes on a GPU, as in FlashInfer: parts of tiles, or counters


def _page_table(tables: list[Tensor], page_size: int) -> PageTable:
    indptr, indices, last_page_len = tables
    return PageTable(indptr, indices, last_page_len, page_size)


class AttentionWrapper:
    """A workspace, and the plan of a batch.

    By position, runs take after their tensors the scales of q, k and v, which multiply those given by name; or, where
    `jit_args` asked for FlashInfer's variant AttentionSink, the sink and sm_scale.

    Kernels for GPUs keep parts of results in the float workspace while they run: `plan` refuses one that is too small,
    and `workspace_size` tells what is needed. Wrappers that run one after another may share it. Without one (None, or
    an empty tensor that only names the device) the wrapper has its own. Others keep them in the int workspace, zeros
    before and after, which each wrapper makes: 8 MiB, or more to be batch-invariant. Runs that use the same memory
    follow each other on one stream, or wait for one another by events: at the same time they would take each other's
    parts, and may never end. Graphs of torch.compile do not use the float workspace: their runs allocate as much.

    All wrappers take, besides FlashInfer's arguments:

    - check: read and check tables that lie on a device too, which waits for it (default: whether QUIRE_CHECK is 1);
    - batch_invariant: give the same bits for a request whatever it is batched with, however it is cut into chunks, and
      whether it is decoded or prefilled (default: whether QUIRE_BATCH_INVARIANT is 1).
    """

    plan: Callable[..., None]
    run: Callable[..., Any]
    forward: Callable[..., Any]

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        check: bool | None = None,
        batch_invariant: bool | None = None,
        jit_args: Any = None,
    ) -> None:
        check_workspace(float_workspace_buffer, "float_workspace_buffer")
        self._sink_by_position = takes_sink(jit_args)
        self._kv_layout = check_layout(kv_layout)
        self._backend, self._family = backend, registry.canonical(backend)
        if float_workspace_buffer is not None:
            self.device = float_workspace_buffer.device
        elif torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_size = INT_WORKSPACE if self.device.type == "cuda" else 16
        self._int_workspace_buffer = torch.zeros(self._int_size, dtype=torch.uint8, device=self.device)
        self._zeros, self._zeros_size = self._int_workspace_buffer.view(torch.int32), self._int_size
        self._outgrown: list[Tensor] = []  # such zeros, which graphs may have been captured with
        self._scratch: Tensor | None = None
        self._scratch_of: tuple[int, Tensor | None] = (0, None)  # its bytes, and the workspace that they are from
        self._checking = asked("QUIRE_CHECK") if check is None else check
        self._invariant = asked("QUIRE_BATCH_INVARIANT") if batch_invariant is None else batch_invariant
        self._device_is_gpu = self.device.type == "cuda"
        self._repeatable, self._index = self._device_is_gpu and not self._checking, self.device.index
        self._forget()
        self._key: Any = None
        self._layer: Any = None  # the last plan's arguments but for its tables, `typed`, where a plan compares them
        self._use_cuda_graph = use_cuda_graph
        self._captured = False
        self._spec: AttentionSpec | None = None
        self._qo: RaggedLayout
        self._kv: PageTable | RaggedLayout
        self._mask: PackedMask | None = None
        self._items: Items | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans go into buffers given once, with a fixed batch size."""
        return self._use_cuda_graph

    @property
    def backend(self) -> str:
        """The kernel family that computes the planned layer: "cpu", "hopper", "triton", "reference"."""
        return registry.choose(self._planned(), self.device, self._family, self._max_q_len)

    @property
    def _max_kv_len(self) -> int:
        """The longest request's keys. Waits for the device."""
        return int(self._kv.lengths().max())

    def workspace_size(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Bytes that the float and the int workspace need for a plan; nothing is planned, and never is one of them 0.

        The arguments and errors are those of `plan`, without non_blocking.
        """
        own = signature(type(self).plan)
        taken = own.replace(parameters=[x for name, x in own.parameters.items() if name != "non_blocking"])
        other = copy(self)
        other._use_cuda_graph, other._captured = False, False
        other._forget()
        other._float_workspace_buffer = torch.empty(1 << 50, dtype=torch.uint8, device="meta")  # large, and not there
        other._zeros = other._float_workspace_buffer.view(torch.int32)
        given = taken.bind(other, *args, **options)
        type(self).plan(**given.arguments)
        return max(16, other._scratch_size), other._zeros_size

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted after a plan: k and v may differ in strides without any preparation."""
        check(variant == "independent", "variant", variant, "independent")
        self._planned()

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """`run` with return_lse=True."""
        result: tuple[Tensor, Tensor] = self.run(*args, return_lse=True, **options)
        return result

    def forward_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """`forward` with return_lse=True."""
        result: tuple[Tensor, Tensor] = self.forward(*args, return_lse=True, **options)
        return result

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must lie on the wrapper's device, at addresses that are multiples of 16.
        The second has 8 MiB on a GPU, 16 bytes elsewhere, or more (see `workspace_size`), and is zeroed.

        Raises:
            ValueError: a buffer that is not such a one.
        """
        for name, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            check(buffer is not None, f"{name}_workspace_buffer", None, "a tensor is needed")
            check_workspace(buffer, f"{name}_workspace_buffer")
            check(buffer.device == self.device, f"{name}_workspace_buffer.device", str(buffer.device), str(self.device))
        size = int_workspace_buffer.nbytes
        check(size >= self._zeros_size, "int_workspace_buffer", f"{size} bytes", f"at least {self._zeros_size} bytes")
        self._forget()
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer.zero_()
        self._zeros = int_workspace_buffer.view(-1).view(torch.uint8)[: size // 4 * 4].view(torch.int32)

    def end_forward(self) -> None:
        """Kept for code that calls it; there is nothing to end."""

    def _planned(self) -> AttentionSpec:
        if self._spec is None:
            raise RuntimeError(f"{type(self).__name__}: plan() must be called before this")
        return self._spec

    def forget_cuda_graph(self) -> None:
        """Allow plans again after runs were captured in a CUDA graph without `use_cuda_graph`. The graph must not be
        replayed any more: it reads the tables of the plan that it was captured with, which the next plan may free.
        """
        self._captured = False

    def _begin_plan(self) -> None:
        """Refuse a plan that a captured graph would not see."""
        if self._captured and not torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: a run of the plan before this one was captured in a CUDA graph, which reads "
                "that plan's tables. Make the wrapper with use_cuda_graph=True, whose graphs see later plans, or call "
                "forget_cuda_graph() if no such graph will be replayed any more"
            )
        self._captured = False

    def _note_capture(self, q: Tensor) -> None:
        """Remember that a graph will read this plan's tables, and not buffers that the wrapper keeps."""
        if self._device_is_gpu and not (self._use_cuda_graph or self._captured or traced(q)):
            self._captured = torch.cuda.is_current_stream_capturing()

    def _together(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Tables on one device: on the host, to be checked, if all lie there or checks are asked for."""
        host = self._checking or all(x.is_cpu for x in tables)
        return [x.cpu() if host else x.to(self.device, non_blocking=True) for x in tables]

    def _hold(self, given: dict[str, Tensor], non_blocking: bool) -> list[Tensor]:
        """Tables, int32 vectors, on the wrapper's device: in the buffers that it was given (their attributes are
        `_<name>`), or as they are, and then kept under those names.
        """
        if not self._use_cuda_graph:
            held = []
            for name, values in given.items():
                if values.device != self.device or not values.is_contiguous():
                    values = values.to(self.device, non_blocking=non_blocking).contiguous()
                setattr(self, f"_{name}", values)
                held.append(values)
            return held
        buffers = [fitting(getattr(self, f"_{name}"), x, name) for name, x in given.items()]
        for buffer, values in zip(buffers, given.values(), strict=True):
            if buffer is not values:
                buffer[: len(values)].copy_(values, non_blocking=non_blocking)
        return buffers

    def _hold_pages(self, given: dict[str, Tensor], page_size: int, non_blocking: bool) -> PageTable:
        """A page table (indptr, indices, last_page_len: int32 vectors), checked where that is free or asked for, then
        held.
        """
        pages = None
        if self._checking or all(x.is_cpu for x in given.values()):
            pages = _page_table([x.cpu() for x in given.values()], page_size)
        held = self._hold(given, non_blocking)
        if pages is not None and held[0] is pages.indptr and held[1] is pages.indices:
            return pages
        return _page_table(held, page_size)

    def _plan_layer(
        self,
        qo: RaggedLayout,
        kv: PageTable | RaggedLayout,
        mask: PackedMask | None,
        items: Items | None = None,
        *,
        max_q_len: int = 0,
        q_data_type: DType,
        kv_data_type: DType | None,
        o_data_type: DType | None,
        logits_soft_cap: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        batch_invariant: bool = False,
        **spec: Any,
    ) -> None:
        """Record a batch and its layer, and make sure that somebody can compute it. max_q_len: the most query tokens
        that a request has, 0 if nobody knows.
        """
        q_dtype = as_dtype(q_data_type, "q_data_type")
        planned = made(
            q_dtype=q_dtype,
            kv_dtype=q_dtype if kv_data_type is None else as_dtype(kv_data_type, "kv_data_type"),
            o_dtype=q_dtype if o_data_type is None else as_dtype(o_data_type, "o_data_type"),
            logits_soft_cap=logits_soft_cap or 0.0,
            rope_scale=1.0 if rope_scale is None else rope_scale,
            rope_theta=1e4 if rope_theta is None else rope_theta,
            custom_mask=mask is not None,
            items=items is not None,
            batch_invariant=batch_invariant or self._invariant,
            **spec,
        )
        keys = 0
        if planned.batch_invariant and isinstance(kv, PageTable):
            keys = kv.indices.shape[0] * kv.page_size
        size = registry.scratch(planned, self.device, self._family, max_q_len, kv.batch_size if keys else 0, keys)
        self._scratch, self._scratch_size = self._take_scratch(size), size
        if planned.batch_invariant:
            self._take_zeros(registry.zeros(planned, self.device, self._family, max_q_len, kv.batch_size, keys))
        self._qo, self._kv, self._mask, self._items = qo, kv, mask, items
        self._max_q_len = max_q_len
        self._plan_info = planned
        self._set_layer(planned)

    def _longest(self, qo_indptr: Tensor, given: int | None = None) -> int:
        """The most query tokens of a request, as given or where that is known for free and for later plans of a graph
        too; or 0.
        """
        free = self._device_is_gpu and qo_indptr.is_cpu and qo_indptr.shape[0] > 1 and not self._use_cuda_graph
        known = int(qo_indptr.diff().max()) if free else 0
        if given is not None:
            fits = is_int(given) and given >= known
            check(fits, "max_token_per_sequence", given, f"an integer, no less than {known}")
        return given or known

    def _take_scratch(self, size: int) -> Tensor | None:
        """Scratch memory of a plan: the float workspace, or the wrapper's own where there is none; the last plan's if
        nothing has changed since.
        """
        given, scratch = self._float_workspace_buffer, self._scratch
        if size == self._scratch_of[0] and given is self._scratch_of[1]:
            return scratch
        if not size:
            scratch = None
        elif given is not None and given.numel():
            check(given.nbytes >= size, "float_workspace_buffer", f"{given.nbytes} bytes", f"{size} bytes are needed")
            scratch = given.view(-1).view(torch.uint8)[: size // 4 * 4].view(torch.float32)
        elif scratch is None or scratch.nbytes < size:
            scratch = torch.empty(size // 4, device=self.device)
        self._scratch_of = size, given
        return scratch

    def _take_zeros(self, size: int) -> None:
        """See to it that there are so many bytes of zeros."""
        self._zeros_size = max(size, self._int_size)
        if size > self._zeros.nbytes:
            self._outgrown.append(self._zeros)
            size = max(size, 2 * self._zeros.nbytes)
            self._int_workspace_buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._zeros = self._int_workspace_buffer.view(torch.int32)

    def _set_layer(self, spec: AttentionSpec) -> None:
        """Runs are of this layer from now on. Engines read the attributes that FlashInfer keeps it in."""
        self._spec = spec
        self._causal, self._pos_encoding_mode, self._window_left = spec.causal, spec.pos_encoding, spec.window_left
        self._logits_soft_cap, self._sm_scale = spec.logits_soft_cap, spec.sm_scale
        self._rope_scale, self._rope_theta = spec.rope_scale, spec.rope_theta
        self._forget()

    def _replan(self, **changes: Any) -> None:
        """What the deprecated forward() does: change the plan's layer by the arguments that it repeats."""
        spec = self._planned()
        defaults = {"sm_scale": 1 / math.sqrt(spec.head_dim_qk), "rope_scale": 1.0, "rope_theta": 1e4}
        changed = spec.but(**{k: defaults.get(k) if x is None else x for k, x in changes.items()})
        if changed != spec:
            self._set_layer(changed)

    def _forget(self) -> None:
        """Runs so far are not to be repeated: those of this plan, and of earlier ones with other tables."""
        self._repeats: dict[Any, Repeated] = {}
        self._earlier: dict[Any, Repeated] = {}

    def _same_layer(self, layer: Any) -> bool:
        """Whether a plan of this layer differs from the last one in its tables alone, as the steps of an engine do."""
        if layer != self._layer or self._spec is None or self._spec is not self._plan_info:
            return False
        if self._checking or self._use_cuda_graph or self._spec.batch_invariant:
            return False
        return self._float_workspace_buffer is self._scratch_of[1]

    def _plan_pages(self, pages: PageTable) -> None:
        """All that such a plan has to do, with tables for which the last one's checks hold."""
        self._kv = pages
        if self._repeats:
            self._earlier.update(self._repeats)
            self._repeats = {}

    def _repeat(
        self,
        q: Tensor,
        cache: Any,
        out: Tensor | None,
        lse: Tensor | None,
        sinks: Tensor | None,
        return_lse: bool,
        options: tuple[Any, ...],
        q_pe: Tensor | None = None,
        k_pe: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """The results of a call that differs from an earlier one of this plan in addresses alone, which needs none of
        its checks. None if there was none, and then `_attend` may remember this one.

        Args:
            cache: k and v as the caller gave them, one tensor or a pair.
            options: all else that the caller gave.
            q_pe, k_pe: the second parts of a latent layer's queries and keys.
        """
        self._key = None
        k, v = cache if isinstance(cache, tuple) and len(cache) == 2 else (cache, cache)
        if not self._repeatable or type(q) is not Tensor or is_compiling():
            return None
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            return None
        if torch._C._cuda_getDevice() != self._index:  # launches need the device to be the current one
            return None
        try:
            if torch.is_grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (q_pe is not None and q_pe.requires_grad) or (k_pe is not None and k_pe.requires_grad)
                or (out is not None and out.requires_grad) or (lse is not None and lse.requires_grad)
            ):  # fmt: skip
                return None  # the checks refuse it
            key = (
                q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                None if v is k else (v.shape, v.stride(), v.dtype, v.device), None if out is None else _kind(out),
                None if lse is None else _kind(lse), None if sinks is None else _kind(sinks), return_lse,
                typed(options), None if q_pe is None else _kind(q_pe), None if k_pe is None else _kind(k_pe),
            )  # fmt: skip
            found = self._repeats.get(key) or self._moved(key)
        except (AttributeError, TypeError):  # no tensor, or nothing with a hash: the checks refuse it
            return None
        if found is None:
            self._key = key
            return None
        repeat, alike, v_offset, _kv = found
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream and not (self._use_cuda_graph or self._captured):  # the default stream cannot be captured
            self._captured = torch.cuda.is_current_stream_capturing()
        if out is None:
            out = torch.empty_like(q) if alike else outputs(len(q), self._planned(), self.device, None, None, False)[0]
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
        k_at = k.data_ptr()
        done = repeat(
            q.data_ptr(),
            None if q_pe is None else q_pe.data_ptr(),
            k_at,
            k_at + v_offset if v is k else v.data_ptr(),
            None if k_pe is None else k_pe.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            stream,
        )
        if not done:
            return None
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _moved(self, key: Any) -> Repeated | None:
        """A run of an earlier plan, from which this one differs in its tables alone, over those of this plan."""
        found = self._earlier.pop(key, None)
        if found is None:
            return None
        repeat, alike, v_offset, kv = found
        moved = repeat.moved(kv, self._kv)  # type: ignore[arg-type]
        if moved is None:
            return None
        self._repeats[key] = moved, alike, v_offset, self._kv
        return self._repeats[key]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: Scale | None,
        k_scale: Scale | None,
        v_scale: Scale | None,
        window_left: int | None,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        sinks: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        latent: tuple[Tensor, Tensor, float] | None = None,
        spec: AttentionSpec | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One call: checks, the layer's own values over the plan's, and the kernels.

        Args:
            latent: q_pe, k_pe and pe_gain of `quire.kernels.registry.Call`, where the layer is latent; all its tensors
                have been checked.
            spec: the layer, where it is not the planned one.
        """
        spec = spec or self._planned()
        if latent is None:
            check_qkv(q, k, v, spec, self.device)
        q_pe, k_pe, pe_gain = latent or (None, None, 1.0)
        if self._checking and isinstance(self._kv, PageTable):
            self._kv.to("cpu").check_pool(len(k))
        scales = (
            as_scale(q_scale, "q_scale", spec.num_qo_heads),
            as_scale(k_scale, "k_scale", spec.num_kv_heads),
            as_scale(v_scale, "v_scale", spec.num_kv_heads),
        )
        if sinks is not None:
            check_tensor(sinks, "sinks", (spec.num_qo_heads,), None, self.device)
        wanted = return_lse or lse is not None
        plain = lse_base == "log2" and lse_layout == "NH"
        if wanted and not plain:
            sums = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
            check_lse(lse, sums.shape, lse_base, lse_layout, self.device)
            result, _ = outputs(len(q), spec, self.device, out, None, False)
        else:
            result, sums = outputs(len(q), spec, self.device, out, lse, wanted)  # type: ignore[assignment]
        self._note_capture(q)
        call = registry.Call(
            q, k, v, self._qo, self._kv, spec, self._mask, sinks, *scales, self._items, q_pe, k_pe, pe_gain,
            max_q_len=self._max_q_len, scratch=self._scratch, zeros=self._zeros,
        )  # fmt: skip
        repeat = attend(call, result, sums, self._family, window_left, logits_soft_cap, sm_scale)
        if repeat is not None and self._key is not None and plain:
            alike = result.shape == q.shape and result.dtype == q.dtype and q.is_contiguous()
            self._repeats[self._key] = repeat, alike, v.data_ptr() - k.data_ptr(), self._kv
        if not wanted:
            return result
        if not plain:
            sums = sums * math.log(2) if lse_base == "ln" else sums
            sums = sums.T.contiguous() if lse_layout == "HN" else sums
            sums = sums if lse is None else lse.copy_(sums)
        return (result, sums) if return_lse else result


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device
