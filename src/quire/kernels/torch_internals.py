"""Private internals of torch. No other file reads any, but for those of torch.compile in `engine/inductor_passes.py`.

They are those of KNOWN_VERSIONS. `tests/kernels/test_torch_internals.py` compares them with public functions of the
installed version, and fails on others until somebody has compared this file with torch's code.

Public functions for the current device and stream take 0.1 and 1 us longer, which each layer of a step would pay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "KNOWN_VERSIONS",
    "assert_async",
    "current_device",
    "current_raw_stream",
    "nccl_group",
    "peer_memory",
    "scaled_mm",
    "tree_flatten",
    "tree_map_only",
]

KNOWN_VERSIONS = ("2.11", "2.13")


def _no_cuda(*args: Any) -> int:
    raise RuntimeError("this build of torch has no CUDA")


# The index of the current CUDA device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)
# The address of the current stream of a CUDA device, by the index of the device.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
# The product of two fp8 matrices with scales. `torch.nn.functional.scaled_mm` computes it by another operator.
scaled_mm: Callable[..., Tensor] = torch._scaled_mm
# An assertion of a bool tensor with a message, which makes the device fail and never waits for it.
assert_async: Callable[[Tensor, str], None] = torch._assert_async


def nccl_group(store: Store, rank: int, size: int) -> Any:
    """A group of processes that exchange tensors on GPUs by NCCL. By default, torch ends a process whose exchange takes
    too long; in this group, the caller has to end such exchanges by `abort`.
    """
    from torch.distributed import ProcessGroupNCCL

    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())


def peer_memory(
    sizes: Sequence[int], rank: int, num_ranks: int, device: torch.device, store: Store, nccl: Any, group: Any
) -> tuple[list[Tensor], list[list[int]]]:
    """Memory of zeros on the GPU of each rank that all ranks can write to. All ranks call this with equal sizes.

    Args:
        sizes: bytes of each memory.
        rank, num_ranks: of this process, and of all that call this.
        device: the GPU of this rank.
        store: the store through which the ranks find each other.
        nccl: what `nccl_group` has returned.
        group: a name that no other call of this process has.

    Returns:
        this rank's memories, which exist as long as these tensors; and for each of them, the addresses of that of all
        ranks in this process.
    """
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from quire.kernels.numbered_store import NumberedStore

    # Torch finds the ranks by the name of a group.
    numbered = NumberedStore(store)
    named = ProcessGroup(PrefixStore(f"{group}/", numbered), rank, num_ranks)
    named._set_default_backend(ProcessGroup.BackendType.NCCL)
    named._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    named._set_group_name(group)
    _register_process_group(group, named)
    memories, addresses = [], []
    for size in sizes:
        memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, None)
        memory.zero_()
        torch.cuda.synchronize(device)
        # This waits for all ranks, each of which has cleared its memory by then.
        addresses.append(list(_SymmetricMemory.rendezvous(memory, group).buffer_ptrs))
        memories.append(memory)
    return memories, addresses


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """A context with variables of the environment that are not set otherwise."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
