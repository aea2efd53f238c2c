"""What holds ptxas in place, by the machine code with it and without it. A test fails where it stops working, and where
it is no longer needed, so that it can be removed.
"""

from __future__ import annotations

import re

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.definition import AttentionSpec
from quire.kernels.hopper.mla import tile as mla_tile
from quire.kernels.hopper.prefill import tile as prefill_tile


@gluon.jit
def _constant_zero():
    return gl.to_tensor(0)


@gluon.jit
def _unchanged(x):
    return x


def _without(monkeypatch, tmp_path, module, name, replacement):
    """Let kernels be compiled with a function of their module replaced, which Triton's keys of kernels do not show."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, name, replacement)


def _exponentials_before_wait() -> list[int]:
    """Of each loop over keys of a prefill kernel, exponentials between QK and the end of PV."""
    from helpers.triton_compile import compile_prefill, disassemble

    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=64, q_dtype=torch.bfloat16)
    _config, usage = compile_prefill(spec)
    order = "".join(re.findall(r"(MUFU\.EX2|HGMMA|DEPBAR\.LE gsb0, 0x[01])", disassemble(usage)))
    return [x.count("MUFU.EX2") for x in re.findall(r"HGMMADEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", order)]


@pytest.mark.slow
def test_hold_in_prefill_keeps_wait_for_pv_behind_exponentials(monkeypatch, tmp_path):
    loops = _exponentials_before_wait()
    assert len(loops) == 6
    assert min(loops) >= 32
    _without(monkeypatch, tmp_path, prefill_tile, "_hold", _unchanged)
    assert _exponentials_before_wait() == [0] * 6


@pytest.mark.slow
def test_opaque_zero_in_mla_saves_registers(monkeypatch, tmp_path):
    from helpers.triton_compile import compile_latent

    spec = AttentionSpec(num_qo_heads=128, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, latent=True)
    given = spec, 1, 16, False
    assert compile_latent(*given).spills == 0
    _without(monkeypatch, tmp_path, mla_tile, "_opaque_zero", _constant_zero)
    assert compile_latent(*given).spills > 100
