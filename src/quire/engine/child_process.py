"""Programs of this package that the server runs in processes of their own, which end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

# A signal to all processes of a group or a service is meant for the server, which ends the others. What these start in
# turn has the usual handlers, unlike with SIG_IGN.
_PROGRAM = """import gc, os, signal, sys
gc.disable()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
for descriptor in {descriptors!r}:
    os.set_inheritable(descriptor, False)
sys.path[:] = {path!r}
from {module} import main
main(*{arguments!r})
"""


def start_program(module: str, arguments: Sequence[int], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start `main` of a module in a new process. In a session of its own, it does not get the SIGINT of Ctrl-C, and
    SIGINT and SIGTERM have no effect on it. Garbage collection is off until `main` enables it.

    Args:
        module: of this package.
        arguments: of `main`.
        descriptors: of files that the process inherits, under the same numbers; processes that it starts do not.
    """
    program = _PROGRAM.format(path=sys.path, module=module, arguments=tuple(arguments), descriptors=tuple(descriptors))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[bytes], name: str, grace: float) -> str:
    """Wait for a process that has begun to end, and return a description of how it ended.

    Args:
        process: the process.
        name: its name in the description.
        grace: seconds after which the process is killed.
    """
    try:
        code = process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"{name} did not end, and was killed"
    if code < 0:
        return f"{name} was ended by {signal.Signals(-code).name}"
    return f"{name} ended with exit code {code}"
