"""Custom masks on Hopper GPUs that hide whole blocks of keys, or none of a block's keys, from all rows of a tile."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import quire
from helpers.families import check, compute
from helpers.hopper import Pointer, gpu, listed, on_host
from quire.bench.batches import random_batch
from quire.definition import attention_spec
from quire.definition.masks import PackedMask

mask = pytest.importorskip("quire.kernels.hopper.mask")

from quire.kernels.hopper.config import TileConfig  # noqa: E402


def mask_of_blocks(rng, q_len, kv_len):
    """A mask whose rectangles are all visible, all hidden, or random; some rows see nothing."""
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    height, width = rng.choice((1, 17, 64, 200)), rng.choice((64, 128, 300, 1000))
    for i in range(0, q_len, height):
        for j in range(0, kv_len, width):
            part = seen[i : i + height, j : j + width]
            part[:] = torch.rand(part.shape) < rng.choice((0.0, 0.0, 1.0, 1.0, 0.5))
    return seen


@gpu
@pytest.mark.parametrize("change", [{}, {"window_left": 600}, {"causal": True}, {"logits_soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize("dim", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_prefill_with_masks_of_whole_blocks_matches_the_oracle(dim, change, rng):
    for page_size in (1, 16):
        heads = rng.choice((1, 2))
        kv_dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn))
        spec = attention_spec(
            num_qo_heads=heads * rng.choice((1, 4, 7)), num_kv_heads=heads, head_dim_qk=dim[0], head_dim_vo=dim[1],
            q_dtype=torch.bfloat16, kv_dtype=kv_dtype, custom_mask=True, **{"causal": False, **change},
        )  # fmt: skip
        for _ in range(4):
            kv_lens = [rng.choice((0, 1, 130, rng.randint(1, 1500), 6000)) for _ in range(rng.randint(1, 4))]
            q_lens = [rng.choice((0, 1, 70, rng.randint(1, 700))) for _ in kv_lens]
            batch = random_batch(spec, q_lens, kv_lens, page_size)
            masks = [mask_of_blocks(rng, q, kv).flatten() for q, kv in zip(q_lens, kv_lens, strict=True)]
            batch = replace(batch, bool_mask=torch.cat(masks))
            check(batch, *compute(batch, "hopper"), "hopper")


@gpu
def test_prefill_with_a_mask_of_causal_order_has_equal_bits(rng):
    """A custom mask that says what causal order says leaves the same blocks, so that batch-invariant bits are equal."""
    spec = attention_spec(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16, batch_invariant=True
    )  # fmt: skip
    lens = [rng.randint(70, 900) for _ in range(3)]
    batch = random_batch(spec, lens, lens, 16)
    out, lse = compute(batch, "hopper")
    masks = [torch.ones(n, n).tril().bool().flatten() for n in lens]
    batch = replace(batch, spec=spec.replace(custom_mask=True, causal=False), bool_mask=torch.cat(masks))
    again, again_lse = compute(batch, "hopper")
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


@gpu
def test_prefill_with_a_mask_at_any_address_has_equal_bits(rng):
    """Bits that do not begin at a word of 32, with ones around them."""
    n, m = rng.randint(100, 300), rng.randint(300, 900)
    q, k = torch.randn(n, 4, 128, device="cuda").half(), torch.randn(m, 2, 128, device="cuda").half()
    seen = mask_of_blocks(rng, n, m)
    bits = PackedMask.from_bool(seen.flatten(), torch.tensor([n]).int(), torch.tensor([m]).int()).bits
    exact = quire.single_prefill_with_kv_cache(q, k, k, custom_mask=seen.cuda(), backend="hopper")
    for shift in (1, 2, 3):
        given = torch.full((len(bits) + 8,), 255, dtype=torch.uint8, device="cuda")[shift:][: len(bits)]
        given.copy_(bits)
        out = quire.single_prefill_with_kv_cache(q, k, k, packed_custom_mask=given, backend="hopper")
        assert torch.equal(out, exact)


def test_block_iterator_of_a_mask_skips_blocks_that_no_row_sees(monkeypatch, rng):
    """Blocks that no row of a tile sees are left out, and those of which all rows see all keys need no mask."""
    on_host(monkeypatch, mask)
    shift = mask._shift_word
    monkeypatch.setattr(mask, "_shift_word", lambda low, high, n: shift(low, high, n) & 0xFFFFFFFF)
    left_out = unmasked = 0
    for _ in range(40):
        group, size, right = rng.choice((1, 4, 7)), rng.choice((64, 128)), rng.choice((-1, 0))
        lens = [(rng.randint(1, 150), rng.choice((1, 500, rng.randint(1, 6000)))) for _ in range(2)]
        masks = [mask_of_blocks(rng, *n) for n in lens]
        q_lens, kv_lens = torch.tensor(lens, dtype=torch.int32).T
        packed = PackedMask.from_bool(torch.cat([x.flatten() for x in masks]), q_lens, kv_lens)
        words = torch.nn.functional.pad(packed.bits, (0, -len(packed.bits) % 4)).view(torch.int32).long() & 0xFFFFFFFF
        tile, warps = TileConfig(heads=1, group=group, rows=128, block_n=size, unit_size=size), rng.choice((1, 4))
        config = mask.MaskConfig(tile, right, window=False, custom=True, items=False)
        given = mask.BatchMask(None, None, Pointer(packed.indptr), *[None] * 4, config)
        given._words = functools.partial(mask.Words, Pointer(words), len(words), 0)
        for b, ((q_len, kv_len), seen) in enumerate(zip(lens, masks, strict=True)):
            request = SimpleNamespace(b=torch.tensor(b), q_len=q_len, kv_len=kv_len)
            for row in range(0, q_len * group, 128):
                last_row = min(row + 128, q_len * group) - 1
                rows, last = seen[row // group : last_row // group + 1], (kv_len - 1) // size
                if right == 0:
                    rows = rows & torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()[row // group :][: len(rows)]
                    last = max((kv_len - q_len + last_row // group) // size, 0)
                some, every = listed(given, request, row, last_row, 0, last, warps)
                blocks = {j: rows[:, j * size : (j + 1) * size] for j in range(last + 1)}
                assert {j for j, x in blocks.items() if x.any()} <= some
                assert every == {j for j, x in blocks.items() if x.all() and x.shape[1] == size}
                if right < 0:
                    inner = {j for j in some if (j + 1) * size <= kv_len}
                    assert inner == {j for j, x in blocks.items() if x.any() and x.shape[1] == size}
                left_out += last + 1 - len(some)
                unmasked += len(every)
    assert min(left_out, unmasked) > 50
