"""How far arguments travel: the functions between a public call and what computes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import quire
from quire.kernels.cpu import host
from quire.wrappers.plan import Plan

PACKAGE = str(Path(quire.__file__).parent)
# Calls from one of the functions that pass arguments on to the next, the last one included.
MAX_HOPS = 6


def hops(monkeypatch, target, name, call) -> list[str]:
    """The functions of Quire, outermost first, that are active when `target.name` is first called."""
    found: list[str] = []
    inner = getattr(target, name)

    def noting(*args, **kwargs):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
            frame = frame.f_back
        found.extend(names[::-1] if not found else ())
        return inner(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, noting)
        call()
    return found


@pytest.fixture
def wrapper():
    return quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))


def plan(wrapper):
    indptr, last = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([7, 16], dtype=torch.int32)
    wrapper.plan(indptr, indptr[1:], last, 4, 2, 64, 16, q_data_type="float32")


def test_plan_passes_at_most_six_functions_to_its_family(wrapper, monkeypatch):
    for target, name in ((Plan, "with_memory"), (host.FAMILY, "declines")):
        quire.kernels.registry.choose.cache_clear()
        found = hops(monkeypatch, target, name, lambda: plan(wrapper))
        assert found[0].endswith("plan")
        assert len(found) <= MAX_HOPS, " -> ".join(found)


def test_run_passes_at_most_six_functions_to_its_kernel(wrapper, monkeypatch):
    plan(wrapper)
    q, cache = torch.randn(2, 4, 64), torch.randn(3, 2, 16, 2, 64)
    found = hops(monkeypatch, host, "launch", lambda: wrapper.run(q, cache))
    assert found[0].endswith("run")
    assert len(found) <= MAX_HOPS, " -> ".join(found)
