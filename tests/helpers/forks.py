"""Attention on the CPU in forked processes."""

from __future__ import annotations

import os
import select

import torch

import quire
from quire.bench.batches import relative_error
from quire.definition import attention_spec
from quire.definition.oracle import attend

LAYER = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=torch.float32, causal=False)


class Attention:
    """Attention of few query rows and of many by the CPU family. No operation of torch's is large enough to run in
    several threads, which would not survive a fork either.
    """

    def __init__(self) -> None:
        self.calls = [[torch.randn(n, heads, 32) for n, heads in ((q_len, 4), (40, 2), (40, 2))] for q_len in (1, 20)]
        self.exact = torch.cat([attend(*call, LAYER)[0] for call in self.calls])

    def run(self) -> torch.Tensor:
        return torch.cat([quire.single_prefill_with_kv_cache(*call, backend="cpu") for call in self.calls])

    def error(self) -> float:
        return relative_error(self.run(), self.exact)


def in_child(compute) -> str:
    """What a function returns in a forked process, or raises there."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = str(compute())
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(theirs, outcome.encode())
        os._exit(0)
    os.close(theirs)
    ready, _, _ = select.select([mine], [], [], 60)
    if not ready:
        os.kill(child, 9)
    outcome = os.read(mine, 1 << 16).decode() if ready else "nothing in 60 s"
    os.close(mine)
    status = os.waitpid(child, 0)[1]
    return outcome if status == 0 else f"ended with status {status}"
