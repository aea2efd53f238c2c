"""What a rank does that is not the first: it loads its part of the model, and computes the steps of the leader."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

from quire.engine.adapters.slots import Resident
from quire.engine.parallel.channel import Channel, Connected, Loaded, RankAdapter, RankFailed, RankJob, RankStep
from quire.engine.parallel.ranks import Ranks
from quire.engine.runner import Runner


def serve(channel: Channel, load: Callable[..., Runner]) -> None:
    """Serve the leader at the other end of a channel until it closes it. After an error, which the leader is sent, the
    process exits with 1.

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
        sys.exit(1)


def _serve(channel: Channel, load: Callable[..., Runner]) -> None:
    job: RankJob = channel.receive()
    torch.set_num_threads(job.threads)
    ranks = Ranks(job.rank, job.config.num_ranks, job.port)
    channel.send(Connected())
    ranks.connect()
    torch.manual_seed(job.seed)
    with warnings.catch_warnings():
        # The leader warns of the same.
        warnings.simplefilter("ignore")
        runner = load(job.folder, torch.device("cpu"), job.config, ranks=ranks)
    ranks.timeout = job.config.tensor_parallel_timeout
    channel.send(Loaded())
    while True:
        try:
            message: RankStep | RankAdapter = channel.receive()
        except EOFError:
            return
        if isinstance(message, RankStep):
            _compute(message, runner)
        else:
            assert runner.adapters is not None
            runner.adapters.load(Resident(message.adapter, message.slot, message.pages))


def _compute(step: RankStep, runner: Runner) -> None:
    """Compute a step together with the other ranks."""
    tables = runner.host_tables(step.pages, step.lengths, step.counts)
    runner.plan(runner.wrappers, tables.qo_indptr, tables.pages, tables.slots, max(step.counts))
    ids, rows = torch.from_numpy(step.ids), torch.from_numpy(step.rows)
    slots = None if step.slots is None else torch.from_numpy(step.slots)
    runner.model.logits(ids, tables.positions, rows, runner, runner.step_adapters(slots, rows))


def _sendable(error: BaseException) -> BaseException:
    """The error, or one of its text if it cannot be pickled and read again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
