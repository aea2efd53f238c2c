"""Random inputs are those of the run's seed, which is in the header (helpers/seeds.py)."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if WORKERS > 1:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # which OpenMP reads when it is loaded
pytest.register_assert_rewrite("helpers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numba.core.caching import IndexDataCacheFile  # noqa: E402

from helpers.interpret import COUNTS, INTERPRETED, check_counts, is_chosen  # noqa: E402
from helpers.paths import TESTS  # noqa: E402
from helpers.seeds import ORIGIN, SEED  # noqa: E402


def pytest_report_header() -> str:
    return f"quire: random inputs from QUIRE_TEST_SEED={SEED} ({ORIGIN})"


def pytest_configure() -> None:
    """Share the cores among the workers of pytest-xdist. Only one of them at a time writes Numba's index of compiled
    kernels, which is read, changed and written: two would give one name to two kernels.
    """
    if WORKERS > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // WORKERS, 1))
        save = IndexDataCacheFile.save

        def save_alone(self, key, data) -> None:
            with (Path(self._cache_path) / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                save(self, key, data)

        IndexDataCacheFile.save = save_alone


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules without tests that are interpreted, in a run with TRITON_INTERPRET=1."""
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if INTERPRETED and is_module and str(collection_path.relative_to(TESTS)) not in COUNTS else None


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
    """Random numbers of one test, from the run's seed and the test's name, so that a test repeats on its own. They seed
    the global generators, too.
    """
    generator = random.Random(f"{SEED} {request.node.nodeid}")
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(generator.randrange(1 << 31))
    return generator


@pytest.fixture(scope="session", autouse=True)
def cpu_by_default() -> Iterator[None]:
    """An LLM is on the CPU unless a test names a device, on a machine with a GPU, too: expected texts and bounds are
    those of float32 there. Processes that tests start have to name the device.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.arguments.default_device", lambda: "cpu")
        yield


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
