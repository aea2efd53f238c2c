"""The peers that are timed beside Quire on a GPU, where they are installed and on the tensors that Quire is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

import torch

import quire
from quire.bench import dense, flash_attention
from quire.bench.batches import Batch
from quire.bench.calls import Plan, Run, prepared
from quire.bench.cells import Cell

# Names in tables and plots.
TITLES = {"fa3": "FA3", "flashinfer": "FlashInfer", "cudnn": "cuDNN", "flex": "FlexAttention"}
# torch's own choice of a kernel, which is timed but not compared with the oracle.
BASELINE = "sdpa"
DEFAULT = ("fa3", "flashinfer", "cudnn", BASELINE)
# The bytes of a workspace. FlashInfer recommends 128 MB or more.
_WORKSPACE = 512 << 20
# A larger relative error of 16-bit outputs means that something else was computed.
_MAX_ERROR = 1e-2

Prepare = Callable[[], tuple[Plan, Run]]


class Peer(NamedTuple):
    """A library beside Quire.

    Attributes:
        version: the library's.
        kernels: by name, those that may compute a cell: each is called to get functions that plan and run.
    """

    version: str
    kernels: Callable[[Cell, Batch], dict[str, Prepare]]


def names(text: str) -> tuple[str, ...]:
    """The peers that a list like "fa3,cudnn" names.

    Raises:
        ValueError: a name is unknown.
    """
    found = tuple(name for name in text.split(",") if name)
    for name in found:
        if name not in (*TITLES, BASELINE):
            raise ValueError(f"--peers {text}: {name!r} is unknown; there are {', '.join((*TITLES, BASELINE))}")
    return found


def installed(chosen_peers: Sequence[str] | None, capability: tuple[int, int]) -> dict[str, Peer]:
    """The peers of these names but the baseline; None: those of `DEFAULT` that are installed.

    FlexAttention is not among them, since it is compiled for each cell.

    Raises:
        ValueError: a peer that was named is not installed.
    """
    find: dict[str, Callable[[], Peer | None]] = {
        "fa3": _fa3,
        "flashinfer": partial(_flashinfer, capability),
        "cudnn": _cudnn,
        "flex": _flex,
    }
    found = {name: find[name]() for name in (DEFAULT if chosen_peers is None else chosen_peers) if name != BASELINE}
    missing = [name for name, peer in found.items() if peer is None]
    if chosen_peers is not None and missing:
        raise ValueError(f"--peers {','.join(chosen_peers)}: {missing[0]} is not installed")
    return {name: peer for name, peer in found.items() if peer is not None}


def _fa3() -> Peer | None:
    module = flash_attention.module()
    if module is None:
        return None
    return Peer(flash_attention.version_of(module), lambda cell, batch: flash_attention.kernels(module, cell, batch))


def _flashinfer(capability: tuple[int, int]) -> Peer | None:
    module = flashinfer()
    if module is None:
        return None
    return Peer(
        module.__version__,
        lambda cell, batch: {
            name: partial(prepared, cell, batch, module, _WORKSPACE, **options)
            for name, options in kernels(cell, capability).items()
        },
    )


def _cudnn() -> Peer | None:
    if not torch.backends.cudnn.is_available():
        return None
    number = torch.backends.cudnn.version() or 0
    return Peer(
        f"{number // 10000}.{number // 100 % 100}.{number % 100}", partial(_dense, "sdpa", lambda *_cell: dense.cudnn)
    )


def _flex() -> Peer:
    return Peer(
        torch.__version__, partial(_dense, "compiled", lambda cell, batch: dense.flex(cell.kv_len, batch.q.device))
    )


def _dense(
    name: str, attention: Callable[[Cell, Batch], dense.Attention], cell: Cell, batch: Batch
) -> dict[str, Prepare]:
    """A kernel over dense tensors, for ragged rows of whole prompts of one length, which are dense."""
    if not (cell.ragged and dense.is_dense(cell)):
        return {}
    return {name: lambda: (lambda: None, dense.prefill(cell, batch, attention(cell, batch)))}


def flashinfer() -> ModuleType | None:
    """The installed FlashInfer; None if there is none.

    Raises:
        ValueError: FlashInfer is installed, but its name refers to Quire in this process (`quire.compat`).
    """
    try:
        # `import flashinfer` alone might find the modules of quire.compat.
        version("flashinfer-python")
    except PackageNotFoundError:
        return None
    module = import_module("flashinfer")
    if module.BatchDecodeWithPagedKVCacheWrapper is quire.BatchDecodeWithPagedKVCacheWrapper:
        raise ValueError("flashinfer means Quire in this process: leave quire.compat out to time the real one")
    return module


def kernels(cell: Cell, capability: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """FlashInfer's kernels for a cell on a GPU of this compute capability: wrapper options by the kernel's name.

    Decode has "cuda", which uses CUDA cores, and "fa2", its prefill kernel, which uses tensor cores.
    """
    if cell.operation == "decode" and not cell.latent:
        return {
            "cuda": {"backend": "fa2", "use_tensor_cores": False},
            "fa2": {"backend": "fa2", "use_tensor_cores": True},
        }
    return {name: {"backend": name} for name in (("fa2", "fa3") if capability == (9, 0) else ("fa2",))}


def measure(prepare: Mapping[str, Prepare], time: Callable[[Plan, Run], dict[str, float]]) -> dict[str, dict[str, Any]]:
    """What `time` returns for each of a peer's kernels, or {"failed": reason} if it cannot compute the cell.

    Args:
        time: called with functions that plan and run; returns a row with an "error".
    """
    found: dict[str, dict[str, Any]] = {}
    for name, make in prepare.items():
        try:
            row: dict[str, Any] = time(*make())
        except Exception as error:
            # Peers, and the compilers that they call, raise unrelated types.
            row = {"failed": f"{type(error).__name__}: {error}"}
        # NaN fails this comparison, too.
        if "failed" not in row and not row["error"] <= _MAX_ERROR:
            row = {"failed": f"error {row['error']:.1e} against the oracle"}
        found[name] = row
    return found


def best(row: dict[str, Any], peer: str = "flashinfer") -> tuple[str, float] | None:
    """The name and microseconds of a peer's fastest kernel in a cell's row; None if none computed it."""
    times = {name: found["us"] for name, found in row.get(peer, {}).items() if "us" in found}
    return min(times.items(), key=lambda item: item[1]) if times else None


def ratio(row: dict[str, Any], peer: str = "flashinfer") -> float | None:
    """A peer's time over Quire's: above 1 if Quire is faster. None if one of them did not compute the cell."""
    fastest = best(row, peer)
    return fastest[1] / row["us"] if fastest and "us" in row else None


def present(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the peers that were timed in some of these rows."""
    return [name for name in TITLES if any(name in row for row in rows)]


def main_peer(rows: Sequence[dict[str, Any]]) -> str:
    """The peer that a table compares Quire with: FlashAttention-3 if it computed any of the cells, or FlashInfer."""
    return "fa3" if any(best(row, "fa3") for row in rows) else "flashinfer"
