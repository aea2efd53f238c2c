"""How the first rank starts the others, has them compute, and finds out which of them has failed."""

from __future__ import annotations

import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.engine.adapters.slots import Resident
from quire.engine.batch import StepBatch
from quire.engine.child_process import end_of, start_program
from quire.engine.config import EngineConfig
from quire.engine.graph_inputs import HostInputs
from quire.engine.parallel import torchrun
from quire.engine.parallel.channel import (
    Channel,
    Connected,
    Loaded,
    RankAdapter,
    RankFailed,
    RankGraphs,
    RankJob,
    RankReplay,
    RankStep,
)
from quire.engine.parallel.errors import RankError
from quire.engine.parallel.ranks import LOAD_SECONDS, Ranks

# Seconds for a follower to report an error that it has seen, and then to end.
_REPORT_SECONDS = 10.0
_GRACE = 5.0
# Seconds in which a process imports what it needs.
_START_SECONDS = 120.0
# Seconds between two looks at the other ranks while a GPU computes.
_WATCH_SECONDS = 0.1


@dataclass(slots=True)
class _Follower:
    """Another rank; process is None if torchrun has started it."""

    rank: int
    process: subprocess.Popen[bytes] | None
    channel: Channel

    def has_ended(self) -> bool:
        """Whether it has failed, or has closed its end of the connection: between steps it sends nothing."""
        return self._has(select.POLLIN)

    def has_closed(self) -> bool:
        """Whether it has closed its end of the connection. It may have sent something before."""
        return self._has(select.POLLRDHUP)

    def _has(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self.channel.sock, event)
        return bool(poll.poll(0))

    def end(self, seconds: float) -> str:
        """Wait some seconds for its end, or else kill it; return a description of how it ended."""
        name = f"rank {self.rank}"
        return f"{name} has ended" if self.process is None else end_of(self.process, name, seconds)


def _device_of(rank: int, first: torch.device) -> torch.device:
    """The device of a rank; `first` is that of rank 0."""
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


