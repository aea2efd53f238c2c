"""Random inputs are fresh in each run; the seed is printed, and QUIRE_TEST_SEED repeats a run."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("helpers")

from helpers.interpret import INTERPRETED, check_counts, is_chosen  # noqa: E402

SEED = int(os.environ.get("QUIRE_TEST_SEED", random.randrange(1 << 31)))


def pytest_report_header() -> str:
    return f"quire: random inputs from QUIRE_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args) and not config.getoption("lf", False):
        check_counts(items)
    if INTERPRETED:
        config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
        items[:] = filter(is_chosen, items)
    elif not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="there is no GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of one test: the run's seed and the test's name, so that a test repeats on its own."""
    generator = random.Random(f"{SEED} {request.node.nodeid}")
    torch.manual_seed(generator.randrange(1 << 31))
    return generator


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels multiply with numpy, where some machines' bits of a row depend on how many rows there are:
    here sums are in order.
    """
    if not INTERPRETED:
        return

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            total += a[..., k, None] * b[..., k, None, :]
        return total

    monkeypatch.setattr(np, "matmul", matmul)
