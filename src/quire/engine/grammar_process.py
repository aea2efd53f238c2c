"""The process that tries grammars before the engine's process compiles them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref

from quire.engine import grammar_compiler


class GrammarProcess:
    """Runs `quire.engine.grammar_compiler` as a program; for use by one thread at a time.

    Args:
        source, size, end: the tokenizer's JSON, the number of its tokens, and its end token.

    Raises:
        RuntimeError: the process does not start.
    """

    def __init__(self, source: str, size: int, end: int) -> None:
        command = [sys.executable, grammar_compiler.__file__]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)
        self.close = weakref.finalize(self, _end, self._process, os.getpid())
        self._ask(sys.path, source, size, end)

    def refusal(self, name: str, text: str) -> str:
        """Why a grammar is refused; "" if it is not. `name` is the attribute of SamplingParams.

        Raises:
            RuntimeError: the process has ended.
        """
        return self._ask(name, text)

    def _ask(self, *line: object) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            answer = b""
        else:
            answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that tries grammars has ended, with exit code {process.wait()}")
        return json.loads(answer)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    # A fork of the owner must not end the owner's process.
    if os.getpid() != owner:
        return
    process.kill()
    # The end of the context closes its pipes and waits for it.
    with process:
        pass
