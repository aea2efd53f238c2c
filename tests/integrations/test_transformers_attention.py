"""Quire's attention and mask functions for Transformers by themselves: every mask against the oracle, memory layouts,
plans, and what is refused.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_causal_mask_function

from helpers.dense_attention import expected, padded, seen_by
from quire.integrations.transformers import attention, mask
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

MODULE = SimpleNamespace(layer_idx=0, is_causal=True)
HEADS, KV_HEADS, DIM = 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = 2e-6  # of the relative error in float32


def tensors(batch, q_len, kv_len, device="cpu", dim_vo=DIM):
    q = torch.randn(batch, HEADS, q_len, DIM, device=device)
    return q, *(torch.randn(batch, KV_HEADS, kv_len, dim, device=device) for dim in (DIM, dim_vo))


def config(window=None, heads=KV_HEADS):
    return SimpleNamespace(sliding_window=window, num_key_value_heads=heads)


def pattern(window):
    return sliding_window_causal_mask_function(window) if window else causal_mask_function


def made(batch, q_len, kv_len, window=None, padding=None, heads=KV_HEADS, device="cpu", **given):
    """Quire's mask for query tokens that are the last ones of a dynamic cache."""
    given = {"mask_function": pattern(window), "q_offset": kv_len - q_len, "attention_mask": padding} | given
    return mask(batch, q_len, kv_len, local_size=window, config=config(window, heads), device=device, **given)


def check(got, want, rows=None):
    """Compare outputs [batch, q_len, heads, dim], at bool [batch, q_len] `rows` only."""
    assert got.isfinite().all()
    got, want = (x if rows is None else x[rows] for x in (got.double(), want))
    assert (got - want).norm() <= BOUND * want.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 13), (4, 13), (13, 13)])
