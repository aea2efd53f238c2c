"""Keys of latent attention put together from their parts: copies, to the bit."""

from __future__ import annotations

import pytest
import torch

import quire as flashinfer
from quire.concat_ops import concat_mla_k

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concat_mla_k_joins_both_parts(dtype, device, rng):
    heads, nope, rope = rng.choice([(128, 128, 64), (3, 40, 8), (1, 1, 1)])
    for tokens in (0, 1, rng.randrange(2, 50)):
        whole = torch.randn(tokens, heads, nope + 24, device=device).to(dtype)
        k_nope, k_rope = whole[..., :nope], torch.randn(tokens, 1, rope, device=device).to(dtype)
        k = torch.full((tokens, heads, nope + rope + 5), torch.nan, device=device).to(dtype)
        spare = k[..., nope + rope :].clone()
        assert concat_mla_k(k[..., : nope + rope], k_nope, k_rope, backend=rng.choice(("default", "cake"))) is None
        expected = torch.cat([k_nope.float(), k_rope.float().expand(-1, heads, -1), spare.float()], -1)
        torch.testing.assert_close(k.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert flashinfer.concat_ops.concat_mla_k is concat_mla_k


def test_compiled_concat_mla_k_equals_eager():
    k_nope, k_rope = torch.randn(5, 4, 16), torch.randn(5, 1, 8)

    def keys(k_nope, k_rope):
        k = k_nope.new_empty(5, 4, 24)
        concat_mla_k(k, k_nope, k_rope)
        return k * 2

    compiled = torch.compile(keys, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(k_nope, k_rope), keys(k_nope, k_rope))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(2, 3, 11)}, r"k has shape \[2, 3, 11\]: it must be \[2, 3, 12\]"),
        ({"k": torch.zeros(2, 12)}, r"k = .* is not supported: a tensor of three dimensions"),
        ({"k_nope": torch.zeros(2, 3, 8).half()}, "k_nope is torch.float16"),
        ({"k_rope": torch.zeros(2, 3, 4)}, r"k_rope has shape \[2, 3, 4\]: it must be \[2, 1, 4\]"),
        ({"k_rope": None}, "k_rope = None"),
        ({"backend": "cuda"}, "backend = 'cuda'"),
    ],
)
def test_concat_mla_k_with_wrong_shapes_is_refused(changes, message):
    given = {"k": torch.zeros(2, 3, 12), "k_nope": torch.zeros(2, 3, 8), "k_rope": torch.zeros(2, 1, 4)}
    with pytest.raises(ValueError, match=message):
        concat_mla_k(**{**given, **changes})
