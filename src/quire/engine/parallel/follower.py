"""What a rank does that is not the first: it loads its part of the model, and computes the steps of the leader."""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

from quire.engine.adapters.slots import Resident
from quire.engine.parallel.channel import (
    Channel,
    Connected,
    Loaded,
    RankFailed,
    RankGraphs,
    RankJob,
    RankReplay,
    RankStep,
    RankTask,
)
from quire.engine.parallel.ranks import Ranks
from quire.engine.runner import Runner

# Seconds from the end of the leader to that of a follower that does not end by itself.
_END_SECONDS = 3.0


def serve(channel: Channel, load: Callable[..., Runner]) -> None:
    """Serve the leader at the other end of a channel until the leader closes it. An error is sent to the leader, and
    then the process exits with 1.

    Args:
        channel: to the leader.
        load: `quire.engine.load.load_runner`.
    """
    try:
        _serve(channel, load)
    except BaseException as error:
        # The leader may have ended, which ends this process, too.
        with suppress(OSError):
            channel.send(RankFailed(_sendable(error)))
        if torch.cuda.is_initialized():
            # The end of the interpreter may wait for the GPU, which may wait for other ranks.
            os._exit(1)
        sys.exit(1)


def _serve(channel: Channel, load: Callable[..., Runner]) -> None:
    job: RankJob = channel.receive()
    torch.set_num_threads(job.threads)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
        _end_with(channel)
    ranks = Ranks(job.rank, job.config.num_ranks, job.device, job.port)
    channel.send(Connected())
    ranks.connect()
    torch.manual_seed(job.seed)
    with warnings.catch_warnings():
        # The leader warns of the same.
        warnings.simplefilter("ignore")
        runner = load(job.folder, job.device, job.config, ranks=ranks)
    ranks.timeout = job.config.tensor_parallel_timeout
    channel.send(Loaded())
    while True:
        try:
            message: RankTask = channel.receive()
        except EOFError:
            return
        _follow(message, runner)


def _follow(message: RankTask, runner: Runner) -> None:
    """Do this rank's part of what the leader does."""
    if isinstance(message, RankReplay):
        assert runner.step_graphs is not None
        runner.step_graphs.replay(message.inputs)
    elif isinstance(message, RankStep):
        runner.compute_step(message)
    elif isinstance(message, RankGraphs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner.capture(None, message.max_rows, message.max_batched_tokens)
    else:
        assert runner.adapters is not None
        runner.adapters.load(Resident(message.adapter, message.slot, message.pages))


def _end_with(channel: Channel) -> None:
    """End this process some seconds after the leader has closed its end of the channel, in case the main thread waits
    for the GPU, and that for the leader's.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.sock, select.POLLRDHUP)
        poll.poll()
        time.sleep(_END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()


def _sendable(error: BaseException) -> BaseException:
    """The error, or one of its text if it cannot be pickled and read again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
