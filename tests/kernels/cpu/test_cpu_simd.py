"""The vectors that the CPU's kernels are made of, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from quire.kernels.cpu import simd
from quire.kernels.cpu.rows import load_rows, scale_rows, store_rows
from quire.kernels.cpu.simd import exp2, load, load_wide, store, tanh, transpose_block

STORAGE = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.uint8,
}


@njit
def run_load(x, y):
    for i in range(0, len(x), 8):
        store(y, i, load(x, i))


@njit
def run_load_wide(x, y):
    for i in range(0, len(x), simd.WIDE):
        store(y, i, load_wide(x, i))


@njit
def run_exp2(x, y):
    for i in range(0, len(x), simd.WIDE):
        store(y, i, exp2(load_wide(x, i)))


@njit
def run_tanh(x, y):
    for i in range(0, len(x), 8):
        store(y, i, tanh(load(x, i)))


@pytest.mark.parametrize("dtype", list(STORAGE))
def test_load_of_every_number_of_each_storage_type_widens_it(dtype):
    bits = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32).to({1: torch.int8, 2: torch.int16}[dtype.itemsize])
    exact = bits.view(dtype).float().numpy()
    for widen in (run_load, run_load_wide):
        widened = np.empty(len(bits), np.float32)
        widen(bits.view(STORAGE[dtype]).numpy(), widened)
        np.testing.assert_array_equal(widened, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_store_of_random_numbers_rounds_as_torch(dtype):
    x = torch.cat(
        [
            torch.randn(1 << 16) * 10.0 ** torch.randint(-8, 9, (1 << 16,)),
            torch.tensor([torch.inf, -torch.inf, 0.0, -0.0]),
        ]
    )
    ties = torch.arange(1, 4097, dtype=torch.int32).view(-1) << 15  # exactly between two bfloat16
    x = torch.cat([x, ties.view(torch.float32), torch.zeros(-len(x) % 8)])
    x = torch.cat([x, torch.zeros(-len(x) % 8)])
    narrow = torch.empty(len(x), dtype=dtype)
    run_load(x.numpy(), narrow.view(STORAGE[dtype]).numpy())
    assert torch.equal(narrow.view(torch.int16), x.to(dtype).view(torch.int16))
    nan = torch.full((8,), torch.nan)
    run_load(nan.numpy(), narrow.view(STORAGE[dtype]).numpy())
    assert narrow[:8].isnan().all()


@njit
def run_rows(from_storage, x, x_offsets, factors, dim, to_storage, y, y_offsets):
    n = len(factors)
    rows = np.full((n + 2) * dim, np.nan, np.float32)
    load_rows(from_storage, x, x_offsets, n, dim, rows, dim)
    scale_rows(rows, dim, n, dim, factors)
    store_rows(to_storage, rows, dim, n, dim, y, y_offsets)
    return rows


DTYPES = [torch.float32, *STORAGE]


@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_rows_of_each_storage_type_are_loaded_scaled_and_stored_in_others(given, rng):
    n, dim = rng.randint(1, 9), 8 * rng.randint(1, 5)
    x, factors = torch.randn(n + 3, dim + 8).to(given), torch.rand(n) + 0.5
    chosen = torch.tensor([rng.randrange(n + 3) for _ in range(n)])
    exact = x[chosen, 8:].float() * factors[:, None]
    for index, dtype in enumerate(DTYPES[:3]):
        y, places = torch.full((n + 3, dim), torch.nan).to(dtype), torch.randperm(n + 3)[:n]
        x_offsets, y_offsets = chosen * (dim + 8) + 8, places * dim
        arrays = [z.view(-1).view(torch.uint8).numpy() for z in (x, y)]
        rows = run_rows(
            DTYPES.index(given), arrays[0], x_offsets.numpy(), factors.numpy(), dim, index, arrays[1], y_offsets.numpy()
        )
        assert np.isnan(rows[:dim]).all()
        assert np.isnan(rows[-dim:]).all()
        assert torch.equal(y[places], exact.to(dtype))
        assert y.isnan().sum() == 3 * dim, "rows that were not named are as before"


@njit
def run_transpose(x, x0, x_step, y, y0, y_step):
    transpose_block(x, x0, x_step, y, y0, y_step)


def test_transpose_block_writes_eight_by_eight_numbers():
    x, y = np.random.randn(11, 13).astype(np.float32), np.full((9, 17), np.nan, np.float32)
    run_transpose(x.reshape(-1), 2 * 13 + 3, 13, y.reshape(-1), 17 + 4, 17)
    np.testing.assert_array_equal(y[1:, 4:12], x[2:10, 3:11].T)
    assert np.isnan(y).sum() == y.size - 64


def padded(x):
    x = np.asarray(x, np.float32)
    return np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])


def test_exp2_of_random_numbers_has_a_relative_error_below_bound():
    x = padded(np.concatenate([-np.random.rand(100_000) * 126, -np.random.rand(100_000) * 1e-3]))
    y = np.empty_like(x)
    run_exp2(x, y)
    assert np.abs(y / np.exp2(x.astype(np.float64)) - 1).max() < 1.2e-7


def test_exp2_of_extreme_numbers_is_exact():
    x = padded([0, -1, -126.5, -1e30, -np.inf, np.nan])
    y = np.empty_like(x)
    run_exp2(x, y)
    np.testing.assert_array_equal(y[:6], np.array([1, 0.5, 0, 0, 0, np.nan], np.float32))


def test_tanh_of_random_and_extreme_numbers_has_a_relative_error_below_bound():
    x = padded(np.concatenate([np.random.randn(100_000) * 4, np.random.randn(100_000) * 1e-4, [1e-20, 1e30]]))
    y = np.empty_like(x)
    run_tanh(x, y)
    seen = x != 0
    assert np.abs(y[seen] / np.tanh(x[seen].astype(np.float64)) - 1).max() < 4e-7
    edges, result = padded([np.inf, -np.inf, np.nan, 0]), np.empty(16, np.float32)
    run_tanh(edges, result)
    np.testing.assert_array_equal(result[:4], np.array([1, -1, np.nan, 0], np.float32))