class Leader:
    """Starts the other ranks of an engine, unless torchrun has, and has them compute its steps. They end with this
    process, or by `close`.

    Args:
        folder: the checkpoint.
        config: of the engine.
        device: of this process; other ranks have the GPUs that follow it.

    Attributes:
        ranks: all of them; this process is rank 0.

    Raises:
        RankError: a process could not be started.
    """

    def __init__(self, folder: Path, config: EngineConfig, device: torch.device) -> None:
        self._size, self._timeout = config.num_ranks, config.tensor_parallel_timeout
        self._seed = torch.seed() % (1 << 63)
        self.ranks = Ranks(0, self._size, device)
        # When `_watch` is to end the exchanges of the GPU, None while this process does not wait for it; and whether
        # `_watch` has ended them.
        self._deadline: float | None = None
        self._is_abandoned = self._is_loaded = self._is_closed = False
        threads = max(1, torch.get_num_threads() // self._size)
        job = RankJob(folder, config, 0, self.ranks.port, self._seed, threads, device)
        self._followers: list[_Follower] = []
        try:
            if torchrun.rank_of(config) is None:
                for rank in range(1, self._size):
                    self._start(replace(job, rank=rank, device=_device_of(rank, device)))
            else:
                for rank, sock in torchrun.accept(self._size):
                    self._add(replace(job, rank=rank, device=_device_of(rank, device)), None, sock)
            for follower in self._followers:
                self._await(follower, Connected, _START_SECONDS)
            self.ranks.connect()
            if device.type == "cuda":
                threading.Thread(target=self._watch, name="quire-watch", daemon=True).start()
        except RankError as error:
            found = self._culprit(error)[1]
            self.close()
            raise found from error
        except BaseException:
            self.close()
            raise

    def _start(self, job: RankJob) -> None:
        own, other = socket.socketpair()
        with other:
            process = start_program("quire.engine.parallel.process", [other.fileno()], [other.fileno()])
        self._add(job, process, own)

    def _add(self, job: RankJob, process: subprocess.Popen[bytes] | None, sock: socket.socket) -> None:
        self._followers.append(_Follower(job.rank, process, Channel(sock, self._timeout)))
        self._send(self._followers[-1], job)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which all ranks load their part of the model. Random numbers are those of the other ranks, and
        an error of another rank is raised here.

        Raises:
            RankError: a rank has ended, or does not answer.
        """
        try:
            device = self.ranks.device
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), self._watched(self.ranks.timeout):
                torch.manual_seed(self._seed)
                yield
            for follower in self._followers:
                self._await(follower, Loaded, self.ranks.timeout)
            self.ranks.timeout = self._timeout
            self._is_loaded = True
        except RankError as error:
            raise self._culprit(error)[1] from error

    @contextmanager
    def computing(self, batch: StepBatch, adapters: bool) -> Iterator[None]:
        """A context in which all ranks compute a step, with adapters or without.

        Raises:
            RankError: one of them could not; then none of them computes any more.
        """
        try:
            step = RankStep.of(batch, adapters)
            for follower in self._followers:
                self._send(follower, step)
            # A launch may wait for the GPU.
            with self._watched(self._timeout):
                yield
        except Exception as error:
            raise self._as_rank_error(error) from error

    def capture(self, max_rows: int, max_batched_tokens: int) -> None:
        """Have the other ranks capture CUDA graphs (`Runner.capture`)."""
        for follower in self._followers:
            self._send(follower, RankGraphs(max_rows, max_batched_tokens))

    def replay(self, inputs: HostInputs) -> None:
        """Have the other ranks replay a CUDA graph; a RankError if one has ended, or does not read."""
        try:
            for follower in self._followers:
                self._send(follower, RankReplay(inputs))
        except RankError as error:
            raise self._as_rank_error(error) from error

    def waiting(self) -> AbstractContextManager[None]:
        """A context in which this process may wait for its GPU, which may wait for those of other ranks. It raises a
        RankError if another rank has ended, or does not answer in time.
        """
        return self._attributed(self._timeout)

    def capturing(self) -> AbstractContextManager[None]:
        """`waiting`, while all ranks capture CUDA graphs, for which kernels may be compiled."""
        return self._attributed(LOAD_SECONDS)

    @contextmanager
    def _attributed(self, seconds: float) -> Iterator[None]:
        """`_watched` with a RankError that names the rank that is the reason."""
        try:
            with self._watched(seconds):
                yield
        except RankError as error:
            raise self._as_rank_error(error) from error

    @contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        """A context in which the GPU may wait for other ranks, for so many seconds; a RankError if `_watch` had to end
        that.
        """
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            if self._is_abandoned:
                raise RankError("the GPU has waited too long for another rank")

    def _watch(self) -> None:
        """End the exchanges of this rank's GPU, with undefined results, if another rank has ended, or if the GPU has
        waited for one too long.
        """
        while not self._is_closed:
            deadline = self._deadline
            is_late = deadline is not None and time.monotonic() > deadline
            if deadline is not None and (is_late or self._has_lost_one()):
                self._abandon()
                return
            time.sleep(_WATCH_SECONDS)

    def _abandon(self) -> None:
        """Let the GPU go on without the other ranks, with undefined results, if this rank has one."""
        if self.ranks.exchange is not None and not self._is_abandoned:
            self._is_abandoned = True
            self.ranks.exchange.abandon()

    def _has_lost_one(self) -> bool:
        """Whether another rank has ended or failed. While it loads, it sends other messages, too."""
        if self._is_loaded:
            return any(follower.has_ended() for follower in self._followers)
        return any(follower.has_closed() for follower in self._followers)

    def load_adapter(self, resident: Resident) -> None:
        """Have the other ranks copy an adapter to the device; a RankError if one has ended, or does not read."""
        try:
            for follower in self._followers:
                adapter = resident.adapter.of_rank(follower.rank)
                self._send(follower, RankAdapter(adapter, resident.slot, resident.pages))
        except RankError as error:
            raise self._as_rank_error(error) from error

    def check(self) -> None:
        """Raise a RankError if a rank has ended."""
        for follower in self._followers:
            if follower.has_ended():
                raise self._as_rank_error(RankError())

    def close(self) -> None:
        """End the other ranks."""
        self._is_closed = True
        for follower in self._followers:
            follower.channel.close()
        end = time.monotonic() + _GRACE
        for follower in self._followers:
            follower.end(max(0.0, end - time.monotonic()))

    @staticmethod
    def _send(follower: _Follower, message: object) -> None:
        """Send a message to a follower; a RankError if it has ended, or does not read."""
        try:
            follower.channel.send(message)
        except OSError as error:
            raise RankError(str(error)) from error

    def _await(self, follower: _Follower, expected: type, seconds: float) -> None:
        """Receive a message of a follower that should be of the expected type; a RankError if there is none, and the
        follower's error if it has failed.
        """
        follower.channel.sock.settimeout(seconds)
        try:
            message = follower.channel.receive()
        except (OSError, EOFError) as error:
            raise RankError(str(error)) from error
        follower.channel.sock.settimeout(self._timeout)
        if isinstance(message, RankFailed):
            raise message.error
        assert isinstance(message, expected)

    def _as_rank_error(self, error: Exception) -> RankError:
        """What ends the engine after this rank has raised an exception in a step. The GPU may wait for another rank."""
        self._abandon()
        name, found = self._culprit(error) if isinstance(error, RankError) else ("rank 0", error)
        return found if isinstance(found, RankError) else RankError(f"{name} failed: {type(found).__name__}: {found}")

    def _culprit(self, seen: BaseException) -> tuple[str, BaseException]:
        """Why another rank has ended or does not answer: the name of the rank that failed by itself, and its error; or
        else "" and a RankError that names the ranks that are silent.
        """
        silent = []
        end = time.monotonic() + _REPORT_SECONDS
        for follower in self._followers:
            name = f"rank {follower.rank}"
            try:
                error = self._failure(follower, max(0.1, end - time.monotonic()))
            except TimeoutError:
                silent.append(f"{name} has not answered for {self.ranks.timeout:g} s")
            except (OSError, EOFError):
                silent.append(follower.end(_GRACE))
            else:
                if not isinstance(error, RankError):
                    return name, error
        return "", RankError(" and ".join(silent) or f"the ranks have lost each other: {seen}")

    @staticmethod
    def _failure(follower: _Follower, seconds: float) -> BaseException:
        """The error that a follower reports within some seconds."""
        follower.channel.sock.settimeout(seconds)
        while True:
            message = follower.channel.receive()
            if isinstance(message, RankFailed):
                return message.error
