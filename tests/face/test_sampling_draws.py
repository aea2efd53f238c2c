"""Distributions of draws, what a seed promises, and an engine's whole batch."""

from __future__ import annotations

import pytest
import torch

from helpers.sampling import ALARM, exact, p_value, rows
from quire import sampling
from quire.kernels import sampling as kernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def passes(record_property):
    """Check that draws have a distribution; the p-value is kept in the report, and printed if it is too small."""

    def check(tokens, expected, what):
        p = p_value(tokens, expected)
        record_property(f"p-value of {what}", p)
        assert p > ALARM, f"{what}: p-value {p:.3g} of {len(tokens)} draws"

    return check


def test_uniform_equals_the_known_answers_of_philox():
    """Known answers of Philox4x32-10 from its authors' Random123: of zeros, of ones, and of the digits of pi."""
    answers = {
        (0, 0, 0, 0): (0x6627E8D5, 0xE169C58D),
        (-1, -1, 0xFFFFFFFF, 0xFFFFFFFF): (0x408F276D, 0x41C83B0E),
        (0x299F31D0A4093822, 0x85A308D3243F6A88 - 2**64, 0x13198A2E, 0x03707344): (0xD16CFE09, 0x94FDCCEB),
    }
    for (seed, offset, subsequence, draw), (a, b) in answers.items():
        u = kernels.uniform(*(torch.tensor([x]) for x in (seed, offset, subsequence)), draw)
        assert float(u) == ((a << 21) | (b >> 11)) / 2**53


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 2, 30, 1000, 32_000, 151_936, 262_144])
def test_samples_have_the_distribution_of_their_filters(vocab, device, passes, rng):
    count = 20_000
    x = rows(rng.choice(("peaked", "flat", "ties")), 1, vocab).to(device)
    at = torch.zeros(count, dtype=torch.int32, device=device)
    probs = torch.softmax(x, -1)
    k, p, m = rng.choice((1, 2, 40, 1500)), rng.choice((0.3, 0.8, 0.95)), rng.choice((0.02, 0.3))
    draws = {
        "probs": (sampling.sampling_from_probs(probs, at), exact(probs[0], False)),
        "logits": (sampling.sampling_from_logits(x, at), exact(x[0], True)),
        f"top-k {k}": (sampling.top_k_sampling_from_probs(probs, k, at), exact(probs[0], False, k=k)),
        f"top-p {p}": (sampling.top_p_sampling_from_probs(probs, p, at), exact(probs[0], False, p=p)),
        f"min-p {m}": (sampling.min_p_sampling_from_probs(probs, m, at), exact(probs[0], False, min_p=m)),
        f"top-k {k} first, top-p {p}": (
            sampling.top_k_top_p_sampling_from_logits(x, k, p, at),
            exact(x[0], True, k=k, p=p, joint=False),
        ),
        f"joint top-k {k} and top-p {p}": (
            sampling.top_k_top_p_sampling_from_probs(probs, k, p, at, "joint"),
            exact(probs[0], False, k=k, p=p),
        ),
    }
    for what, (tokens, expected) in draws.items():
        moved = 1e-3  # rounding may move a boundary of top-p by a token
        outside = expected[tokens.long().cpu()] == 0
        assert float(outside.double().mean()) <= moved, what
        passes(tokens[~outside.to(device)], expected, f"{what}, vocabulary {vocab}")


@pytest.mark.parametrize("device", DEVICES)
def test_sample_of_rows_with_their_own_seeds_has_the_distribution(device, passes):
    """Every row of `sample` with a seed and an offset of its own, of which either may count up."""
    count, vocab = 30_000, 50
    x = torch.randn(vocab) * 2
    seeds, offsets = torch.arange(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    wide = x.to(device).expand(count, -1).contiguous()
    for a, b in ((seeds, offsets), (offsets + 7, seeds)):
        out = sampling.sample(wide, 0.7, 20, 0.9, 0.05, seed=a, offset=b)
        expected = exact(x, True, k=20, p=0.9, min_p=0.05, temperature=0.7, joint=False)
        passes(out.tokens, expected, "sample")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 3])
