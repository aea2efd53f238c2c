"""Rows of heads in arrays of bytes: loaded to float32, scaled, and stored.

The storage type of an array of bytes is known at run time, as its index in `simd.STORAGE_TYPES`. A call chooses it once
for all its rows, so that kernels need not be compiled for each storage type. Rows have `dim` elements, a multiple of 8,
and follow each other in float32 arrays, from `start`.
"""

from __future__ import annotations

from quire.kernels.cpu.jit import function
from quire.kernels.cpu.simd import LANES, LOADERS, STORERS, load, splat, store


def _loading(load):
    @function
    def load_rows(x, offsets, n, dim, target, start):
        for t in range(n):
            for d in range(0, dim, LANES):
                store(target, start + t * dim + d, load(x, offsets[t] + d))

    return load_rows


def _storing(store):
    @function
    def store_rows(source, start, n, dim, x, offsets):
        for t in range(n):
            for d in range(0, dim, LANES):
                store(x, offsets[t] + d, load(source, start + t * dim + d))

    return store_rows


_load_f32, _load_bf16, _load_f16, _load_e4m3, _load_e5m2 = map(_loading, LOADERS)
_store_f32, _store_bf16, _store_f16 = map(_storing, STORERS)


@function
def load_rows(storage, x, offsets, n, dim, target, start):
    """Load n rows, which begin at `offsets` of the array of bytes x, into target."""
    if storage == 0:
        _load_f32(x, offsets, n, dim, target, start)
    elif storage == 1:
        _load_bf16(x, offsets, n, dim, target, start)
    elif storage == 2:
        _load_f16(x, offsets, n, dim, target, start)
    elif storage == 3:
        _load_e4m3(x, offsets, n, dim, target, start)
    else:
        _load_e5m2(x, offsets, n, dim, target, start)


@function
def scale_rows(x, start, n, dim, factors):
    """Multiply each of n rows of x by its factor."""
    for t in range(n):
        factor = splat(factors[t])
        for d in range(start + t * dim, start + (t + 1) * dim, LANES):
            store(x, d, load(x, d) * factor)


@function
def store_rows(storage, source, start, n, dim, x, offsets):
    """Store n rows of `source`, which begin at `offsets` of the array of bytes x, rounded to its storage type: float32,
    bfloat16 or float16.
    """
    if storage == 0:
        _store_f32(source, start, n, dim, x, offsets)
    elif storage == 1:
        _store_bf16(source, start, n, dim, x, offsets)
    else:
        _store_f16(source, start, n, dim, x, offsets)
