"""Random inputs are fresh in each run; the seed is printed, and QUIRE_TEST_SEED repeats a run."""

from __future__ import annotations

import os
import random

import pytest
import torch

SEED = int(os.environ.get("QUIRE_TEST_SEED", random.randrange(1 << 31)))


def pytest_report_header() -> str:
    return f"quire: random inputs from QUIRE_TEST_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
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
