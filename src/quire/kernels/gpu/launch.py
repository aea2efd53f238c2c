"""Launches of compiled kernels by address. Triton's own launch path inspects each of some fifty arguments, which takes
longer than a small kernel runs. This file also has what families need to know of tensors before a launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.definition.spec import FLOATS
from quire.definition.versions import untested
from quire.kernels.call import Addresses, Call, Replay
from quire.kernels.family import Family
from quire.kernels.gpu.tma import TmaMatrix, descriptors
from quire.kernels.gpu.triton_internals import INTERPRETED, direct_launch, has_direct_launch
from quire.kernels.torch_internals import current_raw_stream

# The number of leading tensors of a launch for whose alignment its kernel is compiled.
NUM_ALIGNED = 6


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched while the one before them runs (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether small kernels for Hopper GPUs (sm_90), in Gluon, run on a device."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    # Releases of Triton rename parts of Gluon.
    return torch.cuda.get_device_capability(device)[0] == 9 and not untested({"triton": triton.__version__})


@lru_cache
def num_sms(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 4, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def wait_for_launch_before(overlaps: tl.constexpr):
    """If this launch overlaps the one before, wait until that one has ended, and let the next one overlap this one."""
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()


class LaunchReplay:
    """A launch that can be replayed at other addresses of q, keys, values, outputs and sinks: a `Replay`."""

    def __init__(
        self,
        compiled: Any,
        programs: int,
        others: tuple[Tensor | None, ...],
        rest: tuple[Any, ...],
        matrices: tuple[TmaMatrix, TmaMatrix] | None = None,
    ) -> None:
        """others: tensors that each launch reads; rest: the arguments after them; matrices: of k and v, if the kernel
        loads them by TMA.
        """
        # Launches get only the addresses of these tensors. This attribute keeps the tensors allocated.
        self._others = others
        self._rest = (*[None if x is None else x.data_ptr() for x in others], *rest)
        self._grid, (self._run, self._handle) = (programs, 1, 1), direct_launch(compiled)
        self._descriptors = None
        if matrices is not None:
            self._descriptors = descriptors(compiled, matrices)
            self._run = self._descriptors.launch

    def __call__(self, addresses: Addresses, stream: int) -> bool:
        q, q_pe, k, v, k_pe, out, *last = addresses
        if (q | k | v | out | (q_pe or 0) | (k_pe or 0)) & 15:
            return False
        kv = (k, v) if self._descriptors is None else self._descriptors[k, v]
        self._run(*self._grid, stream, *self._handle, q, q_pe, *kv, k_pe, out, *last, *self._rest)
        return True


class Launcher:
    """Launches of one kernel with one set of constants.

    Triton compiles a kernel anew for other dtypes, for whether addresses are multiples of 16 bytes, and for whether
    strides are multiples of 16. A Launcher keeps the kernels that were compiled for aligned addresses, by dtypes and
    strides, and launches them by address. All other launches take Triton's own path.
    """

    def __init__(self, kernel: Any, constants: Any, **options: int) -> None:
        self._kernel, self._constants = kernel, constants
        self._options = options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        others: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
        strides: tuple[int, ...],
        matrices: tuple[TmaMatrix, TmaMatrix] | None = None,
    ) -> LaunchReplay | None:
        """Launch on the first tensor's device. The kernel's arguments are those of the tuples and then the constants.

        Args:
            tensors: those that a replay replaces; the kernel is compiled for the alignment of the first NUM_ALIGNED.
            others: tensors for whose alignment it is not compiled, except for the first.
            numbers: numbers that the kernel is not compiled for.
            strides: numbers that it is compiled for.
            matrices: how TMA reads k and v, the third and the fourth tensor, if the kernel takes descriptors of them.

        Returns:
            the launch's replay, if it has one.
        """
        device = tensors[0].device.index  # type: ignore[union-attr]
        if not INTERPRETED and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, tensors, others, numbers, strides, matrices)
        rest = (*numbers, *strides, self._constants)
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        low_bits = 0
        for address in (*addresses[:NUM_ALIGNED], None if others[0] is None else others[0].data_ptr()):
            low_bits |= address or 0
        # A generator takes twice as long as a list.
        dtypes = tuple([None if x is None else x.dtype for x in (*tensors, *others)])
        key = (low_bits & 15, device, strides, dtypes)
        compiled = self._compiled.get(key)
        if compiled is None:
            given: tuple[Any, ...] = tensors
            if matrices is not None:
                k, v = (m.descriptor(x) for m, x in zip(matrices, tensors[2:4], strict=True))  # type: ignore[arg-type]
                given = (*tensors[:2], k, v, *tensors[4:])
            compiled = self._kernel[(programs,)](*given, *others, *rest, **self._options)
            if low_bits & 15 or compiled is None or not (matrices is None or has_direct_launch()):
                return None
            self._compiled[key] = compiled
            return LaunchReplay(compiled, programs, others, rest, matrices)
        replay = LaunchReplay(compiled, programs, others, rest, matrices)
        replay(tuple(addresses), current_raw_stream(device))  # type: ignore[arg-type]
        return replay


class SmallLauncher:
    """Launches of the kernel of a small operation, by address once it is compiled for aligned addresses, as `Launcher`.

    Of the kernel's arguments, tensors come first, then numbers that it is not compiled for, numbers that it is compiled
    for, and its constants, an object with an attribute num_warps and, if the kernel waits for the one before it by
    `wait_for_launch_before`, launch_pdl.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
        sizes: tuple[int, ...],
        constants: Any,
    ) -> None:
        """Launch on the device of the first tensor, which is not None."""
        device = tensors[0].device.index  # type: ignore[union-attr]
        if not INTERPRETED and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(grid, tensors, numbers, sizes, constants)
        addresses, low_bits = [None if x is None else x.data_ptr() for x in tensors], 0
        for address in addresses:
            low_bits |= address or 0
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        key = (low_bits & 15, device, sizes, constants, dtypes)
        found = self._compiled.get(key)
        if found is not None:
            run, handle = found
            stream = current_raw_stream(device)
            run(*grid, 1, stream, *handle, *addresses, *numbers, *sizes, constants)
            return None
        options = {"launch_pdl": True} if getattr(constants, "launch_pdl", False) else {}
        compiled = self._kernel[grid](*tensors, *numbers, *sizes, constants, num_warps=constants.num_warps, **options)
        if compiled is not None and not low_bits & 15 and has_direct_launch():
            self._compiled[key] = direct_launch(compiled)
        return None


