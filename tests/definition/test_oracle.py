"""The oracle is the definition, so it is held against facts that were not made by it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from quire.bench.batches import random_batch
from quire.definition import attention_spec, state
from quire.definition.oracle import attend, rotate


def make(q_len, kv_len, heads=4, kv_heads=2, dim=16, dim_vo=None, **layer):
    spec = attention_spec(
        num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_vo, q_dtype=torch.float32, **layer
    )
    q = torch.randn(q_len, heads, dim, dtype=torch.float64)
    k = torch.randn(kv_len, kv_heads, dim, dtype=torch.float64)
    v = torch.randn(kv_len, kv_heads, spec.head_dim_vo, dtype=torch.float64)
    return spec, q, k, v


def sdpa(q, k, v, spec, mask=None, bias=None):
    """torch's attention in float64, [tokens, heads, dim] in and out."""
    group = spec.group_size
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    attn_mask = bias if mask is None else mask
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=attn_mask, scale=spec.sm_scale
    )
    return out.transpose(0, 1)


def triangle(q_len, kv_len):
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("lengths", [(1, 9), (9, 9), (3, 20)])
def test_oracle_equals_sdpa_of_torch(heads, lengths):
    q_len, kv_len = lengths
    spec, q, k, v = make(q_len, kv_len, *heads, dim_vo=24)
    torch.testing.assert_close(attend(q, k, v, spec)[0], sdpa(q, k, v, spec, triangle(q_len, kv_len)))
    torch.testing.assert_close(attend(q, k, v, spec.replace(causal=False))[0], sdpa(q, k, v, spec))


def test_window_is_the_token_and_those_to_its_left():
    spec, q, k, v = make(6, 20, window_left=3)
    i, j = torch.arange(6)[:, None] + 14, torch.arange(20)
    mask = (j <= i) & (j >= i - 3)
    torch.testing.assert_close(attend(q, k, v, spec)[0], sdpa(q, k, v, spec, mask))
    out, _ = attend(q, k, v, spec.replace(window_left=0))
    torch.testing.assert_close(out, v[14:].repeat_interleave(2, 1))


def test_custom_mask_and_causality_both_hold(rng):
    spec, q, k, v = make(5, 12)
    mask = torch.rand(5, 12) < 0.6
    mask[:, 0] = True
    torch.testing.assert_close(attend(q, k, v, spec, mask=mask)[0], sdpa(q, k, v, spec, mask & triangle(5, 12)))


def test_lse_is_the_base_2_logarithm_of_the_denominator():
    spec, q, k, v = make(1, 3, 1, 1, 8)
    _, lse = attend(q, k, v, spec)
    logits = [float(q[0, 0] @ k[j, 0]) / math.sqrt(8) for j in range(3)]
    assert float(lse) == pytest.approx(math.log2(sum(math.exp(x) for x in logits)))


def test_oracle_of_two_keys_equals_numbers_by_hand():
    """q.k is 8 and 0, scaled to ln 3 and 0: weights 3/4 and 1/4."""
    spec = attention_spec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=8, q_dtype=torch.float32, sm_scale=math.log(3) / 8
    )
    q, k = torch.ones(1, 1, 8), torch.stack([torch.ones(1, 8), torch.zeros(1, 8)])
    v = torch.stack([torch.full((1, 8), 4.0), torch.full((1, 8), 8.0)])
    out, lse = attend(q, k, v, spec)
    assert out.flatten().tolist() == pytest.approx([5.0] * 8)
    assert float(lse) == pytest.approx(2.0)


def test_alibi_is_a_bias_by_distance():
    spec, q, k, v = make(4, 10, 8, 8, pos_encoding="ALIBI")
    distance = torch.arange(10)[None, :] - (torch.arange(4)[:, None] + 6)
    slopes = torch.tensor([2.0**-i for i in range(1, 9)], dtype=torch.float64)
    bias = (slopes[:, None, None] * distance).masked_fill(~triangle(4, 10), -torch.inf)
    torch.testing.assert_close(attend(q, k, v, spec)[0], sdpa(q, k, v, spec, bias=bias))


def test_soft_cap_bounds_the_logits():
    spec, q, k, v = make(1, 5, 1, 1, logits_soft_cap=0.5)
    logits = 0.5 * torch.tanh((k[:, 0] @ q[0, 0]) * spec.sm_scale / 0.5)
    torch.testing.assert_close(attend(q, k, v, spec)[0][0, 0], torch.softmax(logits, 0) @ v[:, 0])
    uncapped = attend(q, k, v, spec.replace(logits_soft_cap=0.0))[0]
    torch.testing.assert_close(attend(q, k, v, spec.replace(logits_soft_cap=1e6))[0], uncapped, rtol=1e-9, atol=1e-9)


