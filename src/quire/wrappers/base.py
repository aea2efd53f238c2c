"""The base of the attention wrappers: a plan, the memory of its runs, and one run."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import check
from quire.definition.tensors import check_layout, split_cache
from quire.kernels import registry
from quire.kernels.ops import asked, traced
from quire.wrappers.arguments import LayerArgs, RunArgs, takes_sink
from quire.wrappers.buffers import TableBuffers, check_workspace
from quire.wrappers.capture import CaptureGuard
from quire.wrappers.plan import Plan, make_plan
from quire.wrappers.replay import Key, ReplayCache, Result
from quire.wrappers.workspace import Workspace, WorkspaceSizes


def _of_spec(name: str) -> Any:
    """A read-only attribute of the planned layer."""
    return property(lambda self: None if self._current is None else getattr(self._current.spec, name))


class AttentionWrapper(TableBuffers):
    """A workspace, and the plan of a batch.

    After its tensors, `run` takes by position the scales of q, k and v, which multiply those given by name; or, where
    `jit_args` asked for FlashInfer's variant AttentionSink, the sink and sm_scale.

    Kernels for GPUs keep partial states in the float workspace while they run: `plan` refuses one that is too small,
    and `workspace_size` tells what is needed. Wrappers that run one after another may share it. Without one (None, or
    an empty tensor that only names the device) the wrapper has its own. Some kernels keep partial states in the int
    workspace, which is zero before and after each run and which each wrapper makes: 8 MiB, or more where a plan is
    batch-invariant. Runs that use the same memory must follow each other on one stream, or wait for one another by
    events: at the same time they would read each other's partial states, and might never end. Graphs of torch.compile
    do not use the float workspace: their runs allocate as much.

    All wrappers take, besides FlashInfer's arguments:

    - check: read and check tables that lie on a device too, which waits for it (default: whether QUIRE_CHECK is 1);
    - batch_invariant: give the same bits for a request whatever it is batched with, however it is cut into chunks, and
      whether it is decoded or prefilled (default: whether QUIRE_BATCH_INVARIANT is 1).
    """

    plan: Callable[..., None]
    run: Callable[..., Any]
    forward: Callable[..., Any]

    # FlashInfer keeps the planned layer in these attributes, and engines read them.
    _causal, _window_left, _pos_encoding_mode = _of_spec("causal"), _of_spec("window_left"), _of_spec("pos_encoding")
    _logits_soft_cap, _sm_scale = _of_spec("logits_soft_cap"), _of_spec("sm_scale")
    _rope_scale, _rope_theta = _of_spec("rope_scale"), _of_spec("rope_theta")
    _plan_info = property(lambda self: self._current)
    _float_workspace_buffer = property(lambda self: self._workspace.float_buffer)
    _int_workspace_buffer = property(lambda self: self._workspace.int_buffer)

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
        self.kv_layout = self._kv_layout = check_layout(kv_layout)
        self._backend, self._family = backend, registry.canonical(backend)
        if float_workspace_buffer is not None:
            self.device = float_workspace_buffer.device
        elif torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")
        self.checking = asked("QUIRE_CHECK") if check is None else check
        self.invariant = asked("QUIRE_BATCH_INVARIANT") if batch_invariant is None else batch_invariant
        self._use_cuda_graph = use_cuda_graph
        self._workspace = Workspace(float_workspace_buffer, self.device)
        self._capture = CaptureGuard(self.device, use_cuda_graph)
        self._replays = ReplayCache(self.device, not self.checking, self._capture)
        self._current: Plan | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans go into buffers given once, with a fixed batch size."""
        return self._use_cuda_graph

    @property
    def planned(self) -> Plan | None:
        """The plan that runs compute, a value that never changes; assigning an earlier plan returns to it. Where plans
        are kept in buffers for CUDA graphs, the tables of all plans are what the buffers hold by now.
        """
        return self._current

    @planned.setter
    def planned(self, plan: Plan | None) -> None:
        self._current = plan
        self._replays.forget()

    def require_plan(self) -> Plan:
        """The plan that runs compute; RuntimeError if there is none."""
        if self._current is None:
            raise RuntimeError(f"{type(self).__name__}: plan() must be called before this")
        return self._current

    @property
    def backend(self) -> str:
        """The kernel family that computes the planned layer: "cpu", "hopper", "triton", "reference"."""
        plan = self.require_plan()
        return registry.choose(plan.spec, self.device, plan.backend, plan.max_q_len)

    @property
    def _max_kv_len(self) -> int:
        """The longest request's keys, as engines read it from FlashInfer. Waits for the device."""
        return int(self.require_plan().kv.lengths().max())

    def workspace_size(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Bytes that the float and the int workspace need for a plan, at least 16 each; nothing is planned.

        The arguments and errors are those of `plan`, without non_blocking.
        """
        own = signature(type(self).plan)
        taken = own.replace(parameters=[x for name, x in own.parameters.items() if name != "non_blocking"])
        trial = copy(self)
        trial._use_cuda_graph, trial._current, trial._workspace = False, None, WorkspaceSizes(self.device)
        trial._capture = CaptureGuard(self.device, False)
        trial._replays = ReplayCache(self.device, False, trial._capture)
        type(self).plan(**taken.bind(trial, *args, **options).arguments)
        return trial._workspace.sizes

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted after a plan: k and v may differ in strides without any preparation."""
        check(variant == "independent", "variant", variant, "independent")
        self.require_plan()

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
            ValueError: a buffer that does not fit.
        """
        plan = self._current
        needed = self._workspace.least if plan is None else max(self._workspace.least, plan.int_size)
        self._workspace.reset(float_workspace_buffer, int_workspace_buffer, needed)
        self.planned = plan and plan._replace(int_workspace=self._workspace.zeros, layer=None)

    def end_forward(self) -> None:
        """Kept for code that calls it; there is nothing to end."""

    def forget_cuda_graph(self) -> None:
        """Allow plans again after runs were captured in a CUDA graph without `use_cuda_graph`. The graph must not be
        replayed any more: it reads the tables of the plan that it was captured with, which the next plan may free.
        """
        self._capture.captured = False

    def _again(self, layer: LayerArgs) -> bool:
        """Whether a plan of this layer differs from the last one in its tables alone, as the steps of an engine do."""
        return self._current is not None and layer.equals(self._current.layer)

    def _move(self, pages: PageTable) -> None:
        """Plan a batch that differs from the last in its page table alone."""
        assert self._current is not None
        self._current = self._current.over(pages)
        self._replays.move()

    def _commit(
        self,
        layer: LayerArgs,
        qo: RaggedLayout,
        kv: PageTable | RaggedLayout,
        mask: PackedMask | None = None,
        items: Items | None = None,
        max_q_len: int = 0,
        non_blocking: bool = True,
    ) -> None:
        """Check a batch's layer, keep its tables, take memory, and make the plan.

        Args:
            qo, kv, mask: as the caller gave them, on the host or on a device.
            max_q_len: the most query tokens that a request has, 0 if it is not known.

        Raises:
            ValueError: a layer that nobody can compute, or a buffer that is too small.
        """
        spec = layer.spec(mask is not None, items is not None)
        registry.choose(spec, self.device, self._family, max_q_len)
        qo, kv = self._hold_rows(qo, self._qo_buffer, non_blocking), self._hold_keys(kv, non_blocking)
        mask = None if mask is None else self._hold_mask(mask)
        fixed = self.checking or self._use_cuda_graph or spec.batch_invariant  # each plan of these does all its work
        self.planned = make_plan(
            spec, qo, kv, mask, items, max_q_len, None if fixed else layer, self._family, self._workspace
        )

    def _replan(self, **changes: Any) -> None:
        """Change the plan's layer by the arguments that the deprecated forward() repeats; None is the default."""
        plan = self.require_plan()
        changed = plan.but(**changes)
        if changed.spec != plan.spec:
            self.planned = changed

    def _split_cache(self, cache: Any) -> tuple[Tensor, Tensor]:
        """K and V pages of a cache in any layout, as views [pages, page_size, heads, head_dim]."""
        k, v = split_cache(cache, self._kv_layout)
        size = self.require_plan().kv.page_size  # type: ignore[union-attr]
        check(k.shape[1] == size, "page size of the cache", k.shape[1], lambda: f"{size}, as planned")
        return k, v

    def _compute(self, key: Key | None, q: Tensor, k: Tensor, v: Tensor, args: RunArgs) -> Result:
        """Compute a run, and keep it under its key to be replayed."""
        plan = self.require_plan()
        out, lse, replay = plan.run(q, k, v, args, check_pages=self.checking)
        if not traced(q):
            self._capture.note()
            self._replays.remember(key, replay, plan, q, k, v, out)
        if args.return_lse:
            assert lse is not None
            return out, lse
        return out
