"""The layer of tests that make calls as programs written for FlashInfer do."""

from __future__ import annotations

import pytest
import torch

from quire.bench.batches import Batch, relative_error
from quire.definition import attention_spec

F16, F8 = torch.float16, torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPEC = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=F16)


def close(result, batch: Batch, **changes):
    out, lse = result if isinstance(result, tuple) else (result, None)
    exact, exact_lse = Batch(**{**vars(batch), **changes}).exact()
    assert relative_error(out, exact) < 1e-3
    if lse is not None:
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