def test_rope_is_multiplication_by_a_complex_number():
    spec, x, _, _ = make(5, 5, dim=16, pos_encoding="ROPE_LLAMA", rope_theta=100.0, rope_scale=2.0)
    positions = torch.tensor([0, 1, 2, 7, 30])
    angle = positions[:, None] / 2.0 * 100.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(rotate(x, positions, spec), torch.cat([turned.real, turned.imag], -1))


def test_rope_attention_depends_on_distances_only():
    """Outputs do not change when 11 tokens that the window masks come before a request's tokens."""
    spec, q, k, v = make(4, 9, pos_encoding="ROPE_LLAMA", window_left=4)
    shifted = [torch.cat([torch.randn(11, *x.shape[1:], dtype=x.dtype), x]) for x in (k, v)]
    torch.testing.assert_close(attend(q, k, v, spec)[0][1:], attend(q, *shifted, spec)[0][1:])


def test_a_sink_is_one_more_key_without_a_value():
    spec, q, k, v = make(3, 7, 4, 4)
    sinks = torch.randn(4, dtype=torch.float64)
    bias = torch.zeros(4, 3, 8, dtype=torch.float64)
    bias[:, :, :7] = torch.zeros(3, 7, dtype=torch.float64).masked_fill(~triangle(3, 7), -torch.inf)
    bias[:, :, 7] = sinks[:, None]
    padded = [torch.cat([x, torch.zeros(1, *x.shape[1:], dtype=x.dtype)]) for x in (k, v)]
    torch.testing.assert_close(attend(q, k, v, spec, sinks=sinks)[0], sdpa(q, *padded, spec, bias=bias))


def test_scales_multiply_what_is_stored():
    spec, q, k, v = make(3, 7)
    per_head = torch.tensor([2.0, 0.5], dtype=torch.float64)
    scaled = attend(q * 1.5, k * per_head[:, None], v * 3.0, spec)
    given = attend(q, k, v, spec, q_scale=1.5, k_scale=per_head, v_scale=3.0)
    for a, b in zip(scaled, given, strict=True):
        torch.testing.assert_close(a, b)


def test_row_that_sees_no_key_is_zero():
    spec, q, k, v = make(5, 3)
    out, lse = attend(q, k, v, spec)
    assert not out[:2].any()
    assert (lse[:2] == -torch.inf).all()
    assert lse[2:].isfinite().all()
    out, lse = attend(q, k[:0], v[:0], spec, sinks=torch.full((4,), 3.0))
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, 3.0 * math.log2(math.e)))


@pytest.mark.parametrize("layer", [{}, {"logits_soft_cap": 2.0}, {"window_left": 6}])
def test_states_of_any_split_merge_to_the_whole(layer, rng):
    spec, q, k, v = make(4, 30, **layer)
    whole = attend(q, k, v, spec)
    owner = torch.tensor([rng.randrange(3) for _ in range(30)])
    parts = [attend(q, k, v, spec, mask=(owner == part).expand(4, 30)) for part in range(3)]
    merged = parts[0]
    for part in parts[1:]:
        merged = state.merge(*merged, *part)
    stacked = state.merge_many(torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1))
    for result in (merged, stacked):
        torch.testing.assert_close(result[0], whole[0])
        torch.testing.assert_close(result[1], whole[1])


def test_merge_of_empty_states_is_empty():
    v, s = torch.zeros(2, 3, 8), torch.full((2, 3), -torch.inf)
    out, lse = state.merge(v, s, v, s)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, lse = state.merge_many(v[:, None], s[:, None])
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_attend_batch_over_pages_equals_attend_of_each_request(rng):
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, q_dtype=torch.float32, custom_mask=True)
    q_lens, kv_lens = [1, 4, 0, 2], [5, 9, 3, 0]
    batch = random_batch(spec, q_lens, kv_lens, page_size=rng.choice((1, 4)), padding=2)
    out, lse = batch.exact()
    k, v, indptr = batch.rows()
    assert not k.isnan().any()
    area, row = 0, 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mask = batch.bool_mask[area : area + q_len * kv_len].view(q_len, kv_len)
        rows, keys = slice(row, row + q_len), slice(int(indptr[b]), int(indptr[b + 1]))
        one = attend(batch.q[rows], k[keys], v[keys], spec, mask=mask)
        torch.testing.assert_close(out[rows], one[0])
        torch.testing.assert_close(lse[rows], one[1])
        area, row = area + q_len * kv_len, row + q_len
    assert not out[row:].any()
    assert (lse[row:] == -torch.inf).all()
