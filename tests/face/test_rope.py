"""Rotary position embedding against its definition in complex float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import quire
from helpers.rotary import turned
from helpers.rounding import check_rounded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = 3e-7  # of float32
LLAMA31 = {"rope_scale": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "context": 8192}


def frequencies(rotary_dim, rope_scale=1.0, rope_theta=1e4, low_freq_factor=1.0, high_freq_factor=4.0, context=None):
    """Radians per position of each pair, in float64."""
    result = []
    for j in range(rotary_dim // 2):
        frequency = rope_theta ** (-2 * j / rotary_dim)
        seen = frequency * context / (2 * math.pi) if context else 0.0
        if seen <= low_freq_factor:
            frequency /= rope_scale
        elif seen < high_freq_factor:
            kept = (seen - low_freq_factor) / (high_freq_factor - low_freq_factor)
            frequency *= kept + (1 - kept) / rope_scale
        result.append(frequency)
    return torch.tensor(result, dtype=torch.float64)


def heads(rng, tokens, dtype, device, head_dim):
    """q and k, sliced from one packed tensor whose other elements are NaN."""
    (q_heads, k_heads), spare = rng.choice([(4, 2), (7, 1), (3, 5), (16, 16)]), rng.choice((0, 3, 8))
    packed = torch.full((tokens, q_heads + k_heads + 1, head_dim + spare), torch.nan, dtype=dtype, device=device)
    q, k = packed[:, :q_heads, :head_dim], packed[:, -k_heads:, :head_dim]
    return q.copy_(torch.randn(q.shape)), k.copy_(torch.randn(k.shape))


def check_turned(call, inplace, q, k, angles, interleave):
    """Check that call(q, k) returns rotated tensors or, in place, rotates q and k, and changes nothing else."""
    expected = [turned(x, angles, interleave) for x in (q, k)]
    before = [x.clone() for x in (q, k)]
    results = call(q, k)
    if inplace:
        assert results is None
        results = (q, k)
    else:
        assert torch.equal(q, before[0])
        assert torch.equal(k, before[1])
    for result, exact, x in zip(results, expected, before, strict=True):
        check_rounded(result, exact, x.dtype, PRECISION)
        rest = slice(2 * angles.shape[1], None)
        assert torch.equal(result[..., rest], x[..., rest]), "what is not rotated stays as it is"


@pytest.mark.interpret(dtype=[torch.float32], form=["indptr"], llama31=[True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("llama31", [False, True])
@pytest.mark.parametrize("form", ["indptr", "pos_ids"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_with_computed_angles_matches_float64(dtype, form, llama31, interleave, inplace, device, rng):
    head_dim = rng.choice((16, 64, 80, 96))
    rotary_dim = rng.choice((2, head_dim // 2 - head_dim // 2 % 2, head_dim, None))
    lengths = torch.tensor([rng.choice((0, 1, 5)) for _ in range(4)] + [3])
    offsets = torch.tensor([rng.choice((0, 7, 60_000, 10**6)) for _ in lengths])
    positions = torch.cat([torch.arange(n) + o for n, o in zip(lengths, offsets, strict=True)])
    kind = rng.choice((torch.int32, torch.int64))
    indptr = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(kind)
    places = (indptr, offsets.to(kind)) if form == "indptr" else (positions.to(kind),)
    places = [x.to(device) for x in places]
    options = dict(LLAMA31, rope_scale=rng.choice((8.0, 32.0))) if llama31 else {"rope_scale": rng.choice((1.0, 2.5))}
    given = {"old_context_len" if name == "context" else name: value for name, value in options.items()}
    name = "apply_" + "llama31_" * llama31 + "rope" + "_pos_ids" * (form == "pos_ids") + "_inplace" * inplace
    q, k = heads(rng, len(positions), dtype, device, head_dim)
    angles = positions[:, None] * frequencies(rotary_dim or head_dim, **options)

    def call(q, k):
        return getattr(quire, name)(q, k, *places, rotary_dim=rotary_dim, interleave=interleave, **given)

    check_turned(call, inplace, q, k, angles, interleave)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("rows", [False, True], ids=["heads", "rows"])
def test_rope_with_a_cos_sin_cache_matches_float64(rows, is_neox, inplace, device, rng):
    head_dim, dtype = rng.choice((24, 64, 80)), rng.choice(DTYPES)
    rotary_dim = rng.choice((2, head_dim - 8, head_dim))
    angles = torch.rand(50, rotary_dim // 2, dtype=torch.float64) * 7
    cache = torch.cat([angles.cos(), angles.sin()], 1).float().to(device)
    positions = torch.randint(50, (11,), dtype=rng.choice((torch.int32, torch.int64)))
    q, k = heads(rng, 11, dtype, device, head_dim)
    call = quire.apply_rope_with_cos_sin_cache_inplace if inplace else quire.apply_rope_with_cos_sin_cache

    def as_heads(q, k):
        if not rows:
            return call(positions.to(device), q, k, head_dim, cache, is_neox)
        wide = [x.flatten(1) for x in (q, k)]
        results = call(positions.to(device), *wide, head_dim, cache, is_neox) or wide
        assert all(x.shape == y.shape for x, y in zip(results, wide, strict=True))
        results = [x.view(y.shape) for x, y in zip(results, (q, k), strict=True)]
        return [x.copy_(y) for x, y in zip((q, k), results, strict=True)] and None if inplace else results

    check_turned(as_heads, inplace, q, k, angles[positions.long()], not is_neox)


@pytest.mark.parametrize("device", DEVICES)
def test_rope_without_options_has_the_defaults_of_llama(device):
    q, k, positions = torch.randn(5, 2, 32, device=device), torch.randn(5, 1, 32, device=device), torch.arange(5)
    for call, options in ((quire.apply_rope_pos_ids, {}), (quire.apply_llama31_rope_pos_ids, LLAMA31)):
        angles = (positions * 5000)[:, None] * frequencies(32, **options)
        check_turned(lambda q, k, call=call: call(q, k, positions.to(device) * 5000), False, q, k, angles, False)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_rope_of_far_positions_is_as_exact_as_of_near_ones(device):
    """Turning q and k by the same distance more does not change their product."""
    positions = torch.tensor([0, 1, 99, 65_537, 2**31 - 1, -5, 2**40], device=device)
    q, k = torch.randn(7, 1, 64, device=device), torch.randn(7, 1, 64, device=device)
    a, b = quire.apply_rope_pos_ids(q, k, positions)
    torch.testing.assert_close((a * b).sum(-1), (q * k).sum(-1), rtol=1e-5, atol=1e-5)
    near, _ = quire.apply_rope_pos_ids(q, k, positions.clamp(0, 99), rope_theta=1e4, rope_scale=1 / (2 * math.pi))
    angles = positions.cpu().clamp(0, 99)[:, None] * frequencies(64) * (2 * math.pi)
    check_rounded(near, turned(q, angles, False), torch.float32, PRECISION)


@pytest.mark.parametrize("device", DEVICES)
def test_rope_of_many_tokens_and_heads_matches_float64(device, rng):
    """More than one program has to itself, on a GPU."""
    tokens = 1100 if device == "cuda" else 40
    q, k = torch.randn(tokens, 40, 128, device=device), torch.randn(tokens, 8, 128, device=device)
    positions = torch.randint(100_000, (tokens,))
    angles = positions[:, None] * frequencies(96)
    call = rng.choice((quire.apply_rope_pos_ids, quire.apply_rope_pos_ids_inplace))
    inplace = call is quire.apply_rope_pos_ids_inplace
    check_turned(lambda q, k: call(q, k, positions.to(device), 96, True), inplace, q, k, angles, True)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_rope_of_tokens_of_no_request_copies_them(device):
    q, k = torch.randn(9, 2, 16, device=device), torch.randn(9, 1, 16, device=device)
    indptr, offsets = torch.tensor([2, 4, 4, 7], device=device), torch.tensor([5, 6, 7], device=device)
    angles = torch.tensor([0, 0, 5, 6, 7, 8, 9, 0, 0])[:, None] * frequencies(16)
    check_turned(lambda q, k: quire.apply_rope(q, k, indptr, offsets), False, q, k, angles, False)
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    same = quire.apply_rope(q, k, nobody, nobody[:0])
    assert torch.equal(same[0], q)


@pytest.mark.parametrize("device", DEVICES)
def test_rope_of_no_tokens_is_empty(device):
    q, k, nothing = torch.randn(0, 2, 16, device=device), torch.randn(0, 1, 16, device=device), torch.arange(0)
    out = quire.apply_rope_pos_ids(q, k, nothing.to(device))
    assert [x.shape for x in out] == [q.shape, k.shape]
    out = quire.apply_rope_with_cos_sin_cache(nothing.to(device), q.flatten(1), k, 16, torch.ones(3, 8, device=device))
    assert [x.shape for x in out] == [(0, 32), k.shape]


@pytest.mark.gpu
def test_rope_of_positions_outside_the_cache_on_a_gpu_is_nan():
    q, cache = torch.randn(4, 2, 16, device="cuda"), torch.ones(3, 8, device="cuda")
    positions = torch.tensor([0, 3, -1, 2], device="cuda")
    out, _ = quire.apply_rope_with_cos_sin_cache(positions, q, q, 16, cache)
    assert out[..., :8].isnan().all(-1).all(-1).tolist() == [False, True, True, False]
    assert torch.equal(out[..., 8:], q[..., 8:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_rope_equals_eager(inplace, device):
    def step(q, k, positions, cache):
        q, k = q * 2, k * 2
        if inplace:
            quire.apply_rope_pos_ids_inplace(q, k, positions)
            quire.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 16, cache)
            return q, k
        return quire.apply_rope_with_cos_sin_cache(positions, *quire.apply_rope_pos_ids(q, k, positions), 16, cache)

    torch.compiler.reset()
    args = [torch.randn(6, 2, 16), torch.randn(6, 1, 16), torch.arange(6), torch.randn(9, 8)]
    args = [x.to(device) for x in args]
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(*args), step(*args), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_rope_with_other_shapes_and_bases_is_not_recompiled(device):
    """One graph serves all shapes and rotary bases of q and k that are views of one packed tensor."""

    def step(qkv, positions, theta):
        q, k, v = qkv.split([32, 16, 16], -1)
        q, k = q.unflatten(-1, (-1, 16)), k.unflatten(-1, (-1, 16))
        return *quire.apply_llama31_rope_pos_ids(q, k, positions, rope_theta=theta), v * 2

    def agree(compiled, tokens, theta):
        args = torch.randn(tokens, 64, device=device), torch.arange(tokens, device=device)
        torch.testing.assert_close(compiled(*args, theta), step(*args, theta), rtol=1e-6, atol=1e-6)

    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    whole = torch.compile(lambda x, i, _: step(x, i, 1e4), fullgraph=True, dynamic=True, backend=counter)
    for tokens in (6, 9, 40, 3):
        agree(whole, tokens, 1e4)
    assert counter.frame_count == 1
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    for theta in (1e4, 5e5, 77.0):
        agree(whole, 6, theta)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_rotate_passes_opcheck(inplace, device):
    q, k = torch.randn(6, 2, 16, device=device), torch.randn(6, 1, 16, device=device)
    inputs = (None, None) if inplace else (torch.randn_like(q), torch.randn_like(k))
    positions, cache = torch.arange(6, device=device), torch.randn(6, 8, device=device)
    numbers = (8, True, 1.0, 1e4, 1.0, 4.0, 0.0)
    torch.library.opcheck(torch.ops.quire.rotate.default, (q, k, *inputs, positions, None, None, *numbers))
    torch.library.opcheck(torch.ops.quire.rotate.default, (q, k, *inputs, positions, None, cache, *numbers))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 16)}, r"q has shape \[3, 16\]"),
        ({"q": torch.zeros(3, 2, 16, dtype=torch.float64)}, r"q is torch.float64: it must be float32, bfloat16"),
        ({"q": torch.zeros(3, 2, 32)[..., ::2]}, r"q has strides .* the last one must be 1"),
        ({"k": torch.zeros(2, 1, 16)}, r"k has shape \[2, 1, 16\]: it must be \[3, any, 16\]"),
        ({"k": torch.zeros(3, 1, 8)}, r"k has shape \[3, 1, 8\]: it must be \[3, any, 16\]"),
        ({"k": torch.zeros(3, 1, 16, dtype=torch.float16)}, r"k is torch.float16: it must be torch.float32"),
        ({"indptr": torch.tensor([0, 3, 3])}, r"indptr has shape \[3\]: it must be \[2\]"),
        ({"indptr": torch.tensor([0, 4])}, r"indptr\[-1\] = 4 is beyond the number of tokens = 3"),
        (
            {"indptr": torch.tensor([0, 3, 2]), "offsets": torch.zeros(2).int()},
            r"indptr falls at request 1, from 3 to 2",
        ),
        ({"indptr": torch.tensor([-1, 3])}, r"indptr\[0\] = -1"),
        ({"offsets": torch.zeros(1)}, r"offsets is torch.float32: it must be torch.int32"),
        ({"rotary_dim": 7}, r"rotary_dim = 7 .* even number, 2 to head_dim = 16"),
        ({"rotary_dim": 18}, r"rotary_dim = 18"),
        ({"rotary_dim": 0}, r"rotary_dim = 0"),
        ({"rope_scale": 0.0}, r"rope_scale = 0.0"),
        ({"rope_theta": math.inf}, r"rope_theta = inf"),
        ({"high_freq_factor": 1.0}, r"high_freq_factor = 1.0 .* more than low_freq_factor = 1"),
        ({"old_context_len": -1}, r"old_context_len = -1"),
    ],
)
def test_rope_with_wrong_arguments_is_refused_and_writes_nothing(change, message):
    given = {"q": torch.ones(3, 2, 16), "k": torch.ones(3, 1, 16), "indptr": torch.tensor([0, 3])}
    given = {**given, "offsets": torch.ones(1).int(), **change}
    with pytest.raises(ValueError, match=message):
        quire.apply_llama31_rope_inplace(**given)
    for x in (given["q"], given["k"]):
        assert (x == x.flatten()[0]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([0, 5, 1])}, r"positions\[1\] = 5 is out of range: .* rows for 0 to 4"),
        ({"positions": torch.tensor([0, 1, -1])}, r"positions\[2\] = -1"),
        ({"positions": torch.arange(2)}, r"positions has shape \[2\]: it must be \[3\]"),
        ({"cos_sin_cache": torch.ones(5, 8).half()}, r"cos_sin_cache is torch.float16: it must be torch.float32"),
        ({"cos_sin_cache": torch.ones(5, 24)}, r"rotary_dim = 24"),
        ({"cos_sin_cache": torch.ones(5)}, r"cos_sin_cache has shape \[5\]"),
        ({"head_size": 12}, r"query has shape \[3, 32\]: it must be \[tokens, heads \* 12\]"),
        ({"head_size": 0}, r"head_size = 0"),
        ({"key": torch.ones(3, 2, 8)}, r"key has shape \[3, 2, 8\]"),
    ],
)
def test_rope_with_a_wrong_cos_sin_cache_is_refused(change, message):
    given = {"positions": torch.arange(3), "query": torch.ones(3, 32), "key": torch.ones(3, 16), "head_size": 16}
    given = {**given, "cos_sin_cache": torch.ones(5, 8), **change}
    with pytest.raises(ValueError, match=message):
        quire.apply_rope_with_cos_sin_cache_inplace(**given)
    assert (given["query"] == 1).all()
