"""Exchanges of the GPUs of one machine through each other's memory: sums and concatenations of their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from quire.kernels.norm import norm
from quire.kernels.torch_internals import nccl_group, peer_memory

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Words of 32 bits in a slot for words that are sent with a number, and in a slot for words that are sent without. Small
# tensors arrive sooner with numbers: see `triton/all_reduce.py`.
_SMALL, _LARGE = 1 << 17, 1 << 22
# The most words of a row whose norm a program computes.
_MAX_ROW = 1 << 13


class Exchange:
    """The exchanges of one rank, by memory that the others write to. All ranks call the same methods in the same order,
    with tensors of equal shapes and dtypes.

    Args:
        rank: of this process.
        num_ranks: the number of ranks, each of which has a GPU of this machine.
        device: the GPU of this rank.
        store: the store through which the ranks find each other.
        group: a name that no other exchange of this process has.

    Raises:
        RuntimeError: another rank does not call this, or the GPUs can't write to each other's memory.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device, store: Store, group: str) -> None:
        from quire.kernels.triton.all_reduce import PROGRAMS

        self.rank, self.num_ranks, self._device = rank, num_ranks, device
        slots = 2 * num_ranks
        sizes = [8 * slots * _SMALL, 4 * (slots * _LARGE + num_ranks * PROGRAMS)]
        self._nccl = nccl_group(PrefixStore("nccl/", store), rank, num_ranks)
        self._memory, addresses = peer_memory(sizes, rank, num_ranks, device, store, self._nccl, group)
        self._numbered, self._whole = (torch.tensor(each, dtype=torch.int64, device=device) for each in addresses)
        # For each kind of slot, each program's number of exchanges, and a flag that ends all waiting if it is not 0.
        self._states = torch.zeros(2, PROGRAMS + 1, dtype=torch.int32, device=device)
        # CUDA may wait for running kernels before it loads a new one. This loads the kernel that `abandon` launches.
        self._states[:, -1] = 0
        torch.cuda.synchronize(device)

    def abandon(self) -> None:
        """Let kernels that wait for another rank end with undefined results. Any thread may call this."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1)):
            self._states[:, -1] = 1
        self._nccl.abort()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, of any shape, which has equal bits in all of them; ValueError for other
        dtypes than bfloat16, float16 and float32.
        """
        if x.dtype not in _DTYPES:
            raise ValueError(f"tensors of {x.dtype} are not summed over GPUs: it must be bfloat16, float16 or float32")
        if not x.numel():
            return torch.empty_like(x)
        if not _is_whole(x):
            return self.sum(_padded(x))[: x.numel()].view(x.shape)
        out = torch.empty_like(x)
        size = 4 * _LARGE // x.element_size()
        for part, part_out in zip(x.view(-1).split(size), out.view(-1).split(size), strict=True):
            self._sum(part, part_out)
        return out

    def _sum(self, x: Tensor, out: Tensor) -> None:
        from quire.kernels.triton import all_reduce

        words = x.numel() * x.element_size() // 4
        if words <= _SMALL:
            self._launch_words(all_reduce.launch_sum, x, out)
        elif self.num_ranks == 2 or words % self.num_ranks:
            self._launch_blocks(all_reduce.launch_sum_blocks, x, out, words, 0)
        else:
            part = words // self.num_ranks
            own = torch.empty_like(x.view(self.num_ranks, -1)[0])
            self._launch_blocks(all_reduce.launch_sum_blocks, x, own, part, part)
            self._launch_blocks(all_reduce.launch_gather_blocks, own, out, part, part)

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of the tensors x [..., features] of all ranks and of the residual, and its RMS norm times the weight
        [features], of the same dtype.
        """
        from quire.kernels.triton import all_reduce

        rows, row = x.numel() // len(weight), weight.numel() * x.element_size() // 4
        block = 1 << (row - 1).bit_length()
        # Few rows are sent sooner by several programs each.
        parts = 4 if rows <= 16 and block >= 512 else 1
        is_small = row <= _MAX_ROW and rows * row <= _SMALL and rows * parts <= all_reduce.PROGRAMS
        if not is_small or not all(each.dtype == x.dtype and _is_whole(each) for each in (x, residual, weight)):
            return add_norm(self.sum(x), residual, weight, eps)
        out, normed = torch.empty_like(x), torch.empty_like(x)
        tensors = (x, residual, weight, out, normed, self._numbered, self._states[0])
        constants = replace(self._constants(x, block, min(max(block // 128, 1), 16), True), parts=parts)
        all_reduce.launch_sum_norm((rows * parts, 1), tensors, (eps,), (row, _SMALL), constants)
        return out, normed

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [num_ranks, *x.shape]."""
        from quire.kernels.triton import all_reduce

        if x.numel() and not _is_whole(x):
            return self.gather(_padded(x))[:, : x.numel()].reshape(self.num_ranks, *x.shape)
        out = x.new_empty(self.num_ranks, *x.shape)
        if not x.numel():
            return out
        words = x.numel() * x.element_size() // 4
        if words <= _SMALL:
            self._launch_words(all_reduce.launch_gather, x, out)
            return out
        size = 4 * _LARGE // x.element_size()
        parts, parts_out = x.view(-1).split(size), out.view(self.num_ranks, -1).split(size, dim=1)
        for part, part_out in zip(parts, parts_out, strict=True):
            part_words = part.numel() * part.element_size() // 4
            self._launch_blocks(all_reduce.launch_gather_blocks, part, part_out, part_words, words)
        return out

    def _launch_words(self, launch: Any, x: Tensor, out: Tensor) -> None:
        words, block = x.numel() * x.element_size() // 4, 512
        tensors = (x, out, self._numbered, self._states[0])
        grid = (-(-words // block), 1)
        launch(grid, tensors, (), (words, _SMALL), self._constants(x, block, 4, True))

    def _launch_blocks(self, launch: Any, x: Tensor, out: Tensor, words: int, stride: int) -> None:
        """Exchange `words` words of each rank. stride: as in `exchange_blocks`."""
        block = 4096
        tensors = (x, out, self._whole, self._states[1])
        # The flags lie behind all slots.
        sizes = (words, _LARGE, 2 * self.num_ranks * _LARGE, stride)
        launch((min(132, -(-words // block)), 1), tensors, (), sizes, self._constants(x, block, 16, False))

    def _constants(self, x: Tensor, block: int, num_warps: int, overlaps: bool) -> Any:
        from quire.kernels.gpu.launch import has_dependent_launch
        from quire.kernels.triton.all_reduce import AllReduceConfig

        launch_pdl = overlaps and has_dependent_launch(self._device)
        return AllReduceConfig(self.rank, self.num_ranks, block, x.element_size() == 2, num_warps, launch_pdl)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a residual [..., features] to x, which is contiguous; return x, and its RMS norm times the weight [features],
    all of one dtype.
    """
    normed = torch.empty_like(x)
    rows, rows_of_residual, rows_of_normed = (each.reshape(-1, len(weight)) for each in (x, residual, normed))
    norm(rows_of_normed, rows_of_residual, rows, weight, None, None, 1.0, eps, 0.0, False)
    return x, normed


def _padded(x: Tensor) -> Tensor:
    """The elements of a tensor as a vector of whole words of 32 bits, with zeros after them."""
    per_word = max(1, 4 // x.element_size())
    return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % per_word))


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor is contiguous, of whole words, and not empty."""
    return x.is_contiguous() and x.numel() > 0 and x.numel() * x.element_size() % 4 == 0
