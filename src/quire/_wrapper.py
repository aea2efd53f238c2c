"""What the attention wrappers share: the workspace, the device, the planned layer, one call of attention."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quire.attention.masks import PackedMask
from quire.attention.pages import PageTable, RaggedLayout, table
from quire.attention.spec import AttentionSpec, as_dtype, check
from quire.attention.tensors import check_layout, check_qkv, check_tensor, outputs
from quire.kernels import registry

DType = str | torch.dtype
Scale = float | Tensor


@lru_cache(maxsize=4096)
def _with(spec: AttentionSpec, window_left: int, logits_soft_cap: float, sm_scale: float, sinks: bool) -> AttentionSpec:
    return spec.but(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, sinks=sinks)


def refuse(**given: Any) -> None:
    """Refuse options of FlashInfer's that Quire does not have, where they are used."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported")


class AttentionWrapper:
    """A workspace, and the plan of a batch.

    Quire's kernels compute what scratch they need; the workspace buffers of FlashInfer's interface are accepted, name
    the device, and are otherwise left alone. None will do.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        if float_workspace_buffer is not None and not isinstance(float_workspace_buffer, Tensor):
            raise ValueError(f"float_workspace_buffer is a {type(float_workspace_buffer).__name__}: a tensor is needed")
        self._kv_layout = check_layout(kv_layout)
        self._backend = registry.canonical(backend)
        self._float_workspace_buffer = float_workspace_buffer
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = float_workspace_buffer.device if float_workspace_buffer is not None else torch.device(default)
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._use_cuda_graph = use_cuda_graph
        self._spec: AttentionSpec | None = None
        self._qo: RaggedLayout
        self._kv: PageTable | RaggedLayout
        self._mask: PackedMask | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans go into buffers given once, with a fixed batch size."""
        return self._use_cuda_graph

    @property
    def backend(self) -> str:
        """The kernel family that computes the planned layer: "cpu", "reference", ..."""
        return registry.choose(self._planned(), self.device, self._backend)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must lie on the wrapper's device."""
        for name, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            check(buffer.device == self.device, f"{name}_workspace_buffer.device", str(buffer.device), str(self.device))
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer

    def end_forward(self) -> None:
        """Kept for code that calls it; there is nothing to end."""

    def _planned(self) -> AttentionSpec:
        if self._spec is None:
            raise RuntimeError(f"{type(self).__name__}: plan() must be called before this")
        return self._spec

    def _plan_layer(
        self,
        qo: RaggedLayout,
        kv: PageTable | RaggedLayout,
        mask: PackedMask | None,
        *,
        q_data_type: DType,
        kv_data_type: DType | None,
        o_data_type: DType | None,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        **spec: Any,
    ) -> None:
        """Record a batch and its layer, and make sure that somebody can compute it."""
        q_dtype = as_dtype(q_data_type, "q_data_type")
        planned = AttentionSpec(
            q_dtype=q_dtype,
            kv_dtype=q_dtype if kv_data_type is None else as_dtype(kv_data_type, "kv_data_type"),
            o_dtype=q_dtype if o_data_type is None else as_dtype(o_data_type, "o_data_type"),
            logits_soft_cap=logits_soft_cap or 0.0,
            sm_scale=sm_scale,  # type: ignore[arg-type]
            rope_scale=1.0 if rope_scale is None else rope_scale,
            rope_theta=1e4 if rope_theta is None else rope_theta,
            custom_mask=mask is not None,
            **spec,
        )
        registry.choose(planned, self.device, self._backend)
        self._spec, self._qo, self._kv, self._mask = planned, qo, kv, mask
        self._causal, self._pos_encoding_mode = planned.causal, planned.pos_encoding
        self._window_left, self._logits_soft_cap = planned.window_left, planned.logits_soft_cap
        self._sm_scale, self._rope_scale, self._rope_theta = planned.sm_scale, rope_scale, rope_theta

    def _replan(self, **changes: Any) -> None:
        """What the deprecated forward() does: change the plan's layer by the arguments that it repeats."""
        given = {name: value for name, value in changes.items() if value is not None}
        self._spec = self._planned().but(**given)

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One call: checks, the layer's own values over the plan's, and the kernels."""
        spec = self._planned()
        if window_left is not None or logits_soft_cap is not None or sm_scale is not None or sinks is not None:
            spec = _with(
                spec,
                spec.window_left if window_left is None else window_left,
                spec.logits_soft_cap if logits_soft_cap is None else logits_soft_cap,
                spec.sm_scale if sm_scale is None else sm_scale,
                sinks is not None,
            )
        check_qkv(q, k, v, spec, self.device)
        check(lse_base in ("log2", "e"), "lse_base", lse_base, "log2 or e")
        check(lse_layout in ("NH", "HN"), "lse_layout", lse_layout, "NH or HN")
        if sinks is not None:
            check_tensor(sinks, "sinks", (spec.num_qo_heads,), sinks.dtype, self.device)
        scales = {}
        for name, scale, heads in (
            ("q_scale", q_scale, spec.num_qo_heads),
            ("k_scale", k_scale, spec.num_kv_heads),
            ("v_scale", v_scale, spec.num_kv_heads),
        ):
            if isinstance(scale, Tensor):
                check(
                    scale.numel() in (1, heads), name, list(scale.shape), f"a number, or one for each of {heads} heads"
                )
            scales[name] = 1.0 if scale is None else scale
        plain, wanted = (lse_base, lse_layout) == ("log2", "NH"), return_lse or lse is not None
        out, sums = outputs(len(q), spec, self.device, out, lse if plain else None, wanted)
        call = registry.Call(q, k, v, self._qo, self._kv, spec, mask=self._mask, sinks=sinks, **scales)
        registry.attend(call, out, sums, self._backend)
        if sums is None:
            return out
        if not plain:
            sums = sums * math.log(2) if lse_base == "e" else sums
            sums = sums.T.contiguous() if lse_layout == "HN" else sums
            sums = sums if lse is None else lse.copy_(sums)
        return (out, sums) if return_lse else out


def copy_into(buffer: Tensor | None, values: Tensor, name: str, non_blocking: bool) -> Tensor:
    """values, in the buffer that a CUDA-graph wrapper was given for them (its first entries)."""
    if buffer is None:
        raise ValueError(f"{name} is needed with use_cuda_graph=True")
    if len(values) > len(buffer):
        raise ValueError(f"{name} holds {len(buffer)} entries: this plan needs {len(values)}")
    buffer[: len(values)].copy_(values, non_blocking=non_blocking)
    return buffer


def fixed_batch(buffer: Tensor | None, name: str, batch_size: int, extra: int = 0) -> None:
    """Refuse a batch of another size than the buffers of a CUDA-graph wrapper were made for."""
    if buffer is None:
        raise ValueError(f"{name} is needed with use_cuda_graph=True")
    fixed = len(buffer) - extra
    if batch_size != fixed:
        raise ValueError(f"the batch has {batch_size} requests: {name} was made for {fixed}, and a CUDA graph is fixed")


class PrefillWrapper(AttentionWrapper):
    """What prefill over pages and over ragged rows share: query rows, custom masks, their CUDA-graph buffers."""

    _qo_indptr_buf: Tensor | None
    _custom_mask_buf: Tensor | None
    _mask_indptr_buf: Tensor | None

    def _plan_queries(self, qo_indptr: Tensor, non_blocking: bool) -> RaggedLayout:
        """The query rows, in the wrapper's buffer or as given."""
        table(qo_indptr, "qo_indptr")
        if self.is_cuda_graph_enabled:
            fixed_batch(self._qo_indptr_buf, "qo_indptr_buf", len(qo_indptr) - 1, extra=1)
            RaggedLayout(qo_indptr)  # refuses before the buffer changes
            return RaggedLayout(copy_into(self._qo_indptr_buf, qo_indptr, "qo_indptr_buf", non_blocking))
        self._qo_indptr_buf = qo_indptr.to(self.device, non_blocking=non_blocking)
        return RaggedLayout(self._qo_indptr_buf)

    def _plan_mask(
        self, custom_mask: Tensor | None, packed_custom_mask: Tensor | None, qo: RaggedLayout, kv_lens: Tensor
    ) -> PackedMask | None:
        """The requests' masks, packed; the packed form wins where both are given."""
        if packed_custom_mask is not None:
            mask = PackedMask.from_packed(packed_custom_mask, qo.lengths(), kv_lens)
        elif custom_mask is not None:
            mask = PackedMask.from_bool(custom_mask, qo.lengths(), kv_lens)
        else:
            return None
        if not self.is_cuda_graph_enabled:
            return mask
        bits = copy_into(self._custom_mask_buf, mask.bits, "custom_mask_buf", False)
        return PackedMask(bits, copy_into(self._mask_indptr_buf, mask.indptr, "mask_indptr_buf", False))

    def _check_rows(self, q: Tensor) -> None:
        """Enough rows of q for the plan; more are padding, whose output is 0."""
        indptr = self._qo.indptr
        if indptr.device.type == "cpu" and q.ndim == 3:
            check(
                len(q) >= int(indptr[-1]),
                "q.shape",
                list(q.shape),
                f"at least qo_indptr[-1] = {int(indptr[-1])} tokens",
            )
