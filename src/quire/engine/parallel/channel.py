"""Messages between the leader, rank 0, and each follower, the other ranks: pickled objects on a socket."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.engine.adapters.adapter import Adapter
from quire.engine.batch import StepBatch
from quire.engine.config import EngineConfig
from quire.engine.graph_inputs import HostInputs
from quire.engine.inputs import adapter_slots, logit_indices, token_ids


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a follower is to load.

    Attributes:
        folder: the checkpoint.
        config: of the engine.
        rank: of the follower.
        port: of the store, on this machine.
        seed: of random weights, which are equal in all ranks.
        threads: that the follower computes in.
        device: of the follower.
    """

    folder: Path
    config: EngineConfig
    rank: int
    port: int
    seed: int
    threads: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step as followers compute it.

    Attributes:
        ids: the tokens, int64 [tokens], IN_FLIGHT for those that only the leader's GPU has; it sends them to the other
            GPUs in the step.
        rows: the indices of those whose logits are needed, int64 [rows].
        pages: each request's pages, which may be more than its tokens need, each as array("i").
        lengths: the number of tokens of each request, including the new ones.
        counts: the number of new tokens of each request.
        slots: of each token's adapter (`adapter_slots`); None: the step is computed without adapters.
    """

    ids: np.ndarray
    rows: np.ndarray
    pages: Sequence[Any]
    lengths: list[int]
    counts: list[int]
    slots: np.ndarray | None = None

    @classmethod
    def of(cls, batch: StepBatch, adapters: bool) -> RankStep:
        """The step of a batch, with adapters or without."""
        return cls(
            ids=token_ids(batch)[0],
            rows=logit_indices(batch),
            pages=[request.pages for request in batch.requests],
            lengths=batch.ends.tolist(),
            counts=batch.counts.tolist(),
            slots=adapter_slots(batch) if adapters else None,
        )


@dataclass(frozen=True, slots=True)
class RankGraphs:
    """CUDA graphs of steps are captured.

    Attributes:
        max_rows, max_batched_tokens: of `Runner.capture`.
    """

    max_rows: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class RankReplay:
    """A step that a CUDA graph computes.

    Attributes:
        inputs: those of the leader.
    """

    inputs: HostInputs


@dataclass(frozen=True, slots=True)
class RankAdapter:
    """An adapter that is copied to the device, before the steps that compute with it.

    Attributes:
        adapter: as the follower has it.
        slot, pages: where it is, as of `Resident`.
    """

    adapter: Adapter
    slot: int
    pages: list[int]


RankTask = RankStep | RankReplay | RankGraphs | RankAdapter
"""What followers do together with the leader."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A follower has loaded its part, and waits for steps."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A follower runs, and joins the ranks."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A follower ends.

    Attributes:
        error: what it raised; a RankError if another rank was the reason.
    """

    error: BaseException


class Channel:
    """One end of a connection between two processes.

    Args:
        sock: connected.
        timeout: seconds after which `send` and `receive` raise a TimeoutError; None: they wait for ever.
    """

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        sock.settimeout(timeout)
        self.sock = sock
        self._file = sock.makefile("rwb")

    def send(self, message: object) -> None:
        """Send an object; an OSError if the other process has ended, or does not read."""
        pickle.dump(message, self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._file.flush()

    def receive(self) -> Any:
        """The next object; an EOFError if the other process has ended, or has closed its end."""
        return pickle.load(self._file)

    def close(self) -> None:
        """Close this end. What could not be sent is lost."""
        with suppress(OSError):
            self._file.close()
        self.sock.close()
