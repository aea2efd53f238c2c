"""How many pages a GPU has room for, by stand-ins of what torch reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.engine import memory
from quire.engine.graph_inputs import StepShape

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 GiB, of which `free` are free, and whose steps take 2."""
    found = SimpleNamespace(free=60 * GIB)
    stand_ins = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 30 * GIB,
        "max_memory_allocated": lambda device: 32 * GIB,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (found.free, 100 * GIB),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(memory, "profile", lambda runner, tokens, rows: None)
    return found


def pages_of(cuda_graphs):
    model = SimpleNamespace(device="cuda", hidden_states=SimpleNamespace(last=None))
    return memory.profiled_pages(
        lambda num_pages: SimpleNamespace(model=model), 16, GIB // 4, StepShape(8, 64), 0.9, cuda_graphs
    )


def test_profiled_pages_fill_what_a_step_leaves(gpu):
    assert pages_of(cuda_graphs=False) == (90 - 40 - 2) * 4
    assert pages_of(cuda_graphs=True) == (90 - 40 - 4) * 4


def test_profiled_pages_without_room_for_a_page_are_refused(gpu):
    gpu.free = 12 * GIB
    message = "gpu_memory_utilization = 0.9: 12.0 of 100.0 GiB are free .*, and a step takes 2.0 GiB: no page"
    with pytest.raises(ValueError, match=message):
        pages_of(cuda_graphs=False)
