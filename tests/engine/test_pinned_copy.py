"""Copies of tensors to a GPU through pinned memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.engine import pinned_copy
from quire.engine.pinned_copy import PinnedCopies


@pytest.mark.gpu
def test_pinned_copies_of_several_threads_equal_their_sources(monkeypatch, rng):
    """Of sizes around that of a buffer, of no and of one element, and of tensors that are not contiguous."""
    monkeypatch.setattr(pinned_copy, "CHUNK_BYTES", 1 << 16)
    copy = PinnedCopies(torch.device("cuda", torch.cuda.current_device()))
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool)
    sizes = [0, 1, 1 << 14, (1 << 14) + 1, 1 << 16, *(rng.randrange(1 << 20) for _ in range(40))]
    sources = [torch.randint(0, 2, (size,), dtype=torch.uint8).to(rng.choice(dtypes)) for size in sizes]
    sources += [torch.tensor(3.5), torch.randn(300, 200).T, torch.randn(64, 3, 50)[:, 1]]
    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(copy, sources))
    torch.cuda.synchronize()
    for x, y in zip(sources, copies, strict=True):
        assert y.is_cuda
        assert y.dtype == x.dtype
        assert torch.equal(y.cpu().float(), x.float())
