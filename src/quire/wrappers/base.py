"""The base of the attention wrappers: a plan, the memory of its runs, and one run."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.tensors import check_layout
from quire.kernels import registry
from quire.kernels.ops import env_flag
from quire.wrappers.arguments import takes_sink
from quire.wrappers.buffers import check_workspace
from quire.wrappers.capture import CaptureGuard
from quire.wrappers.plan import Plan
from quire.wrappers.planner import Planner
from quire.wrappers.workspace import Workspace, WorkspaceSizes


def _of_spec(path: str) -> Any:
    """A read-only attribute of the planned layer, by its path."""
    get = attrgetter(path)
    return property(lambda self: None if self._current is None else get(self._current.spec))


class AttentionWrapper(Planner):
    """A workspace, and the plan of a batch.

    After its tensors, `run` takes by position the scales of q, k and v, which multiply those given by name; or, where
    `jit_args` name FlashInfer's variant AttentionSink, the sink and sm_scale.

    Kernels for GPUs keep partial states in the float workspace while they run: `plan` refuses one that is too small,
    and `workspace_size` returns what is needed. Wrappers that run one after another may share it. Without one (None, or
    an empty tensor that only names the device) the wrapper has its own. Some kernels keep partial states in the int
    workspace, which is zero before and after each run and which each wrapper makes: 8 MiB, or more where a plan is
    batch-invariant. Runs that use the same memory must follow each other on one stream, or wait for one another by
    events: at the same time they would read each other's partial states, and might never end. Graphs of torch.compile
    do not use the float workspace: their runs allocate as much.

    All wrappers take, besides FlashInfer's arguments:

    - check: read and check tables that lie on a device too, which waits for it (default: whether QUIRE_CHECK is 1);
    - batch_invariant: give the same bits for a request whatever it is batched with (default: whether
      QUIRE_BATCH_INVARIANT is 1). The bits also do not depend on how the request is cut into chunks, nor on whether it
      is decoded or prefilled. The family "hopper" is an exception: its bits for a chunk depend on whether the chunk has
      more than 64 query rows (query tokens times query heads of one KV head). `backend="triton"` has no such exception.
    """

    plan: Callable[..., None]
    run: Callable[..., Any]
    forward: Callable[..., Any]

    # FlashInfer keeps the planned layer in these attributes, and engines read them.
    _causal, _window_left = _of_spec("mask.causal"), _of_spec("mask.window_left")
    _pos_encoding_mode = _of_spec("pos_encoding")
    _logits_soft_cap, _sm_scale = _of_spec("logits_soft_cap"), _of_spec("sm_scale")
    _rope_scale, _rope_theta = _of_spec("rope_scale"), _of_spec("rope_theta")
    _plan_info = property(lambda self: self._current)
    _float_workspace_buffer = property(lambda self: self._workspace.float_buffer)

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
        self._named_backend, self._family = backend, registry.canonical(backend)
        if float_workspace_buffer is not None:
            self.device = float_workspace_buffer.device
        elif torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")
        self.checking = env_flag("QUIRE_CHECK") if check is None else check
        self.invariant = env_flag("QUIRE_BATCH_INVARIANT") if batch_invariant is None else batch_invariant
        self._use_cuda_graph = use_cuda_graph
        self._workspace = Workspace(float_workspace_buffer, self.device)
        self._capture = CaptureGuard(self.device, use_cuda_graph)
        self._current: Plan | None = None

    def _keeps_bits(self, fixed_split_size: int | None, disable_split_kv: bool) -> bool:
        """Whether the bits of a request must not depend on its batch, given these arguments of `plan`."""
        return self.invariant or disable_split_kv or (fixed_split_size or 0) > 0

    @property
    def _backend(self) -> str:
        """The name of the kernels as the caller gave it. Engines may assign another name, which the next plan uses."""
        return self._named_backend

    @_backend.setter
    def _backend(self, name: str) -> None:
        self._family, self._named_backend = registry.canonical(name), name
        plan = self._current
        self.planned = plan and plan._replace(layer=None)

    @property
    def _int_workspace_buffer(self) -> Tensor:
        """The int workspace. Engines assign that of another wrapper, if the two never run at once."""
        return self._workspace.int_buffer

    @_int_workspace_buffer.setter
    def _int_workspace_buffer(self, buffer: Tensor) -> None:
        self._workspace.reset_ints(buffer, self._int_size())
        self._use_int_workspace()

    def _int_size(self) -> int:
        """The bytes that the int workspace needs."""
        plan = self._current
        return self._workspace.min_int_bytes if plan is None else max(self._workspace.min_int_bytes, plan.int_size)

    def _use_int_workspace(self) -> None:
        """Let the current plan use the current int workspace."""
        plan = self._current
        self.planned = plan and plan.changed(int_workspace=self._workspace.zeros)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans go into buffers given once, with a fixed batch size."""
        return self._use_cuda_graph

    @property
    def backend(self) -> str:
        """The kernel family that computes the planned layer: "cpu", "hopper", "triton", "reference"."""
        return self.require_plan().family.name

    @property
    def _max_kv_len(self) -> int:
        """The most keys of a request, an attribute of FlashInfer that engines read. Waits for the device."""
        return int(self.require_plan().kv.lengths().max())

    def workspace_size(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Bytes that the float and the int workspace need for a plan, at least 16 each; nothing is planned.

        The arguments and errors are those of `plan`, without non_blocking.
        """
        own = signature(type(self).plan)
        taken = own.replace(parameters=[x for name, x in own.parameters.items() if name != "non_blocking"])
        trial = copy(self)
        trial._use_cuda_graph, trial._current = False, None
        trial._workspace = WorkspaceSizes(self.device)
        trial._capture = CaptureGuard(self.device, False)
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
        self._workspace.reset(float_workspace_buffer, int_workspace_buffer, self._int_size())
        self._use_int_workspace()

    def end_forward(self) -> None:
        """Kept for code that calls it; there is nothing to end."""

    def forget_cuda_graph(self) -> None:
        """Allow plans again after runs were captured in a CUDA graph without `use_cuda_graph`.

        The graph reads the tables of the plan that it was captured with. It may be replayed after the next plan only
        while these tables, the cache and this wrapper, whose workspaces it uses, exist. A prefill wrapper reads the
        tensors that its plan was given, where they are contiguous int32 vectors on the wrapper's device and there are
        neither masks nor items: the caller can keep them. All other tables belong to the plan, also decode's query
        rows, and the next plan may free them: then the graph must not be replayed any more.
        """
        self._capture.captured = False