def test_attention_padding_and_windows_match_the_oracle(q_len, kv_len, side, window, device):
    q, k, v = tensors(3, q_len, kv_len, device, dim_vo=24)
    padding = padded(3, kv_len, side, device).bool()
    sinks = torch.randn(HEADS, device=device)
    given = made(3, q_len, kv_len, window, padding, device=device)
    options = {"scaling": 0.3, "softcap": 2.0, "s_aux": sinks, "sliding_window": window}
    out, weights = attention(MODULE, q, k, v, given, **options)
    assert weights is None
    want = expected(q, k, v, seen_by(pattern(window), 3, q_len, kv_len, padding), 0.3, 2.0, sinks)
    check(out, want, padding[:, -q_len:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_one_new_token_sees_any_keys_that_the_mask_leaves(window, device):
    padding = torch.rand(4, 20, device=device) < 0.5
    padding[0] = False  # this row sees nothing, which gives 0
    q, k, v = tensors(4, 1, 20, device)
    out, _ = attention(MODULE, q, k, v, made(4, 1, 20, window, padding, device=device))
    seen = seen_by(pattern(window), 4, 1, 20, padding)
    check(out, expected(q, k, v, seen, DIM**-0.5))
    assert not out[0].any()


@pytest.mark.parametrize("q_len", [2, 9])
def test_attention_on_the_cpu_holes_in_a_mask_match_the_oracle(q_len):
    padding = torch.rand(3, 15) < 0.6
    q, k, v = tensors(3, q_len, 15)
    out, _ = attention(MODULE, q, k, v, made(3, q_len, 15, 5, padding))
    seen = seen_by(pattern(5), 3, q_len, 15, padding)
    check(out, expected(q, k, v, seen, DIM**-0.5), seen.any(-1))


@pytest.mark.parametrize("function", ["or", "chunks"])
@pytest.mark.parametrize("q_len", [1, 6])
def test_attention_other_mask_functions_match_the_oracle(q_len, function):
    def visible(b, h, i, j):
        chunks = i // 4 == j // 4
        return (j <= i) & chunks if function == "chunks" else (j <= i) | chunks

    given = made(2, q_len, 10, mask_function=visible, use_vmap=function == "or", allow_is_causal_skip=False)
    q, k, v = tensors(2, q_len, 10)
    out, _ = attention(MODULE, q, k, v, given)
    check(out, expected(q, k, v, seen_by(visible, 2, q_len, 10), DIM**-0.5))


@pytest.mark.parametrize("q_len", [1, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_with_a_bool_mask_of_the_caller_uses_it_alone(rows, q_len):
    q, k, v = tensors(3, q_len, 11)
    seen = torch.rand(rows, 1, q_len, 11) < 0.5
    out, _ = attention(MODULE, q, k, v, seen, sliding_window=2)
    check(out, expected(q, k, v, seen[:, 0].expand(3, -1, -1), DIM**-0.5))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_without_a_mask_is_causal_if_the_module_is(causal):
    q, k, v = tensors(2, 5, 9)
    out, _ = attention(SimpleNamespace(is_causal=causal), q, k, v, None)
    seen = seen_by(causal_mask_function, 2, 5, 9) if causal else torch.ones(2, 5, 9, dtype=torch.bool)
    check(out, expected(q, k, v, seen, DIM**-0.5))
    inverted, _ = attention(SimpleNamespace(is_causal=not causal), q, k, v, None, is_causal=causal)
    torch.testing.assert_close(inverted, out, rtol=0, atol=0)


def test_attention_sequences_by_offsets_match_the_oracle():
    q, k, v = tensors(2, 6, 6)
    offsets = torch.tensor([0, 2, 5, 6, 10, 12])
    sequence = torch.repeat_interleave(torch.arange(5), offsets.diff())
    for causal in (True, False):
        out, _ = attention(
            MODULE, q, k, v, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=4, is_causal=causal
        )
        flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v)]
        seen = sequence[:, None] == sequence
        seen = (seen.tril() if causal else seen)[None]
        check(out.flatten(0, 1)[None], expected(*flat, seen, DIM**-0.5))


@pytest.mark.parametrize("q_len", [6, 1])
def test_attention_sequences_by_offsets_see_what_a_bool_mask_leaves(q_len):
    q, k, v = tensors(2, 6, 6)
    offsets = torch.tensor([0, 2, 5, 6, 10, 12])
    sequence = torch.repeat_interleave(torch.arange(5), offsets.diff()).view(2, 6)
    own = sequence[:, :, None] == sequence[:, None]
    seen = torch.rand(2, 1, 6, 6) < 0.7
    q, own, seen = q[:, :, :q_len], own[:, :q_len], seen[:, :, :q_len]
    # Of one query token in each row, the offsets are those of the first tokens.
    cu_q = offsets if q_len == 6 else torch.tensor([0, 1, 1, 1, 2, 2])
    out, _ = attention(MODULE, q, k, v, seen, cu_seq_lens_q=cu_q, cu_seq_lens_k=offsets, sliding_window=2)
    check(out, expected(q, k, v, seen[:, 0] & own, DIM**-0.5))
    with pytest.raises(ValueError, match="attention_mask = float32"):
        attention(MODULE, q, k, v, seen.float(), cu_seq_lens_q=cu_q, cu_seq_lens_k=offsets)


def layouts(x):
    """The same values in memory layouts that models and caches have."""
    batch, heads, length, dim = x.shape
    yield "contiguous", x.contiguous()
    yield "tokens first", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "part of a projection", torch.cat([x, x], 3).transpose(1, 2).contiguous().transpose(1, 2)[..., dim:]
    yield "part of a longer cache", torch.cat([x, x.new_full((batch, heads, 5, dim), torch.nan)], 2)[:, :, :length]
    yield "expanded", x[:1].expand(batch, -1, -1, -1)
    yield "strides that fit nothing", x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 8), (1, 1), (5, 8)])
@pytest.mark.parametrize("heads", [KV_HEADS, 3])
def test_attention_layouts_of_keys_and_values_match_the_oracle(q_len, kv_len, heads):
    """Also where the config has another number of KV heads than the cache, as with tensor parallelism."""
    q, k, v = tensors(3, q_len, kv_len)
    padding = padded(3, kv_len, "left" if kv_len > 5 else "").bool()
    seen = seen_by(causal_mask_function, 3, q_len, kv_len, padding)
    given = made(3, q_len, kv_len, padding=padding, heads=heads)
    for (key_name, key), (value_name, value) in zip(layouts(k), [*layouts(v)][::-1], strict=True):
        for pair in ((key, v), (k, value), (key, value)):
            out, _ = attention(MODULE, q, *pair, given)
            want = expected(q, *pair, seen, DIM**-0.5)
            assert (out - want)[padding[:, -q_len:]].norm() <= BOUND * want.norm(), (key_name, value_name)


def test_attention_a_static_cache_is_read_up_to_its_last_token():
    """The mask is as long as the tokens so far, or as the cache, and the offset is on the device."""
    q, k, v = tensors(2, 4, 20)
    k[:, :, 11:] = v[:, :, 11:] = torch.nan
    padding = padded(2, 11, "left").bool()
    full = torch.nn.functional.pad(padding, (0, 9))
    seen = seen_by(causal_mask_function, 2, 4, 11, padding)
    want = expected(q, k[:, :, :11], v[:, :, :11], seen, DIM**-0.5)
    for given in (padding, full, None):
        mask_of = made(2, 4, 20, padding=given, q_offset=torch.tensor(7))
        out, _ = attention(MODULE, q, k, v, mask_of)
        if given is None:
            want = expected(q, k[:, :, :11], v[:, :, :11], seen_by(causal_mask_function, 2, 4, 11), DIM**-0.5)
        check(out, want, padding[:, -4:])


