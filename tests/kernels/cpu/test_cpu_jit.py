"""The CPU's kernels: messages when they are compiled or loaded, and forked processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import numba
import pytest
import torch

from helpers.families import DTYPES, check, compute
from helpers.forks import Attention, in_child
from quire.bench.batches import random_batch
from quire.definition import attention_spec
from quire.kernels.cpu import jit
from quire.kernels.cpu.stream import stream
from quire.kernels.cpu.tile import tile

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")


SCRIPT = """
import threading
from helpers.forks import Attention, in_child

attention, stop = Attention(), threading.Event()
again = threading.Thread(target=lambda: [attention.run() for _ in iter(stop.is_set, True)])
first = attention.error()
again.start()
print(first, *(in_child(attention.error) for _ in range(5)), in_child(lambda: in_child(attention.error)))
stop.set()
again.join()
"""


def test_launch_in_a_forked_process_computes_or_names_the_reason():
    """GNU OpenMP, Numba's first choice on Linux, cannot be used in a child of the process that used it."""
    attention = Attention()
    assert attention.error() < 1e-6
    for outcome in (in_child(attention.error), in_child(lambda: in_child(attention.error))):
        if numba.threading_layer() == "omp" and sys.platform == "linux":
            assert outcome.startswith("RuntimeError: attention on the CPU was computed before this process was forked")
            assert "NUMBA_THREADING_LAYER=workqueue" in outcome
        else:
            assert float(outcome) < 1e-6
    assert attention.error() < 1e-6, "the parent goes on"


def test_launch_in_processes_forked_beside_a_running_kernel_computes():
    environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    errors = done.stdout.split()
    assert len(errors) == 7, done.stdout
    assert all(float(error) < 1e-6 for error in errors)


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_called_with_many_dtypes_are_compiled_once_per_dtype_of_keys(masked):
    """The streaming kernel is compiled for each dtype of keys and values, the tiled one once, and neither for anything
    else, by all tests of a process.
    """
    for q_dtype, kv_dtype in DTYPES:
        for o_dtype in (torch.float32, q_dtype):
            given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16, "custom_mask": masked, "sinks": masked}
            spec = attention_spec(**given, q_dtype=q_dtype, kv_dtype=kv_dtype, o_dtype=o_dtype)
            batch = random_batch(spec, [1, 20], [7, 30], 4, padding=1)
            check(batch, *compute(batch, "cpu"))
    assert len(stream.signatures) == len({kv_dtype for _, kv_dtype in DTYPES})
    assert len(tile.signatures) == 1


def test_launch_prints_a_message_for_compiled_kernels_alone(tmp_path, monkeypatch, capsys):
    """A kernel that is found on disk is not, however long it takes to load."""
    file = tmp_path / "kernels_for_a_test.py"
    file.write_text("import numba\n\n\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n")

    def load():
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double

    compiled = load()
    jit.launch(compiled, "a test", 1)
    message = "quire: compiling the CPU kernel double for a test (once; kept on disk for later runs) ...\n"
    assert capsys.readouterr().err == message
    jit.launch(compiled, "a test", 1)
    assert capsys.readouterr().err == ""

    loaded = load()
    find = loaded._cache.load_overload
    monkeypatch.setattr(loaded._cache, "load_overload", lambda *args: time.sleep(1.2) or find(*args))
    jit.launch(loaded, "a test of loading", 1)
    assert loaded.stats.cache_hits
    assert capsys.readouterr().err == ""
