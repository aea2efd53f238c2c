"""Prompts of several items on Hopper GPUs: against the oracle, and which key blocks a tile's work leaves out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.families import compute, oracle_result
from helpers.hopper import Pointer, gpu, listed, on_host
from quire.bench.batches import random_batch, relative_error
from quire.definition import attention_spec
from quire.definition.items import Items

mask = pytest.importorskip("quire.kernels.hopper.mask")

from quire.kernels.hopper.config import TileConfig  # noqa: E402


def items_of(rng, kv_lens, dtype):
    """Random prefixes and items of a batch: short and long items, also prompts that are all prefix or all items."""
    length = max(max(kv_lens), 1)
    prefixes, rows = [], []
    for n in kv_lens:
        prefix = rng.choice((0, n, rng.randint(0, n), n // 2))
        row = []
        while len(row) < n - prefix:
            row += range(rng.choice((1, 3, 40, 300)))
        prefixes.append(prefix)
        rows.append((row + [0] * length)[: n - prefix] + [0] * (length - (n - prefix)))
    return Items(torch.tensor(prefixes, dtype=torch.int32), torch.tensor(rows).flatten().to(dtype), length)


@gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("change", [{}, {"window_left": 200}, {"causal": False}, {"sinks": True}], ids=str)
def test_prefill_of_items_matches_the_oracle(change, kv_dtype, rng):
    heads = rng.choice((1, 2))
    spec = attention_spec(
        num_qo_heads=heads * rng.choice((1, 4, 7)), num_kv_heads=heads, head_dim_qk=rng.choice((64, 128)), items=True,
        q_dtype=torch.bfloat16, kv_dtype=kv_dtype, **change,
    )  # fmt: skip
    for _ in range(6):
        kv_lens = [rng.choice((1, 130, rng.randint(1, 1500), 4000)) for _ in range(rng.randint(1, 4))]
        q_lens = [rng.choice((n, rng.randint(1, n), 1)) for n in kv_lens]
        batch = random_batch(spec, q_lens, kv_lens, rng.choice((1, 16, 64)))
        items = items_of(rng, kv_lens, rng.choice((torch.int32, torch.uint16)))
        out, _ = compute(batch, "hopper", items=items)
        assert relative_error(out, oracle_result(batch, items)[0]) < 3e-3


@pytest.mark.slow
def test_block_iterator_of_items_skips_blocks_that_no_row_sees(monkeypatch, rng):
    """A tile has all blocks of which a row sees a key and, if no row is in the prefix, no others."""
    left_out = 0
    on_host(monkeypatch, mask)
    for _ in range(40):
        group, n = rng.choice((1, 4, 7)), rng.choice((100, rng.randint(1, 3000), 5000))
        request = SimpleNamespace(b=torch.tensor(0), q_len=rng.choice((n, rng.randint(1, n))), kv_len=n)
        q_len, items = request.q_len, items_of(rng, [n], torch.int32)
        tile = TileConfig(heads=1, group=group, rows=128, block_n=128, unit_size=128)
        config = mask.MaskConfig(tile, right=0, window=False, custom=False, items=True)
        given = mask.BatchMask(*[None] * 4, Pointer(items.prefix_lens), Pointer(items.positions), items.length, config)
        seen = items.mask(0, q_len, n) & torch.ones(q_len, n).tril(n - q_len).bool()
        for row in range(0, q_len * group, 128):
            last_row = min(row + 128, q_len * group) - 1
            rows = seen[row // group : last_row // group + 1]
            last = (n - q_len + last_row // group) // 128
            some, every = listed(given, request, row, last_row, 0, last)
            assert all(rows[:, b * 128 : (b + 1) * 128].all() for b in every)
            empty = {b for b in range(last + 1) if not rows[:, b * 128 : (b + 1) * 128].any()}
            assert set(range(last + 1)) - empty <= some
            if n - q_len + row // group >= int(items.prefix_lens[0]):  # no row of the tile is in the prefix
                assert some - {last} == set(range(last)) - empty  # a row between items does not see itself
                assert every == set(range(int(items.prefix_lens[0]) // 128))
            left_out += last + 1 - len(some)
    assert left_out > 200