@pytest.fixture
def plans(monkeypatch):
    """The plans that have been made, one element each."""
    found = []
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):

        def plan(self, *args, _own=wrapper.plan, **kwargs):
            found.append(type(self))
            return _own(self, *args, **kwargs)

        monkeypatch.setattr(wrapper, "plan", plan)
    return found


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("inference", [False, True])
def test_attention_layers_of_a_mask_share_a_plan(plans, q_len, inference):
    with torch.inference_mode(inference):
        for _ in range(2):
            full = made(2, q_len, 9, padding=padded(2, 9, "left").bool())
            windowed = made(2, q_len, 9, 3, padding=padded(2, 9, "left").bool())
            for _layer in range(3):
                attention(MODULE, *tensors(2, q_len, 9), full)
                attention(MODULE, *tensors(2, q_len, 9), windowed, sliding_window=3)
    assert len(plans) == 4


@pytest.mark.parametrize("inference", [False, True])
def test_attention_a_changed_mask_is_planned_again(inference):
    q, k, v = tensors(2, 5, 9)
    with torch.inference_mode(inference):
        seen = torch.rand(2, 1, 5, 9) < 0.5
        offsets = torch.tensor([0, 3, 10])
        for _ in range(2):
            out, _ = attention(MODULE, q, k, v, seen)
            check(out, expected(q, k, v, seen[:, 0], DIM**-0.5))
            packed, _ = attention(MODULE, q, k[:, :, :5], v[:, :, :5], None, cu_seq_lens_q=offsets)
            sequence = torch.repeat_interleave(torch.arange(2), offsets.diff())
            flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k[:, :, :5], v[:, :, :5])]
            own = (sequence[:, None] == sequence).tril()[None]
            check(packed.flatten(0, 1)[None], expected(*flat, own, DIM**-0.5))
            seen.logical_not_()
            offsets[1] = 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.zeros(2, 1, 5, 9)}, r"attention_mask = float32 \[2, 1, 5, 9\].*a bool mask is"),
        ({"attention_mask": torch.ones(2, 9, dtype=torch.int64)}, r"attention_mask = int64 \[2, 9\]"),
        ({"attention_mask": torch.ones(2, HEADS, 5, 9, dtype=torch.bool)}, "one mask for all heads"),
        ({"attention_mask": torch.ones(2, 1, 5, 8, dtype=torch.bool)}, r"\[2 or 1, 1, 5, 9\]"),
        ({"attention_mask": torch.zeros(1, 1, 3, 2, dtype=torch.int32)}, "masks of 2 rows of 5 query tokens"),
        ({"is_causal": False, "sliding_window": 3}, "sliding_window = 3.*there is none"),
        ({"dropout": 0.1}, "dropout = 0.1.*model.eval()"),
        ({"output_attentions": True}, "output_attentions = True.*'eager'"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"block_indices": torch.zeros(1)}, "block_indices"),
    ],
)
def test_attention_with_unsupported_options_raises(change, message):
    with pytest.raises(ValueError, match=message):
        attention(MODULE, *tensors(2, 5, 9), **({"attention_mask": None} | change))


def test_attention_with_gradients_raises_with_advice():
    for i in range(3):
        given = list(tensors(2, 5, 9))
        given[i].requires_grad_()
        with pytest.raises(ValueError, match=r"not for training.*torch.no_grad.*set_attn_implementation"):
            attention(MODULE, *given, None)
        with torch.no_grad():
            attention(MODULE, *given, None)


def test_attention_a_mask_of_other_rows_raises():
    with pytest.raises(ValueError, match="another layer's"):
        attention(MODULE, *tensors(2, 1, 9), made(2, 1, 8, padding=torch.ones(2, 8, dtype=torch.bool)))


def test_mask_sequences_with_functions_of_the_caller_are_whole():
    """What a caller has added to packed sequences may hide any key."""
    own = and_masks(causal_mask_function, lambda b, h, i, j: j != 2)
    found = made(2, 5, 5, mask_function=own, use_vmap=True, allow_is_causal_skip=False)
    assert found.dtype == torch.bool
    assert not found[:, 0, :, 2].any()