def test_speculative_sampling_has_the_targets_distribution(count, device, passes):
    """Drafts are drawn from the draft's distribution; the tokens emitted have the target's."""
    batch, vocab = 30_000, 12
    draft = torch.softmax(torch.randn(1, count, vocab), -1)
    target = torch.softmax(torch.randn(1, count + 1, vocab), -1)
    ids = torch.multinomial(draft[0], batch, replacement=True).T.int().contiguous()
    wide = [x.expand(batch, -1, -1).contiguous().to(device) for x in (draft, target)]
    total = torch.ones(batch, dtype=torch.int32, device=device)
    out, accepted, emitted = sampling.chain_speculative_sampling(wide[0], ids.to(device), wide[1], total)
    out, accepted, emitted = out.cpu().long(), accepted.cpu() - 1, emitted.cpu()
    there = torch.arange(count + 1) <= emitted[:, None]
    assert torch.equal(out >= 0, there)
    drafted = torch.arange(count) < emitted[:, None]
    assert torch.equal(out[:, :count][drafted], ids.long()[drafted])
    assert bool((accepted >= emitted).all())
    assert int(total.sum()) == int(accepted.sum()) + batch
    agreement = torch.minimum(draft[0].double(), target[0, :count].double()).sum()
    assert abs(float(accepted.double().mean() - agreement)) < 6 * (count / batch) ** 0.5
    for i in range(count + 1):
        passes(out[there[:, i], i], target[0, i].double(), f"token {i} of {count} drafts")


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_sample_of_a_row_alone_equals_that_in_a_batch(device):
    for vocab in (33, 4500):
        x = rows("peaked", 7, vocab).to(device)
        seed = torch.randint(-(2**62), 2**62, (7,), device=device)
        offset = torch.arange(7, device=device) * 2**33
        temperatures = torch.rand(7, device=device) * 2
        whole = sampling.sample(x, temperatures, 30, 0.95, seed=seed, offset=offset).tokens
        assert torch.equal(whole, sampling.sample(x, temperatures, 30, 0.95, seed=seed, offset=offset).tokens)
        order = torch.randperm(7, device=device)
        mixed = sampling.sample(x[order], temperatures[order], 30, 0.95, seed=seed[order], offset=offset[order]).tokens
        assert torch.equal(mixed, whole[order])
        for i in range(7):
            one = slice(i, i + 1)
            alone = sampling.sample(x[one], temperatures[one], 30, 0.95, seed=seed[one], offset=offset[one]).tokens
            assert alone == whole[i]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_sample_with_a_seed_has_one_token_on_all_devices(device, monkeypatch):
    """Triton's tokens are those of the CPU's path, but where a number falls within rounding of a boundary."""
    differ = total = 0
    for vocab in (1, 40, 3000, 10_000):
        x = rows("flat", 8, vocab) * 2
        seed, k = torch.randint(2**62, (8,)), torch.tensor([0, 1, 5, 60, 100, 1500, 7, 0])
        p, temperatures = torch.rand(8), torch.rand(8) * 2 * (torch.arange(8) > 0)
        given = (temperatures, k, p), {"seed": seed, "offset": seed % 5}
        results = []
        for where in (device, "cpu"):
            if where == "cpu" and results:
                monkeypatch.setenv("TRITON_INTERPRET", "0")
            to = [[y.to(where) for y in given[0]], {name: y.to(where) for name, y in given[1].items()}]
            results.append(sampling.sample(x.to(where), *to[0], **to[1]).tokens.cpu())
        monkeypatch.undo()
        differ, total = differ + int((results[0] != results[1]).sum()), total + 8
    assert differ <= 1, f"{differ} of {total} tokens differ"


@pytest.mark.parametrize("device", DEVICES)
def test_samples_with_one_seed_differ_and_repeat_with_a_generator(device):
    probs = torch.full((64, 1000), 1e-3, device=device)
    one = sampling.sampling_from_probs(probs, seed=3, offset=1)
    assert len(one.unique()) > 40
    assert torch.equal(one, sampling.sampling_from_probs(probs, seed=3, offset=1))
    assert not torch.equal(one, sampling.sampling_from_probs(probs, seed=3, offset=2))
    as_tensors = {
        "seed": torch.tensor([3], device=device),
        "offset": torch.tensor([1], device=device).view(torch.uint64),
    }
    assert torch.equal(one, sampling.sampling_from_probs(probs, **as_tensors))
    generator = torch.Generator(device)
    pair = [sampling.sampling_from_probs(probs, generator=generator.manual_seed(5)) for _ in range(2)]
    assert torch.equal(*pair)
    assert not torch.equal(pair[0], sampling.sampling_from_probs(probs, generator=generator))


