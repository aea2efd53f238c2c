"""The number of threads: kernels have torch's, and leave it, and Numba's, as they were. Numba's threading layer is
loaded once in a process, so each test has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import sys
import threading

import numba
import torch

from helpers.forks import Attention
from quire.kernels.cpu import host

used = set()


class Recorded:
    def __init__(self, kernel):
        self.kernel, self.__name__ = kernel, kernel.__name__

    def __call__(self, *args):
        used.add(numba.get_num_threads())
        self.kernel(*args)


host.stream, host.tile = Recorded(host.stream), Recorded(host.tile)
attention = Attention()


def expect(threads):
    assert torch.get_num_threads() == threads, torch.get_num_threads()
    assert used == {min(threads, 3)}, (used, threads)
    used.clear()


def run(threads):
    torch.set_num_threads(threads)
    for _ in range(2):
        assert attention.error() < 1e-6
        expect(threads)


def in_thread(call, *args):
    errors = []
    thread = threading.Thread(target=lambda: errors.extend(caught(call, *args)))
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def caught(call, *args):
    try:
        call(*args)
    except BaseException as error:
        yield error
"""
CALLS = {
    "the first thread": """
run(1)
run(3)
run(5)
in_thread(run, 2)
run(1)
numba.set_num_threads(2)
run(3)
assert numba.get_num_threads() == 2
host.tile.kernel = lambda *args: 1 / 0
try:
    attention.run()
except ZeroDivisionError:
    assert (torch.get_num_threads(), numba.get_num_threads()) == (3, 2)
else:
    raise AssertionError("nothing was raised")
""",
    "another thread first": """
torch.set_num_threads(2)
in_thread(run, 1)
assert torch.get_num_threads() == 2
run(2)
""",
    "a thread that has the number of the first": """
torch.set_num_threads(1)
in_thread(lambda: (attention.run(), expect(1)))
run(1)
""",
    "the engine's thread": """
from quire.engine import LLM, SamplingParams

torch.set_num_threads(1)
with LLM(num_pages=50) as llm:
    expect(1)
    seen, ended = [], threading.Event()
    def sink(index, part):
        seen.append(torch.get_num_threads())
        if part.finish_reason is not None:
            ended.set()
    llm.start(["import os\\n"], SamplingParams(max_tokens=5, ignore_eos=True, temperature=0), sink)
    ended.wait()
    assert set(seen) == {1}, seen
    expect(1)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layer"), [*((case, "default") for case in CALLS), ("the first thread", "workqueue")])
def test_launch_uses_the_threads_of_torch_and_leaves_their_number(case, layer):
    if case == "the engine's thread":
        pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "3"}
    environment |= {"NUMBA_THREADING_LAYER": layer}
    script = [sys.executable, "-c", f"{START}\n{CALLS[case]}\nprint('done', numba.threading_layer())"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done ")
    assert layer == "default" or layer in done.stdout
