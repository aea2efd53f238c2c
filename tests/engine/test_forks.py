"""An LLM in a forked process, which does not have the engine's thread: an error, where it would wait for ever."""

from __future__ import annotations

import asyncio
import os
import queue
import sys

import pytest

pytest.importorskip("transformers")

from helpers.forks import in_child
from quire.engine import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
MADE_BEFORE = "RuntimeError: this LLM was made before this process was forked"


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=50) as llm:
        yield llm


async def streamed(llm):
    return [part async for part in llm.stream("import os\n", PARAMS)]


CALLS = {
    "generate": lambda llm: llm.generate("import os\n", PARAMS),
    "generate with on_update": lambda llm: llm.generate("import os\n", PARAMS, on_update=print),
    "stream": lambda llm: asyncio.run(streamed(llm)),
    "start": lambda llm: llm.start("import os\n", PARAMS, print),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_llm_call_in_a_forked_process_raises_and_the_parent_goes_on(llm, call):
    error = in_child(lambda: call(llm))
    assert error.startswith(MADE_BEFORE)
    assert "Start processes by spawn or forkserver" in error
    assert in_child(lambda: in_child(lambda: call(llm))).startswith(MADE_BEFORE)
    assert len(llm.generate("import os\n", PARAMS)[0].token_ids) == 5


def test_until_done_in_a_forked_process_raises(llm):
    """As `generate` would whose on_update forks the process."""
    error = in_child(lambda: next(llm._worker.until_done(queue.SimpleQueue(), 1)))
    assert error.startswith(MADE_BEFORE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_generate_after_the_engine_thread_ended_raises(monkeypatch):
    with LLM(num_pages=50) as llm:
        monkeypatch.setattr(llm._engine, "step", sys.exit)  # which no step catches, and threading does not print
        with pytest.raises(RuntimeError, match="the thread of this LLM has ended by an error"):
            llm.generate("import os\n", PARAMS)
        assert not llm.alive
        with pytest.raises(RuntimeError, match="the thread of this LLM has ended by an error"):
            llm.generate("import os\n", PARAMS)


def test_llm_made_in_a_forked_process_is_refused(llm):
    error = in_child(lambda: LLM(num_pages=50).generate("import os\n", PARAMS))
    if sys.platform == "linux":
        assert error.startswith("RuntimeError: an LLM was made before this process was forked")
    else:
        assert error.startswith("RuntimeError: attention on the CPU was computed before this process was forked")
    assert "spawn or forkserver" in error


def test_close_in_a_forked_process_leaves_the_parent_running(llm):
    def close():
        llm.close()
        return llm.alive

    assert in_child(close) == "False"
    assert in_child(lambda: llm.alive) == "False"
    assert llm.alive
    assert len(llm.generate("import os\n", PARAMS)[0].token_ids) == 5
