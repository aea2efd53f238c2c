"""Batches of latent attention (MLA), their two parts, and their comparison with the definition in float64."""

from __future__ import annotations

import pytest
import torch

from helpers.interpret import INTERPRETED
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import attention_spec, oracle

BACKEND = "triton" if INTERPRETED else "auto"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F32, F16 = torch.float32, torch.float16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PRECISION = {F32: 3e-6, F16: 6e-4, BF16: 6e-3 if INTERPRETED else 3.2e-3}


def latent_batch(rng, q_lens, kv_lens, dtype, *, kv_dtype=None, heads=None, dims=None, padding=0, **layer) -> Batch:
    """A batch whose one KV head has both parts; what must not be read is NaN."""
    ckv, kpe = dims or rng.choice([(512, 64), (512, 0), (128, 64), (256, 0)])
    spec = attention_spec(
        num_qo_heads=heads or rng.choice((3, 16, 64)), num_kv_heads=1, head_dim_qk=ckv + kpe, head_dim_vo=ckv,
        q_dtype=dtype, kv_dtype=kv_dtype, **{"causal": rng.choice((True, False)), "sm_scale": 0.07} | layer,
    )  # fmt: skip
    return random_batch(spec, q_lens, kv_lens, rng.choice((1, 5, 16, 32)), padding=padding)


def exact(batch: Batch, ckv_scale=1.0, kpe_scale=1.0):
    k, width = batch.k.double(), batch.spec.head_dim_vo
    ckv, kpe = k[..., :width] * ckv_scale, k[..., width:] * kpe_scale
    keys = torch.cat([ckv, kpe], -1)
    return oracle.attend_batch(batch.q, keys, ckv, batch.qo, batch.kv, batch.spec, sinks=batch.sinks)


def inputs(batch: Batch, device, apart=False):
    """q_nope, q_pe, ckv and kpe: slices of the batch's tensors, or on their own."""
    q, k, width = batch.q.to(device), batch.k.squeeze(2).to(device), batch.spec.head_dim_vo
    parts = q[..., :width], q[..., width:], k[..., :width], k[..., width:]
    return [x.contiguous() for x in parts] if apart else list(parts)


def check(batch: Batch, out, lse=None, expected=None, base_e=False):
    wanted, wanted_lse = expected or exact(batch)
    assert relative_error(out.float().cpu(), wanted) < PRECISION[batch.spec.q_dtype]
    if lse is not None:
        wanted_lse = wanted_lse * (0.6931471805599453 if base_e else 1)
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=2e-5, atol=2e-5)
