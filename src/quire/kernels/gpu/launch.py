"""Starting compiled kernels: Triton's own way looks at each of fifty arguments, and takes longer than small kernels.
And what kernels need to know of tensors before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from quire.definition.pages import PageTable
from quire.definition.spec import FLOATS
from quire.kernels.call import Call


@triton.jit
def _nothing():
    pass


ALIGNED = 6  # tensors of a launch for whose alignment the kernel is compiled
DIRECT = torch.version.cuda is not None and triton.__version__.startswith("3.6.")  # whose launcher is known
INTERPRETED = isinstance(_nothing, InterpretedFunction)  # TRITON_INTERPRET=1: on the CPU, slowly


class Repeat:
    """A launch that is to be repeated with other tensors of the same kinds, for a fraction of what the first took.

    Attributes:
        most: page ids of a table that it has programs enough for, if that is not any number.
    """

    most: int | None = None

    def __init__(
        self, compiled: Any, programs: int, others: tuple[Tensor | None, ...], rest: tuple[Any, ...], entries: int
    ) -> None:
        """entries: which of others and rest says how many page ids there are."""
        self._kept, self._entries = others, entries
        self._rest = (*(None if x is None else x.data_ptr() for x in others), *rest)
        self._grid, self._run = (programs, 1, 1), compiled.run
        self._handle: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        if DIRECT and compiled.run.global_scratch_size == compiled.run.profile_scratch_size == 0:
            # What Triton's launcher written in Python calls, which takes a microsecond to see that nothing is to be
            # allocated.
            launcher, self._run = compiled.run, compiled.run.launch
            modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
            self._handle = (compiled.function, *modes, None, None, compiled.packed_metadata, None, None, None)

    def __call__(
        self,
        q: int,
        q_pe: int | None,
        k: int,
        v: int,
        k_pe: int | None,
        out: int,
        lse: int | None,
        sinks: int | None,
        stream: int,
    ) -> bool:
        """Launch with these addresses in place of the first tensors; False, and nothing done, if one is not aligned."""
        if (q | k | v | out | (q_pe or 0) | (k_pe or 0)) & 15:
            return False
        self._run(*self._grid, stream, *self._handle, q, q_pe, k, v, k_pe, out, lse, sinks, *self._rest)
        return True

    def moved(self, table: PageTable, other: PageTable) -> Repeat | None:
        """The same over another page table of as many requests; None if it did not read the first one's ids, or if the
        other is of another kind or has more than it is for.
        """
        entries = other.indices.shape[0]
        if self._rest[self._entries] != table.indices.shape[0] or (self.most is not None and entries > self.most):
            return None
        if type(other) is not type(table):
            return None
        kept, rest = list(self._kept), list(self._rest)
        rest[self._entries] = entries
        theirs = {
            id(table.indptr): other.indptr,
            id(table.indices): other.indices,
            id(table.per_request): other.per_request,
        }
        for i, x in enumerate(self._kept):
            if id(x) in theirs:
                kept[i] = theirs[id(x)]
                rest[i] = theirs[id(x)].data_ptr()
        repeat = object.__new__(Repeat)  # copy() takes longer than all this
        repeat.__dict__.update(self.__dict__, _kept=tuple(kept), _rest=tuple(rest))
        return repeat


class Launcher:
    """Launches of one kernel with one set of constants.

    Triton compiles a kernel for the kinds of its arguments, for whether addresses are multiples of 16 bytes, and for
    strides that are. So what it compiled for given strides and aligned addresses is kept, and launched with addresses;
    anything else goes Triton's way.
    """

    def __init__(self, kernel: Any, constants: Any, **options: int) -> None:
        self._kernel, self._constants, self._options = kernel, constants, options
        self._entries = kernel.arg_names.index("entries")
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        others: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
        strides: tuple[int, ...],
    ) -> Repeat | None:
        """Launch on the device of the first tensor. The kernel's arguments are the tuples' and then the constants.

        Args:
            tensors: those that differ from call to call; the kernel is compiled for the alignment of the first ALIGNED.
            others: tensors whose alignment does not count, but for the first.
            numbers: what the kernel is not compiled for; strides: what it is.

        Returns:
            what repeats the launch, if it can be.
        """
        device = tensors[0].device.index  # type: ignore[union-attr]
        if not INTERPRETED and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, tensors, others, numbers, strides)
        rest = (*numbers, *strides, self._constants)
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        low = 0
        for address in (*addresses[:ALIGNED], None if others[0] is None else others[0].data_ptr()):
            low |= address or 0
        kinds = tuple(None if x is None else x.dtype for x in (*tensors, *others))
        key = (low & 15, device, strides, kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel[(programs,)](*tensors, *others, *rest, **self._options)
            if low & 15 or compiled is None:
                return None
            self._compiled[key] = compiled
            return Repeat(compiled, programs, others, rest, self._entries - len(tensors))
        repeat = Repeat(compiled, programs, others, rest, self._entries - len(tensors))
        repeat(*addresses, torch._C._cuda_getCurrentRawStream(device))  # type: ignore[arg-type, call-arg]
        return repeat


def into(
    launch: Callable[[Call, Tensor, Tensor | None], Repeat | None], call: Call, out: Tensor, lse: Tensor | None
) -> Repeat | None:
    """Launch into out and lse or, where kernels cannot write them as they are, into others that are copied there."""
    plain = out.dtype in FLOATS and out.stride(-1) == 1
    direct = out if plain else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    sums = lse if lse is None or lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    repeat = launch(call, direct, sums)
    if direct is out and sums is lse:
        return repeat
    if direct is not out:
        out.copy_(direct)
    if lse is not None and sums is not None and sums is not lse:
        lse.copy_(sums)
    return None


def split_scales(call: Call) -> tuple[tuple[float, float, float], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The scales of q, k and v as numbers, and per head where they are tensors (whose values nobody waits for)."""
    scales = (call.q_scale, call.k_scale, call.v_scale)
    if type(scales[0]) is type(scales[1]) is type(scales[2]) is float:  # nearly always
        return scales, (None, None, None)  # type: ignore[return-value]
    heads = (call.spec.num_qo_heads, call.spec.num_kv_heads, call.spec.num_kv_heads)
    q_gain, k_gain, v_gain = (1.0 if isinstance(x, Tensor) else float(x) for x in scales)
    q_scale, k_scale, v_scale = (
        x.float().reshape(-1).expand(n).contiguous() if isinstance(x, Tensor) else None
        for x, n in zip(scales, heads, strict=True)
    )
    return (q_gain, k_gain, v_gain), (q_scale, k_scale, v_scale)


def steps(x: Tensor) -> tuple[int, int, int]:
    """Strides of a cache's pages, tokens and heads; rows that are not in pages are pages of one token."""
    if x.ndim == 4:
        page, token, head, _one = x.stride()
        return page, token, head
    row, head, _one = x.stride()
    return row, 0, head


def aligned(x: Tensor, dims: int, step: int = 16) -> bool:
    """Whether an address is a multiple of 16 bytes and the first `dims` strides are multiples of `step` elements."""
    return not (x.data_ptr() & 15 or any(n % step for n in x.stride()[:dims]))


def reach(x: Tensor) -> int:
    """How many elements lie between the first and the last."""
    return sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
