"""Attention as an operation of torch's."""

from __future__ import annotations

from torch import Tensor

from quire.attention.items import Items
from quire.attention.masks import PackedMask
from quire.attention.pages import PageTable, RaggedLayout
from quire.attention.spec import AttentionSpec, check
from quire.kernels import registry
from quire.kernels.ops import operation, traced


def attend(
    call: registry.Call,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    window_left: int | None = None,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
) -> registry.Repeat | None:
    """Compute a call into out and, unless it is None, lse; its layer is the plan's but for what this run says. Returns
    what repeats it, as `quire.kernels.registry.attend`.
    """
    if not traced(call.q):
        return _compute(call, out, lse, backend, window_left, logits_soft_cap, sm_scale)
    kv, mask, items = call.kv, call.mask, call.items
    scales = (call.q_scale, call.k_scale, call.v_scale)
    per_head = [x if isinstance(x, Tensor) else None for x in scales]
    _attend(
        out,
        lse,
        call.scratch,
        call.arrivals,
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
        per_head[0],
        per_head[1],
        per_head[2],
        [1.0 if isinstance(x, Tensor) else float(x) for x in (*scales, call.pe_gain)],
        call.max_q_len,
        call.spec.text,
        backend,
        window_left,
        logits_soft_cap,
        sm_scale,
    )
    return None


def _compute(
    call: registry.Call,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    window_left: int | None,
    logits_soft_cap: float | None,
    sm_scale: float | None,
) -> registry.Repeat | None:
    spec, rows = call.spec, call.qo.indptr
    if rows.device.type == "cpu":
        check(
            len(call.q) >= int(rows[-1]),
            "q.shape",
            list(call.q.shape),
            f"at least qo_indptr[-1] = {int(rows[-1])} tokens",
        )
    if isinstance(call.kv, PageTable):
        call.kv.check_pool(len(call.k))
    sinks = call.sinks is not None
    if window_left is not None or logits_soft_cap is not None or sm_scale is not None or sinks != spec.sinks:
        call.spec = registry.layer(spec, window_left, logits_soft_cap, sm_scale, sinks)
    return registry.attend(call, out, lse, backend)


@operation("attend", "out", "lse", "scratch", "arrivals")
def _attend(
    out: Tensor,
    lse: Tensor | None,
    scratch: Tensor | None,
    arrivals: Tensor | None,
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
    """`torch.ops.quire.attend`: a `Call` in pieces; `layer` is the text of its `AttentionSpec`."""
    kv: PageTable | RaggedLayout = RaggedLayout(kv_indptr)
    if kv_indices is not None and kv_last_page_len is not None:
        kv = PageTable(kv_indptr, kv_indices, kv_last_page_len, page_size)
    mask = PackedMask(mask_bits, mask_indptr) if mask_bits is not None and mask_indptr is not None else None
    items = None
    if prefix_lens is not None and item_positions is not None:
        items = Items(prefix_lens, item_positions, items_len)
    scale = [number if x is None else x for x, number in zip((q_scale, k_scale, v_scale), scales[:3], strict=True)]
    call = registry.Call(
        q=q,
        k=k,
        v=v,
        qo=RaggedLayout(qo_indptr),
        kv=kv,
        spec=AttentionSpec.parse(layer),
        mask=mask,
        sinks=sinks,
        q_scale=scale[0],
        k_scale=scale[1],
        v_scale=scale[2],
        items=items,
        q_pe=q_pe,
        k_pe=k_pe,
        pe_gain=scales[3],
        max_q_len=max_q_len,
        scratch=scratch,
        arrivals=arrivals,
    )
    _compute(call, out, lse, backend, window_left, logits_soft_cap, sm_scale)
