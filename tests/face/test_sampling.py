"""Filters, softmax and draws against their definition in float64, element by element."""

from __future__ import annotations

import pytest
import torch

import quire
from helpers.interpret import INTERPRETED
from helpers.sampling import exact, rows, weights
from quire import sampling

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABS = (1, 65, 5000) if INTERPRETED else (1, 2, 63, 64, 65, 1000, 20_000)
if torch.cuda.is_available():
    VOCABS += (151_936, 262_144)
KINDS = ("peaked", "flat", "ties")


def strided(x, device, dtype=torch.float32):
    """x in every other row of a wider tensor of NaN."""
    wide = torch.full((2 * len(x), x.shape[1] + 3), torch.nan, dtype=dtype, device=device)
    view = wide[::2, 1 : x.shape[1] + 1]
    return view.copy_(x.to(dtype))


def parameters(rng, count, vocab):
    """Top-k, top-p and min-p of rows, at their ends and between."""
    k = [rng.choice((0, 1, 2, 50, 300, vocab // 2, vocab - 1, vocab, vocab + 7)) for _ in range(count)]
    p = [rng.choice((0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 1.0, 1.5)) for _ in range(count)]
    m = [rng.choice((0.0, 0.01, 0.2, 1.0)) for _ in range(count)]
    return [max(x, 0) for x in k], p, m


def assert_same_row(got, wanted, tolerance):
    """Tokens are kept alike, but for those at a boundary of top-p that rounding moves, and weigh the same."""
    got = got.cpu().double()
    moved = (got > 0) != (wanted > 0)
    assert float(torch.where(moved, torch.maximum(got, wanted), 0).sum()) < 1e-4 + wanted[wanted > 0].min()
    assert int(moved.sum()) <= 2 + len(got) // 1000
    torch.testing.assert_close(got[~moved], wanted[~moved], rtol=tolerance, atol=1e-9)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_with_temperatures_matches_float64(dtype, device):
    for vocab in VOCABS:
        x = strided(rows("peaked", 3, vocab), device, dtype)
        temperatures = torch.tensor([0.3, 1.0, 4.0])
        for temperature in (None, 0.7, temperatures):
            out = sampling.softmax(x, temperature if temperature is not temperatures else temperatures.to(device))
            assert out.dtype == torch.float32
            for i, t in enumerate(temperatures.tolist() if temperature is temperatures else [temperature or 1.0] * 3):
                torch.testing.assert_close(out[i].cpu().double(), weights(x[i], True, t), rtol=2e-5, atol=1e-9)
    cold = sampling.softmax(torch.tensor([[1.0, 3.0, 3.0, 2.0]], device=device), 0.0)
    assert cold.tolist() == [[0, 0.5, 0.5, 0]]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_renorm_probs_match_float64(kind, device, rng):
    for vocab in VOCABS:
        probs = strided(torch.softmax(rows(kind, 4, vocab), -1), device)
        k, p, _ = parameters(rng, 4, vocab)
        by_p = sampling.top_p_renorm_probs(probs, torch.tensor(p, device=device))
        by_k = sampling.top_k_renorm_probs(probs, torch.tensor(k, device=device))
        for i in range(4):
            assert_same_row(by_p[i], exact(probs[i], False, p=p[i]), 2e-4)
            wanted = exact(probs[i], False, k=k[i])
            assert torch.equal(by_k[i].cpu() > 0, wanted > 0)
            torch.testing.assert_close(by_k[i].cpu().double(), wanted, rtol=2e-5, atol=1e-9)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_mask_logits_matches_float64(dtype, device, rng):
    for vocab in VOCABS:
        x = strided(rows(rng.choice(KINDS), 4, vocab), device, dtype)
        x[0, : vocab // 3] = -torch.inf
        # Such a row stays as it is.
        x[3, -1] = rng.choice((torch.inf, torch.nan))
        k, _, _ = parameters(rng, 4, vocab)
        out = sampling.top_k_mask_logits(x, torch.tensor(k, dtype=torch.int32, device=device))
        assert out.dtype == dtype
        for i in range(4):
            row = x[i].cpu().double()
            larger = torch.searchsorted(-row.sort(descending=True).values, -row)
            kept = larger < k[i] if 0 < k[i] < vocab and i < 3 else torch.ones(vocab, dtype=torch.bool)
            wanted = torch.where(kept, row, -torch.inf)
            assert torch.equal(out[i].cpu().double().nan_to_num(7, 8), wanted.nan_to_num(7, 8)), (vocab, k[i])


def test_filters_at_ties_and_bounds_keep_the_documented_tokens():
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.2, 0.1]])

    def kept(out):
        return (out[0] > 0).nonzero()[:, 0].tolist()

    assert kept(sampling.top_k_renorm_probs(probs, 1)) == [1, 2]
    assert kept(sampling.top_k_renorm_probs(probs, 3)) == [1, 2, 3]
    assert kept(sampling.top_k_renorm_probs(probs, 4)) == [0, 1, 2, 3, 4]
    assert kept(sampling.top_p_renorm_probs(probs, 0.0)) == [1, 2]
    assert kept(sampling.top_p_renorm_probs(probs, 0.5)) == [1, 2]
    assert kept(sampling.top_p_renorm_probs(probs, 0.7)) == [1, 2, 3]
    assert kept(sampling.top_p_renorm_probs(probs, 1.0)) == [0, 1, 2, 3, 4]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("joint", [True, False])
def test_samples_with_filters_are_tokens_that_filters_keep(joint, device, rng):
    """Draws of one distribution by many outputs, each with a fraction of its own."""
    outputs = 6 if INTERPRETED else 200
    for vocab in VOCABS:
        logits = strided(rows(rng.choice(KINDS), 3, vocab), device)
        probs = torch.softmax(logits, -1)
        k, p, m = parameters(rng, 3, vocab)
        if joint:
            k = [max(x, 1) for x in k]
        at = torch.randint(3, (outputs,), device=device)
        tensors = [torch.tensor(x, device=device) for x in (k, p)]
        order = {"filter_apply_order": "joint" if joint else "top_k_first", "indices": at}
        drawn = {
            "probs": sampling.top_k_top_p_sampling_from_probs(probs, *tensors, **order),
            "logits": sampling.top_k_top_p_sampling_from_logits(logits, *tensors, **order),
            "k": sampling.top_k_sampling_from_probs(probs, tensors[0], at),
            "p": sampling.top_p_sampling_from_probs(probs, tensors[1], at),
            "min": sampling.min_p_sampling_from_probs(probs, torch.tensor(m, device=device), at),
            "all": sampling.sampling_from_probs(probs, at),
        }
        for name, tokens in drawn.items():
            assert tokens.dtype == at.dtype
            for row in range(3):
                given = {"k": {"k": k[row]}, "p": {"p": p[row]}, "min": {"min_p": m[row]}, "all": {}}
                given = given.get(name, {"k": k[row], "p": p[row], "joint": joint})
                x = logits if name == "logits" else probs
                # Rounding may move the boundary of top-p by a token or, among ties, by a group of them.
                wide = given | {"p": given["p"] * (1 + 1e-5) + 1e-9} if "p" in given else given
                allowed = exact(x[row], name == "logits", **wide) > 0
                mine = tokens[at == row].cpu()
                assert bool(allowed[mine].all()), (name, vocab, given)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_sample_of_rows_that_are_not_finite_marks_them_invalid(device):
    x = torch.randn(6, 300, device=device)
    x[0, 17], x[1] = torch.nan, -torch.inf
    x[2, 5], x[3, :299] = torch.inf, -torch.inf
    tokens, valid = sampling.sample(x, 1.0, 20, 0.9)[:2]
    assert valid.tolist() == [False, False, False, True, True, True]
    assert tokens[:4].tolist() == [0, 0, 0, 299]
    greedy = sampling.sample(x, 0.0)
    assert torch.equal(greedy.valid, valid)
    assert torch.equal(greedy.tokens[3:].long(), x[3:].argmax(-1))
    # A fraction above 1 keeps the most likely token.
    for min_p in (1.5, torch.full((6,), 1.5, device=device)):
        assert torch.equal(sampling.sample(x, 1.0, min_p=min_p).tokens[3:].long(), x[3:].argmax(-1))
    probs = torch.softmax(x, -1)
    probs[1], probs[2] = 0, -1
    _, valid = sampling.top_p_sampling_from_probs(probs, 0.5, return_valid=True)
    assert valid.tolist() == [False, False, False, True, True, True]
    with pytest.raises(ValueError, match="probs contains NaN"):
        sampling.sampling_from_probs(probs, check_nan=True)
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits = torch.randn(3, 8, device=device)
        assert sampling.top_k_top_p_sampling_from_logits(logits, 3, 0.5, check_nan=True).shape == (3,)
        logits[1] = bad
        with pytest.raises(ValueError, match="logits contains NaN"):
            sampling.top_k_top_p_sampling_from_logits(logits, 3, 0.5, check_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_of_no_rows_is_empty(device):
    x, ids = torch.randn(0, 9, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert sampling.softmax(x).shape == (0, 9)
    assert sampling.sampling_from_probs(x).shape == (0,)
    assert sampling.top_k_renorm_probs(x, 3).shape == (0, 9)
    assert [y.shape for y in sampling.sample(x, num_logprobs=2)] == [(0,), (0,), (0,), (0, 2), (0, 2)]
    drafts = torch.zeros(0, 2, 9, device=device), ids, torch.zeros(0, 3, 9, device=device)
    assert [y.shape for y in sampling.chain_speculative_sampling(*drafts)] == [(0, 3), (0,), (0,)]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_with_temperature_0_takes_the_first_of_the_most_likely_tokens(dtype, device, rng):
    """Rows in any number of parts, with ties within a part and across parts, and rows without a most likely token."""
    for vocab in (*VOCABS, 4096, 4097, rng.randint(2, 9000)):
        x = torch.randn(7, vocab)
        x[1] = rng.choice((0.0, -3.5))
        x[2, rng.randrange(vocab) :: max(vocab // 3, 1)] = 9.0
        x[3] = -torch.inf
        x[4, rng.randrange(vocab)] = torch.nan
        x[5, rng.randrange(vocab)] = torch.inf
        x[6], x[6, rng.randrange(vocab)] = -torch.inf, -2.0
        for given in (strided(x, device, dtype), x.to(dtype).to(device)):
            drawn = sampling.sample(given, 0.0)
            wide = given.double().cpu().numpy()
            assert drawn.tokens.dtype == torch.int32
            assert drawn.valid.tolist() == [True, True, True, False, False, False, True]
            assert drawn.tokens.tolist() == [int(wide[i].argmax()) if i in (0, 1, 2, 6) else 0 for i in range(7)]
    nothing = sampling.sample(torch.zeros(0, 5, dtype=dtype, device=device), 0.0)
    assert nothing.tokens.shape == nothing.valid.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, r"logits has shape \[3\]: it must be \[any, any\]"),
        ({"logits": torch.zeros(2, 4).double()}, r"logits is torch.float64: it must be float32, bfloat16"),
        ({"logits": torch.zeros(2, 8)[:, ::2]}, r"logits has strides .* the last one must be 1"),
        ({"logits": torch.zeros(2, 0)}, r"logits.shape = \[2, 0\] .* at least one token"),
        ({"logits": torch.zeros(2, 4, requires_grad=True)}, r"logits requires grad"),
        ({"temperature": -1.0}, r"temperature = -1.0 .* at least 0"),
        ({"temperature": float("inf")}, r"temperature = inf .* a finite number"),
        ({"temperature": torch.ones(3)}, r"batch size mismatch, temperature has 3 values for 2 rows"),
        ({"temperature": torch.ones(2).int()}, r"temperature.dtype = torch.int32 .* floating-point"),
        ({"top_k": 0}, r"top_k = 0 .* at least 1"),
        ({"top_k": 2.0}, r"top_k = 2.0 .* an integer"),
        ({"top_k": torch.ones(2)}, r"top_k.dtype = torch.float32 .* torch.int32 or torch.int64"),
        ({"top_p": -0.1}, r"top_p = -0.1"),
        ({"min_p": float("nan")}, r"min_p = nan"),
        ({"top_p": torch.ones(2, 4)}, r"top_p: Expected a 1D tensor .*; got a 2D tensor"),
        ({"top_p": torch.ones(())}, r"top_p: Expected a 1D tensor .*; got a 0-dimensional tensor"),
        ({"seed": 2**64}, r"seed = 18446744073709551616 .* 2\*\*64 - 1"),
        ({"seed": torch.zeros(3).long()}, r"seed.shape = \[3\] .* \[1\] or \[2\]"),
        ({"seed": torch.zeros(2).int()}, r"seed.dtype = torch.int32"),
        ({"offset": 3}, r"offset = 3 .* None without a seed"),
        ({"num_logprobs": 5}, r"num_logprobs = 5 .* 0 to vocab = 4"),
    ],
)
def test_sample_with_wrong_arguments_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sampling.sample(**{"logits": torch.zeros(2, 4), **change})


def test_sampling_functions_of_flashinfer_with_wrong_arguments_are_refused():
    probs = torch.full((2, 4), 0.25)
    with pytest.raises(ValueError, match=r"filter_apply_order = 'k' .* top_k_first or joint"):
        quire.top_k_top_p_sampling_from_probs(probs, 1, 1.0, filter_apply_order="k")
    with pytest.raises(ValueError, match=r"indices = .values from 0 to 2. .* 0 to 1"):
        quire.sampling_from_probs(probs, indices=torch.tensor([0, 2]))
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"target_probs has shape \[2, 4, 4\]: it must be \[2, 3, 4\]"):
        quire.chain_speculative_sampling(torch.zeros(2, 2, 4), ids, torch.zeros(2, 4, 4))


def test_sampling_with_integer_tensors_as_parameters_equals_floats(rng):
    """As for FlashInfer, whose callers give top_p and min_p so; a temperature must have a floating-point type."""
    probs, ones = torch.rand(3, 50).softmax(-1), torch.ones(3, dtype=torch.int32)
    seed = torch.arange(3)
    for draw in (sampling.top_p_sampling_from_probs, sampling.min_p_sampling_from_probs):
        same = [draw(probs, value, seed=seed, offset=0) for value in (ones, ones.float(), 1.0)]
        assert torch.equal(same[0], same[1])
        assert torch.equal(same[0], same[2])
    with pytest.raises(ValueError, match=r"temperature\.dtype = torch.int32"):
        sampling.softmax(probs, temperature=ones)