class GpuFamily(Family):
    """A family that launches kernels, which write contiguous rows of floats; other outputs are copied."""

    def launch(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        """`attend` into outputs that kernels can write to."""
        raise NotImplementedError

    def attend(self, call: Call, out: Tensor, lse: Tensor | None) -> Replay | None:
        writable = out.dtype in FLOATS and out.stride(-1) == 1
        kernel_out = out if writable else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        kernel_lse = lse
        if lse is not None and not lse.is_contiguous():
            kernel_lse = torch.empty_like(lse, memory_format=torch.contiguous_format)
        replay = self.launch(call, kernel_out, kernel_lse)
        if kernel_out is out and kernel_lse is lse:
            return replay
        if kernel_out is not out:
            out.copy_(kernel_out)
        if lse is not None and kernel_lse is not None and kernel_lse is not lse:
            lse.copy_(kernel_lse)
        return None


def split_scales(call: Call) -> tuple[tuple[float, float, float], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The scales of q, k and v as numbers, and those that are tensors as float32 per head, which the host never reads.
    Where one is given the other is 1 or None.
    """
    scales = (call.q_scale, call.k_scale, call.v_scale)
    # Scales are floats in nearly all calls.
    if type(scales[0]) is type(scales[1]) is type(scales[2]) is float:
        return scales, (None, None, None)  # type: ignore[return-value]
    heads = (call.spec.num_qo_heads, call.spec.num_kv_heads, call.spec.num_kv_heads)
    q_scale, k_scale, v_scale = (1.0 if isinstance(x, Tensor) else float(x) for x in scales)
    q_scales, k_scales, v_scales = (
        x.float().reshape(-1).expand(n).contiguous() if isinstance(x, Tensor) else None
        for x, n in zip(scales, heads, strict=True)
    )
    return (q_scale, k_scale, v_scale), (q_scales, k_scales, v_scales)


def kv_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of a cache's pages, tokens and heads, in elements. Ragged rows count as pages of one token."""
    if x.ndim == 4:
        page, token, head, _one = x.stride()
        return page, token, head
    row, head, _one = x.stride()
    return row, 0, head


def is_aligned(x: Tensor, dims: int, step: int = 16) -> bool:
    """Whether an address is a multiple of 16 bytes and the first `dims` strides are multiples of `step` elements."""
    return not (x.data_ptr() & 15 or any(n % step for n in x.stride()[:dims]))


def extent_in_elements(x: Tensor) -> int:
    """The distance of a tensor's first element from its last in memory, in elements."""
    return sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)])
