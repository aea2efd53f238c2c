"""Attention as two torch operations: `torch.ops.quire.attend` of a planned batch, `attend_one` of one request."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.items import Items
from quire.definition.masks import PackedMask, as_bool
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import FLOATS, FLOATS8, AttentionSpec, attention_spec
from quire.definition.tensors import check_optional, check_qkv, refuse_grad
from quire.kernels import registry
from quire.kernels.call import Call, Replay
from quire.kernels.family import Family
from quire.kernels.ops import operation, traced
from quire.kernels.pack import pack

Scale = float | Tensor


@lru_cache(maxsize=4096, typed=True)
def _spec_of_run(
    spec: AttentionSpec, window_left: int | None, logits_soft_cap: float | None, sm_scale: float | None, sinks: bool
) -> AttentionSpec:
    """A planned layer with the values that one run overrides."""
    given = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
    return spec.replace(sinks=sinks, **{name: value for name, value in given.items() if value is not None})


def attend(
    call: Call,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    family: Family | None = None,
    *,
    window_left: int | None = None,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
) -> Replay | None:
    """Compute a call into out and, unless it is None, lse. The last three arguments override the planned layer's values
    unless they are None. Returns what replays the call, as `Family.attend`; None while it is traced.

    Args:
        backend: "auto", or the name of a kernel family.
        family: the one that a plan chose for the layer. The registry chooses where it is None, where values or sinks of
            this run change the layer, and in traced code.

    Raises:
        ValueError: a query, key or value requires grad; or no family computes the call.
    """
    if call.q_pe is None:
        refuse_grad(q=call.q, k=call.k, v=call.v)
    else:
        refuse_grad(q_nope=call.q, q_pe=call.q_pe, ckv_cache=call.k, kpe_cache=call.k_pe)
    if not traced(call.q):
        # Entering inference mode takes microseconds.
        if torch.is_inference_mode_enabled():
            return _compute(call, out, lse, backend, family, window_left, logits_soft_cap, sm_scale)
        with torch.inference_mode():
            return _compute(call, out, lse, backend, family, window_left, logits_soft_cap, sm_scale)
    kv, mask = call.kv, call.mask
    items = call.items
    q_scale, k_scale, v_scale, numbers = _split_scales(call.q_scale, call.k_scale, call.v_scale)
    _attend_op(
        out,
        lse,
        call.int_workspace,
        call.q,
        call.k,
        call.v,
        call.q_pe,
        call.k_pe,
        call.qo.indptr,
        kv.indptr,
        kv.indices if isinstance(kv, PageTable) else None,
        kv.last_page_len if isinstance(kv, PageTable) else None,
        kv.page_size if isinstance(kv, PageTable) else 0,
        mask.bits if mask is not None else None,
        mask.indptr if mask is not None else None,
        items.prefix_lens if items is not None else None,
        items.positions if items is not None else None,
        items.length if items is not None else 0,
        call.sinks,
        q_scale,
        k_scale,
        v_scale,
        [*numbers, float(call.pe_gain)],
        call.max_q_len,
        call.spec.text,
        backend,
        window_left,
        logits_soft_cap,
        sm_scale,
    )
    return None


def _split_scales(*scales: Scale) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[float]]:
    """The scales of q, k and v as an operation takes them: tensors, and numbers that are 1 where a tensor is given."""
    q_scale, k_scale, v_scale = (x if isinstance(x, Tensor) else None for x in scales)
    return q_scale, k_scale, v_scale, [1.0 if isinstance(x, Tensor) else float(x) for x in scales]


def _join_scales(
    numbers: list[float], q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Scale, Scale, Scale]:
    q_number, k_number, v_number = numbers
    return (
        q_number if q_scale is None else q_scale,
        k_number if k_scale is None else k_scale,
        v_number if v_scale is None else v_scale,
    )


def _compute(
    call: Call,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    family: Family | None,
    window_left: int | None,
    logits_soft_cap: float | None,
    sm_scale: float | None,
) -> Replay | None:
    """Check what lies on the host against the tensors' sizes, apply the run's overrides, and let a family compute the
    call. This must run in inference mode: sinks and scales may be parameters, and outputs may be inference tensors.
    """
    spec, rows = call.spec, call.qo.indptr
    if rows.device.type == "cpu":
        check(
            len(call.q) >= int(rows[-1]),
            "q.shape",
            list(call.q.shape),
            f"at least qo_indptr[-1] = {int(rows[-1])} tokens",
        )
    if isinstance(call.kv, PageTable):
        call.kv.check_pool(call.k.shape[0])
    elif call.kv.indptr.device.type == "cpu":
        end = int(call.kv.indptr[-1])
        check(len(call.k) >= end, "k.shape", list(call.k.shape), f"at least kv_indptr[-1] = {end} tokens")
    sinks = call.sinks is not None
    if window_left is not None or logits_soft_cap is not None or sm_scale is not None or sinks != spec.sinks:
        call.spec, family = _spec_of_run(spec, window_left, logits_soft_cap, sm_scale, sinks), None
    return registry.admit(call, backend, family).attend(call, out, lse)


@operation("attend", "out", "lse")
def _attend_op(
    out: Tensor,
    lse: Tensor | None,
    int_workspace: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pe: Tensor | None,
    k_pe: Tensor | None,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor | None,
    kv_last_page_len: Tensor | None,
    page_size: int,
    mask_bits: Tensor | None,
    mask_indptr: Tensor | None,
    prefix_lens: Tensor | None,
    item_positions: Tensor | None,
    items_len: int,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scales: list[float],
    max_q_len: int,
    layer: str,
    backend: str,
    window_left: int | None,
    logits_soft_cap: float | None,
    sm_scale: float | None,
) -> None:
    """`torch.ops.quire.attend`: the fields of a `Call` one by one; `layer` is the text of its `AttentionSpec`.

    The float workspace is allocated here. The caller's is part of a buffer that other calls of a graph use as well, and
    graph compilers cannot handle overlapping tensors that are written to. The int workspace holds zeros again after
    the call, so that a graph may treat it as read-only.
    """
    kv: PageTable | RaggedLayout = RaggedLayout(kv_indptr)
    if kv_indices is not None and kv_last_page_len is not None:
        kv = PageTable(kv_indptr, kv_indices, kv_last_page_len, page_size)
    mask = PackedMask(mask_bits, mask_indptr) if mask_bits is not None and mask_indptr is not None else None
    items = None
    if prefix_lens is not None and item_positions is not None:
        items = Items(prefix_lens, item_positions, items_len)
    q_gain, k_gain, v_gain = _join_scales(scales[:3], q_scale, k_scale, v_scale)
    call = Call(
        q,
        k,
        v,
        RaggedLayout(qo_indptr),
        kv,
        AttentionSpec.parse(layer),
        mask=mask,
        sinks=sinks,
        q_scale=q_gain,
        k_scale=k_gain,
        v_scale=v_gain,
        items=items,
        q_pe=q_pe,
        k_pe=k_pe,
        pe_gain=scales[3],
        max_q_len=max_q_len,
        int_workspace=int_workspace,
    )
    with torch.inference_mode():
        _compute(call, out, lse, backend, None, window_left, logits_soft_cap, sm_scale)


def attend_one(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    scales: tuple[Scale, Scale, Scale],
    **layer: Any,
) -> None:
    """Attention of one request without a plan. Nothing is copied to a device, so that CUDA graphs can capture it.

    Args:
        out, lse: where to write, as `attend`.
        q: [q_len, num_qo_heads, head_dim_qk].
        k, v: [kv_len, num_kv_heads, head_dim].
        custom_mask: bool or integers [q_len, kv_len]; packed_custom_mask: its bits, uint8, which are used where both
            are given.
        scales: factors of the stored q, k and v.
        layer: the remaining arguments of `torch.ops.quire.attend_one`.

    Raises:
        ValueError: a tensor that does not fit or that requires grad, or a layer that no family computes.
    """
    refuse_grad(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(x.dtype in FLOATS + FLOATS8, f"{name}.dtype", x.dtype, "float32, bfloat16, float16 or an fp8 type")
    check_optional(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
    _attend_one_op(out, lse, q, k, v, custom_mask, packed_custom_mask, *_split_scales(*scales), **layer)


@operation("attend_one", "out", "lse")
def _attend_one_op(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scales: list[float],
    causal: bool,
    pos_encoding: str,
    window_left: int | None,
    window_right: int | None,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    batch_invariant: bool,
    backend: str,
) -> None:
    """`torch.ops.quire.attend_one`. The spec is made inside the operation, where sizes are not traced symbols."""
    mask = _mask_of_one(len(q), len(k), custom_mask, packed_custom_mask, q.device)
    spec = attention_spec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2],
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        o_dtype=out.dtype,
        causal=causal and mask is None,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        pos_encoding=pos_encoding,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        custom_mask=mask is not None,
        batch_invariant=batch_invariant,
    )
    check_qkv(q, k, v, spec, q.device)
    qo, kv = RaggedLayout(_indptr_of_one(len(q), q.device)), RaggedLayout(_indptr_of_one(len(k), q.device))
    q_gain, k_gain, v_gain = _join_scales(scales, q_scale, k_scale, v_scale)
    call = Call(q, k, v, qo, kv, spec, mask=mask, max_q_len=len(q), q_scale=q_gain, k_scale=k_gain, v_scale=v_gain)
    registry.admit(call, backend).attend(call, out, lse)


def _indptr_of_one(length: int, device: torch.device) -> Tensor:
    """int32 [0, length], made on the device."""
    if not length:
        return torch.zeros(2, dtype=torch.int32, device=device)
    return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)


def _mask_of_one(
    q_len: int, kv_len: int, custom_mask: Tensor | None, packed: Tensor | None, device: torch.device
) -> PackedMask | None:
    bits, size = packed, -(-q_len * kv_len // 8)
    if bits is None:
        if custom_mask is None:
            return None
        custom_mask = as_bool(custom_mask)
        fits = custom_mask.numel() == q_len * kv_len
        check(fits, "custom_mask.shape", list(custom_mask.shape), f"q_len * kv_len = {q_len * kv_len} entries")
        bits = torch.empty(size, dtype=torch.uint8, device=custom_mask.device)
        pack(custom_mask.flatten(), None, None, bits, False)
    fits = bits.dtype == torch.uint8 and bits.ndim == 1 and len(bits) >= size
    given = f"{bits.dtype} of shape {list(bits.shape)}"
    check(fits, "packed_custom_mask", given, f"a uint8 vector of ceil(q_len * kv_len / 8) = {size} bytes")
    return PackedMask(bits.to(device), _indptr_of_one(size, device))