def penalised(x, tokens, prompt, repetition, presence, frequency):
    """A row's logits in float64, token by token."""
    x = x.cpu().double().clone()
    for token in set(tokens):
        value = x[token] / repetition if x[token] > 0 else x[token] * repetition
        times = tokens[prompt:].count(token)
        x[token] = value - (presence + frequency * times if times else 0)
    return x


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_match_float64(dtype, device, rng):
    vocab, longest = 60, 2500
    x = torch.randn(5, vocab, device=device).to(dtype)
    x[0, 3] = -torch.inf
    tokens = torch.randint(vocab, (7, longest), dtype=torch.int32)
    tokens[:, 5:] = torch.where(torch.rand(7, longest - 5) < 0.5, tokens[:, 4:-1], tokens[:, 5:])
    tokens[4, 2], lens = vocab + 5, [longest, 0, 20, 8, 3]  # a token of no vocabulary
    prompts, slots = [7, 0, 20, 3, 2], [6, 0, 3, 2, 4]
    repetition = [1.5, 2.0, 0.5, 1.0, 1.2]
    given = {"slots": slots, "prompt_lens": prompts, "lens": lens, "repetition": repetition}
    given = {name: torch.tensor(value, device=device) for name, value in given.items()}
    penalties = sampling.Penalties(tokens.to(device), **given, presence=0.25, frequency=0.01)
    out = penalties.apply(x)
    assert out.dtype == torch.float32
    for i, slot in enumerate(slots):
        used = [t for t in tokens[slot, : lens[i]].tolist() if t < vocab]
        wanted = penalised(x[i], used, prompts[i], repetition[i], 0.25, 0.01)
        torch.testing.assert_close(out[i].cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    drawn = sampling.sample(x, 0.0, penalties=penalties)
    assert torch.equal(drawn.tokens.long(), out.argmax(-1))

    # Penalties whose parts are beyond float32 leave finite logits finite.
    most = torch.finfo(torch.float32).max
    extreme = sampling.Penalties(tokens.to(device), **{**given, "repetition": 1e-42}, presence=most, frequency=most)
    assert torch.equal(extreme.apply(x).isfinite(), x.isfinite())


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_sample_with_num_logprobs_matches_log_softmax(device):
    for vocab in (5, 700):
        x = (torch.randn(4, vocab, device=device) * 2).round() / 2  # with ties
        x[1, 3:] = -torch.inf
        out = sampling.sample(x, torch.tensor([0.0, 1.0, 1.0, 0.3], device=device), num_logprobs=5)
        exact_rows = torch.log_softmax(x.double(), -1)
        wanted = exact_rows.sort(dim=-1, descending=True, stable=True)
        torch.testing.assert_close(out.top_logprobs.double(), wanted.values[:, :5], rtol=1e-5, atol=2e-5)
        ids = wanted.indices[:, :5].masked_fill(wanted.values[:, :5] == -torch.inf, -1)
        assert torch.equal(out.top_tokens.long(), ids)
        mine = exact_rows.gather(1, out.tokens.long()[:, None])[:, 0]
        torch.testing.assert_close(out.logprobs.double(), mine, rtol=1e-5, atol=2e-5)
        only = sampling.sample(x, 0.0, num_logprobs=0)
        assert only.top_tokens.shape == (4, 0)
        again = sampling.token_logprobs(x, out.tokens, 5)
        assert all(torch.equal(mine, its) for mine, its in zip(again, out[2:], strict=True))
        unknown = torch.tensor([0, -1, vocab, 1], dtype=torch.int32, device=device)
        assert sampling.token_logprobs(x, unknown)[0].isneginf().tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match="num_logprobs"):
        sampling.token_logprobs(x, out.tokens, vocab + 1)
    with pytest.raises(ValueError, match="tokens"):
        sampling.token_logprobs(x, out.tokens[:3])


def batch(device, vocab=500):
    """Arguments of a batch of greedy and sampled rows with everything."""
    tensors = {
        "temperature": torch.tensor([0.0, 0.8, 1.0, 2.0]), "top_k": torch.tensor([0, 40, 0, 3]),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1.0]), "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0]),
        "seed": torch.arange(4), "offset": torch.arange(4),
    }  # fmt: skip
    lens = torch.tensor([3, 9, 1, 6], device=device)
    listed = torch.randint(vocab, (4, 12), dtype=torch.int32, device=device)
    penalties = sampling.Penalties(listed, lens // 2, lens, repetition=1.2, frequency=0.3)
    return {name: x.to(device) for name, x in tensors.items()} | {"penalties": penalties, "num_logprobs": 3}


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_sampling_equals_eager(device):
    def step(x, probs, arguments):
        kept = sampling.top_k_mask_logits(sampling.softmax(x, 0.5).log(), 30)
        tokens = sampling.top_p_sampling_from_probs(probs, 0.9, seed=arguments["seed"], offset=arguments["offset"])
        drafts = sampling.chain_speculative_sampling(
            probs[:, None], tokens[:, None], probs[:, None].repeat(1, 2, 1), seed=5
        )
        return kept, sampling.top_p_renorm_probs(probs, 0.5), tokens, *drafts, *sampling.sample(x, **arguments)

    torch.compiler.reset()
    x = torch.randn(4, 500, device=device)
    arguments = batch(device)
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    probs = torch.softmax(x, -1)
    for got, wanted in zip(whole(x, probs, arguments), step(x, probs, arguments), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_captured_sample_replayed_reads_changed_buffers():
    x, arguments = torch.randn(4, 151_936, device="cuda") * 3, batch("cuda", 151_936)
    for _ in range(2):
        sampling.sample(x, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sampling.sample(x, **arguments)
    for turn in range(4):
        x.normal_().mul_(3)
        arguments["offset"] += 1
        arguments["temperature"].copy_(torch.rand(4) * (torch.arange(4) != turn))
        graph.replay()
        for got, wanted in zip(out, sampling.sample(x, **arguments), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_operations_pass_opcheck(device):
    x, tokens = torch.randn(3, 90, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    valid, seed = torch.zeros(3, dtype=torch.bool, device=device), torch.arange(3, device=device)
    none = (None,) * 5
    numbers = (1.0, 5, 0.9, 0.0, 0, 0, True, True, False)
    torch.library.opcheck(torch.ops.quire.sample_rows.default, (tokens, valid, x, *none, seed, None, *numbers))
    given = (torch.empty_like(x), x, None, None, None, 1.0, 5, 1.0, "mask")
    torch.library.opcheck(torch.ops.quire.transform_rows.default, given)
