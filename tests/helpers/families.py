"""Calls of a kernel family on a random batch, and their comparison with the oracle."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from helpers.interpret import INTERPRETED
from quire.bench.batches import Batch, relative_error
from quire.definition import AttentionSpec, PageTable, RaggedLayout, attention_spec, oracle
from quire.definition.items import Items
from quire.definition.pages import LengthTable
from quire.kernels import registry
from quire.kernels.call import Call

FAMILIES = ["cpu", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.gpu)]
BOUNDS = {
    # For all dtypes, beside the rounding of the output.
    "cpu": {torch.float32: 1e-6},
    # Triton's interpreter rounds to bf16 by cutting off.
    "triton": {torch.float32: 2e-6, torch.bfloat16: 5e-3 if INTERPRETED else 3e-3, torch.float16: 5e-4},
    "hopper": {torch.bfloat16: 3e-3, torch.float16: 5e-4},
}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
]
LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "not causal": {"causal": False},
    "window": {"window_left": 17},
    "window not causal": {"causal": False, "window_left": 40},
    "no window but itself": {"window_left": 0},
    "window to the right": {"causal": False, "window_right": 6},
    "window to both sides": {"causal": False, "window_left": 11, "window_right": 19},
    "causal, so that the right is of no account": {"window_right": 3},
    "soft cap": {"logits_soft_cap": 5.0},
    "alibi": {"pos_encoding": "ALIBI"},
    "alibi and mask": {"pos_encoding": "ALIBI", "custom_mask": True, "causal": False},
    "rope": {"pos_encoding": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e4},
    "rope not causal": {"pos_encoding": "ROPE_LLAMA", "causal": False},
    "mask": {"custom_mask": True, "causal": False},
    "mask and window": {"custom_mask": True, "window_left": 30},
    "sinks": {"sinks": True},
    "all": {"pos_encoding": "ALIBI", "logits_soft_cap": 3.0, "window_left": 100, "sinks": True, "custom_mask": True},
}


def compute(batch: Batch, family: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a batch, in tensors that were NaN."""
    spec, device = batch.spec, "cuda" if family in ("triton", "hopper") and not INTERPRETED else "cpu"
    out = torch.full((len(batch.q), spec.num_qo_heads, spec.head_dim_vo), torch.nan).to(device, spec.o_dtype)
    lse = torch.full(out.shape[:2], torch.nan, device=device)
    given = {
        "q": batch.q,
        "k": batch.k,
        "v": batch.v,
        "qo": batch.qo,
        "kv": batch.kv,
        "spec": spec,
        "mask": batch.mask,
    }
    given |= {"sinks": batch.sinks, "k_scale": batch.k_scale, "v_scale": batch.v_scale}
    moved = {name: move(x, device) for name, x in {**given, **changes}.items()}
    call = Call(**moved)
    registry.admit(call, family).attend(call, out, lse)
    return out.cpu(), lse.cpu()


def move(x, device):
    """A tensor, or a dataclass with tensors, on a device."""
    if device == "cpu":
        return x
    if isinstance(x, LengthTable):
        return LengthTable.of(*(y.to(device) for y in (x.indptr, x.indices, x.kv_lens)), x.page_size, "kv_lens")
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if is_dataclass(x) and not isinstance(x, AttentionSpec):
        return replace(x, **{f.name: move(getattr(x, f.name), device) for f in fields(x) if f.init})
    return x


def oracle_result(batch: Batch, items: Items | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the oracle, in float64, computed by a GPU where there is one: with long requests it is the
    longest part of a test otherwise.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    there = move(batch, device)
    extras = {name: getattr(there, name) for name in ("mask", "sinks", "k_scale", "v_scale")}
    given = there.q, there.k, there.v, there.qo, there.kv, there.spec
    out, lse = oracle.attend_batch(*given, items=move(items, device), **extras)
    return out.to(batch.q.device), lse.to(batch.q.device)


def check(batch: Batch, out: torch.Tensor, lse: torch.Tensor, family: str = "cpu") -> None:
    exact, exact_lse = oracle_result(batch)
    finite = exact_lse.isfinite()
    if family == "cpu":  # which computes in float32 and rounds once
        # The relative error of a weight is the absolute error of its logit, which grows with the logit.
        largest = float(exact_lse[finite].max()) if finite.any() else 0.0
        bound = BOUNDS["cpu"][torch.float32] * max(1.0, largest / 6)
        bound += 1.01 * relative_error(exact.to(out.dtype), exact)
    else:
        bound = BOUNDS[family][batch.spec.q_dtype]
    assert relative_error(out, exact) < bound
    assert torch.equal(lse[~finite].double(), exact_lse[~finite])
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], rtol=1e-5, atol=1e-5)


def layer(rng, q_dtype, kv_dtype, **changes):
    kv_heads, dim = rng.choice((1, 2, 3)), rng.choice((8, 16, 64, 72, 128))
    return attention_spec(
        num_qo_heads=kv_heads * rng.choice((1, 2, 3, 4, 7)),
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=rng.choice((dim, dim, 40)),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        **changes,
    )


def draw_scales(rng, spec: AttentionSpec, per_head: tuple[bool, bool]) -> dict[str, float | torch.Tensor]:
    """Random k_scale and v_scale of a batch, each a number or one per KV head. A kernel is compiled for each such pair,
    so that tests choose it once for the batches of a layer.
    """
    heads = spec.num_kv_heads
    return {
        f"{x}_scale": torch.rand(heads) + 0.5 if each else rng.choice((1.0, 0.5))
        for x, each in zip("kv", per_head, strict=True)
    }


def alone(batch: Batch, b: int, begin: int, end: int) -> Batch:
    """Query tokens begin to end of request b, whose keys end with the last of them: a chunk of it."""
    start, size = int(batch.qo.indptr[b]), batch.kv.page_size
    past = int(batch.kv.lengths()[b] - batch.qo.lengths()[b])
    pages = batch.kv.indices[int(batch.kv.indptr[b]) : int(batch.kv.indptr[b]) + -(-(past + end) // size)]
    last = torch.tensor([(past + end - 1) % size + 1]).int()
    table = PageTable(torch.tensor([0, len(pages)]).int(), pages, last, size)
    return replace(
        batch, q=batch.q[start + begin : start + end], qo=RaggedLayout(torch.tensor([0, end - begin]).int()), kv=table
    )


def spoil(batch: Batch) -> Batch:
    """Write numbers that lead outside into the tables of a batch, and return the batch that kernels must see instead:
    ends and lengths bounded by the tensors, page ids clamped to the pool, of which any page may then be read.
    """
    pages, indices = len(batch.k), batch.kv.indices
    for cache in (batch.k, batch.v):
        cache[cache.isnan()] = 0.5
    bounded = PageTable(batch.kv.indptr.clone(), indices.clone(), batch.kv.last_page_len.clone(), batch.kv.page_size)
    bounded.indices[1], bounded.indices[2] = pages - 1, 0
    expected = replace(batch, kv=bounded, qo=RaggedLayout(batch.qo.indptr.clone()))
    indices[1], indices[2] = 1 << 30, -(1 << 30)
    batch.kv.indptr[-1] = batch.kv.last_page_len[0] = batch.qo.indptr[-1] = 1 << 30
    return expected
