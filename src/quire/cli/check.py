"""quire check: compare every kernel family that this machine can run with the oracle, on random batches, and the
operations beside attention with their formulas.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from quire.bench.batches import Batch, random_batch, relative_error
from quire.cli.check_layers import check_layers
from quire.definition.spec import AttentionSpec, attention_spec
from quire.kernels import registry
from quire.kernels.call import Call

_BASE = attention_spec(num_qo_heads=1, num_kv_heads=1, head_dim_qk=64, q_dtype=torch.float16)
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
# This bound is absolute, since the logits are of order 1 to 100.
LSE_BOUND = 2e-5
_LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "not causal": {"causal": False},
    "window": {"window_left": 37},
    "soft cap": {"logits_soft_cap": 8.0},
    "ALiBi": {"pos_encoding": "ALIBI"},
    "ALiBi, mask": {"pos_encoding": "ALIBI", "custom_mask": True, "causal": False},
    "RoPE": {"pos_encoding": "ROPE_LLAMA", "rope_theta": 5e4},
    "RoPE, not causal": {"pos_encoding": "ROPE_LLAMA", "rope_theta": 5e4, "causal": False},
    "RoPE, mask": {"pos_encoding": "ROPE_LLAMA", "rope_scale": 2.0, "custom_mask": True, "causal": False},
    "sinks": {"sinks": True},
    "mask": {"custom_mask": True, "causal": False},
    "all": {"pos_encoding": "ALIBI", "logits_soft_cap": 8.0, "window_left": 99, "sinks": True},
}
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
)


def run(args: argparse.Namespace) -> int:
    if args.batches < 1:
        raise ValueError(f"--batches {args.batches}: it must be at least 1")
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    names = [name for name in registry.FAMILIES if name != "reference"]
    if args.backend is not None:
        registry.canonical(args.backend)
        names = [args.backend]
    devices = [torch.device(name) for name in ("cpu", "cuda") if name == "cpu" or torch.cuda.is_available()]
    runnable = [(name, device, n) for device in devices for name in names for n in _longest(name, device)]
    if not runnable:
        raise ValueError(f"this machine can't run {' or '.join(names)}: see quire env")
    rows = [row for each in runnable for row in _check_family(*each, seed, args.batches)]
    layers = [row for device in devices for row in check_layers(seed, args.batches, device)] if not args.backend else []
    if args.json:
        print(json.dumps({"seed": seed, "rows": rows, "layers": layers}, indent=2))
    else:
        _print(rows, layers, seed)
    return 0 if rows and all(row["ok"] for row in (*rows, *layers)) else 1


def _longest(family: str, device: torch.device) -> list[int]:
    """The largest max_q_len that a family supports, in a list: [0] for any, [8] or [1] for decode, [] for none.
    With 8 query tokens and the random groups of heads, a KV head has at most 64 query rows.
    """
    return [n for n in (0, 8, 1) if registry.why_not(family, _BASE, device, n) is None][:1]


def _check_family(
    family: str, device: torch.device, max_q_len: int, seed: int, batches: int
) -> Iterator[dict[str, Any]]:
    """A row for each dtype and kind of layer that the family supports: the largest errors over some batches. Requests
    have at most max_q_len query tokens (0: any number).
    """
    for q_dtype, kv_dtype in _DTYPES:
        for name, layer in _LAYERS.items():
            rng = random.Random(f"{seed} {q_dtype} {kv_dtype} {name}")
            torch.manual_seed(rng.randrange(1 << 31))
            specs = (_layer(rng, q_dtype, kv_dtype, layer) for _ in range(50 * batches))
            supported = (spec for spec in specs if registry.why_not(family, spec, device, max_q_len) is None)
            errors = [_errors(family, *_batch(rng, spec, device, max_q_len)) for spec in islice(supported, batches)]
            if not errors:
                continue
            out, lse = (
                max(column) if not any(x != x for x in column) else float("nan") for column in zip(*errors, strict=True)
            )
            bound = BOUNDS[q_dtype]
            yield {
                "family": family,
                "device": device.type,
                "q": str(q_dtype).removeprefix("torch."),
                "kv": str(kv_dtype).removeprefix("torch."),
                "layer": name,
                "error": out,
                "bound": bound,
                "lse_error": lse,
                "ok": out <= bound and lse <= LSE_BOUND,
            }


def _layer(rng: random.Random, q_dtype: torch.dtype, kv_dtype: torch.dtype, layer: dict[str, Any]) -> AttentionSpec:
    """A layer with random heads and head sizes."""
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 7))
    dim = rng.choice((16, 64, 72, 128))
    return attention_spec(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=rng.choice((dim, dim, 40)),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        **layer,
    )


def _batch(rng: random.Random, spec: AttentionSpec, device: torch.device, max_q_len: int) -> tuple[Batch, int]:
    """Requests on random pages that decode, prefill or are empty, one of them with more queries than keys; and the
    max_q_len of their plan (0: unknown).
    """
    max_q_len = rng.choice((1, max_q_len)) if max_q_len else 0
    q_lens, kv_lens = [max_q_len or 50], [rng.choice((0, 1, 17)) if max_q_len == 0 else rng.randrange(max_q_len)]
    for _ in range(rng.randint(0, 4)):
        q_lens.append(min(rng.choice((1, 1, 3, 50)), max_q_len or 50))
        kv_lens.append(rng.choice((0, 1, 17, 160, 700)))
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0} if spec.kv_dtype.itemsize == 1 else {}
    page_size, kv_layout = rng.choice((1, 4, 16, 64)), rng.choice(("NHD", "HND"))
    return random_batch(spec, q_lens, kv_lens, page_size, kv_layout=kv_layout, device=device, **scales), max_q_len


def _errors(family: str, batch: Batch, max_q_len: int) -> tuple[float, float]:
    """The relative error of the output, and the largest absolute error of the LSE (infinite if just one is)."""
    spec = batch.spec
    out = torch.full((len(batch.q), spec.num_qo_heads, spec.head_dim_vo), torch.nan).to(batch.q.device, spec.o_dtype)
    lse = torch.full(out.shape[:2], torch.nan, device=out.device)
    extras: dict[str, Any] = {"sinks": batch.sinks, "k_scale": batch.k_scale, "v_scale": batch.v_scale}
    call = Call(batch.q, batch.k, batch.v, batch.qo, batch.kv, spec, mask=batch.mask, max_q_len=max_q_len, **extras)
    registry.admit(call, family).attend(call, out, lse)
    exact, exact_lse = batch.exact()
    gap = torch.where(exact_lse == lse, 0.0, (exact_lse - lse).abs())
    return relative_error(out, exact), float(gap.max()) if gap.numel() else 0.0


def _print(rows: list[dict[str, Any]], layers: list[dict[str, Any]], seed: int) -> None:
    print(f"{'family':8} {'q':9} {'kv':14} {'layer':16} {'error':>8} {'bound':>8} {'lse':>8}")
    for row in rows:
        mark = "ok" if row["ok"] else "MISS"
        numbers = f"{row['error']:8.1e} {row['bound']:8.0e} {row['lse_error']:8.1e}"
        print(f"{row['family']:8} {row['q']:9} {row['kv']:14} {row['layer']:16} {numbers}  {mark}")
    if layers:
        print(f"\n{'operation':24} {'device':6} {'dtype':9} {'error':>8} {'bound':>8}")
    for row in layers:
        name, numbers = (
            f"{row['operation']:24} {row['device']:6} {row['dtype']:9}",
            f"{row['error']:8.1e} {row['bound']:8.0e}",
        )
        print(f"{name} {numbers}  {'ok' if row['ok'] else 'MISS'}")
    missed = sum(not row["ok"] for row in (*rows, *layers))
    print(f"\n{len(rows) + len(layers)} rows, {missed} missed; --seed {seed} repeats this run")
