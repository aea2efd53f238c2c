"""Prompts of several items (multi-item scoring), by every kernel family against masks made from the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.families import FAMILIES, check, compute, layer
from quire.bench.batches import random_batch
from quire.definition.items import Items

families = pytest.mark.parametrize("family", FAMILIES)


def random_items(rng, kv_lens, stride):
    """Prompts of a prefix and items of random lengths, each after a delimiter, with what is padding set to 9,999."""
    positions, prefixes = torch.full((len(kv_lens), stride), 9_999, dtype=torch.int32), []
    for b, kv_len in enumerate(kv_lens):
        prefix, numbers = rng.randint(0, kv_len // 2), []
        while len(numbers) < kv_len - prefix:
            numbers += range(rng.randint(2, 12))
        numbers = numbers[: kv_len - prefix]
        positions[b, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        prefixes.append(prefix)
    return Items(torch.tensor(prefixes, dtype=torch.int32), positions.flatten(), stride)


def allowed(items, b, q_len, kv_len):
    """What tokens of several-item prompts see, from the words of its definition."""
    prefix, numbers = int(items.prefix_lens[b]), items.positions.view(-1, items.length)[b].tolist()
    mask = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for i, p in enumerate(range(kv_len - q_len, kv_len)):
        mask[i, : min(prefix, p + 1)] = True
        if p < prefix:
            continue
        for j in range(p - numbers[p - prefix] + 1, p + 1):
            mask[i, j] = True
    return mask


@families
def test_items_of_random_prompts_equal_a_custom_mask(family, rng):
    spec = layer(rng, torch.float32, torch.float32, items=True, logits_soft_cap=rng.choice((0.0, 5.0)))
    q_lens, kv_lens = [30, 1, 44], [30, 60, 90]
    batch = random_batch(spec, q_lens, kv_lens, 16)
    items = random_items(rng, kv_lens, 100)
    out, lse = compute(batch, family, items=items)
    flat = torch.cat([allowed(items, b, *n).flatten() for b, n in enumerate(zip(q_lens, kv_lens, strict=True))])
    same = replace(batch, spec=spec.replace(items=False, custom_mask=True), bool_mask=flat)
    check(same, out, lse, family)


@families
@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32], ids=str)
def test_items_without_padding_of_the_last_prompt_match_the_oracle(family, dtype, rng):
    """A single request needs no length either. Missing positions are 0, as FlashInfer's padding is."""
    for kv_lens in ([30, 61], [61]):
        spec = layer(rng, torch.float32, torch.float32, items=True)
        batch = random_batch(spec, [20] * len(kv_lens), kv_lens, 16)
        full = random_items(rng, kv_lens, 100)
        short = full.positions[: (len(kv_lens) - 1) * 100 + kv_lens[-1] - int(full.prefix_lens[-1])]
        for cut in (0, 5):
            kept = short[: len(short) - cut]
            items = Items(full.prefix_lens, kept.to(dtype), 100 if len(kv_lens) > 1 else rng.choice((0, 100)))
            out, lse = compute(batch, family, items=items)
            zeros = torch.zeros(100 * len(kv_lens) - len(kept), dtype=torch.int32)
            same = Items(full.prefix_lens, torch.cat([kept, zeros]), 100)
            flat = torch.cat([allowed(same, b, 20, n).flatten() for b, n in enumerate(kv_lens)])
            check(replace(batch, spec=spec.replace(items=False, custom_mask=True), bool_mask=flat), out, lse, family)


@pytest.mark.parametrize(
    ("count", "length", "message"),
    [
        (199, 100, r"has 199 entries: at least \(batch size - 1\) \* token_pos_in_items_len = 200 are needed"),
        (250, 0, "token_pos_in_items_len = 0 is not supported: 1 or more for several requests"),
        (250, -1, "token_pos_in_items_len = -1 is not supported"),
    ],
)
def test_items_of_wrong_lengths_are_refused(count, length, message):
    with pytest.raises(ValueError, match=message):
        Items(torch.zeros(3).int(), torch.zeros(count).to(torch.uint16), length)
