"""Sampling and filtering of rows of logits or probabilities: by torch on the CPU, by Triton kernels on a GPU.

The weight of a token is its probability or, of logits, ``exp((x - max) / temperature)``. A token x is kept if fewer
than top_k tokens are larger, if the tokens that are larger weigh less than top_p, and if it weighs at least min_p times
what the largest weighs: tokens that are equal are kept or dropped together. Of the tokens kept, in the order of the
vocabulary, the one is drawn at which the running sum of weights exceeds u times their sum. u is a float64 of 53 bits
from `uniform`, and the same on all devices.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import on_triton, operation

_WORD = 0xFFFFFFFF


def uniform(seed: Tensor, offset: Tensor, subsequence: Tensor, draw: int = 0) -> Tensor:
    """Float64 numbers in [0, 1) from Philox4x32-10 (Salmon et al., SC 2011) in integer arithmetic.

    The 64 bits of seed are the key. The counter is the 64 bits of offset, then subsequence and draw of 32 bits each.
    All tensors are int64 and of one shape. The first 53 bits of the output are the number's.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    c0 = offset & _WORD
    c1 = (offset >> 32) & _WORD
    c2, c3 = subsequence & _WORD, torch.full_like(seed, draw)
    for _ in range(10):
        # Products overflow int64, which keeps their 64 bits.
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((q >> 32) & _WORD) ^ c1 ^ k0, q & _WORD, ((p >> 32) & _WORD) ^ c3 ^ k1, p & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53


def _numbers(
    seed: Tensor | None, seed_value: int, offset: Tensor | None, offset_value: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """seed, offset and subsequence of `count` outputs. Outputs that share a seed have different subsequences."""
    shared = seed is None or len(seed) == 1
    seed = torch.tensor([seed_value]) if seed is None else seed
    offset = torch.tensor([offset_value]) if offset is None else offset
    rows = torch.arange(count)
    return seed.expand(count), offset.expand(count), rows if shared else torch.zeros_like(rows)


def _column(values: Tensor | None, value: float, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows, 1), value, dtype=dtype) if values is None else values.to(dtype)[:, None]


def _weigh(x: Tensor, temperature: Tensor, logits: bool) -> Tensor:
    """Float64 weights of rows [rows, vocab]; NaN all along a row of logits whose maximum is not finite."""
    if not logits:
        return torch.where(x < 0, 0, x).double()
    return torch.exp((x.double() - x.amax(-1, keepdim=True)) / temperature.clamp(min=1e-30))


def _largest(x: Tensor, count: int) -> Tensor:
    """The largest elements of each row, in descending order. NumPy sorts many of them faster than torch."""
    vocab = x.shape[1]
    return x.topk(count).values if 8 * count < vocab else torch.from_numpy(np.sort(x.numpy())).flip(-1)[:, :count]


def _kept(
    x: Tensor,
    weights: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    logits: bool,
    joint: bool,
) -> Tensor:
    """Which tokens are kept: bool [rows, vocab]. Parameters: [rows, 1]."""
    vocab, lowest = x.shape[1], -torch.inf if logits else 0.0
    by_k, cut = (top_k > 0) & (top_k < vocab), top_p < 1
    k, low = torch.where(by_k, top_k, 0), torch.full((len(x), 1), lowest)
    if bool(by_k.any() | cut.any()):
        values = _largest(x, vocab if bool((cut & ~by_k).any()) else int(k.amax()))
        low = torch.where(by_k, values.gather(1, (k - 1).clamp(min=0)), low)
        if bool(cut.any()):
            whole = torch.ones(len(x), 1, dtype=torch.float64)
            if not joint and bool(by_k.any()):
                whole = torch.where(x >= low, weights, 0).sum(-1, True)
            elif logits or not joint:
                whole = weights.sum(-1, True)
            running = _weigh(values, temperature, logits).cumsum(-1)
            last = torch.searchsorted(running, top_p.clamp(min=0) * whole).clamp(max=values.shape[1] - 1)
            low = torch.where(cut, torch.maximum(low, values.gather(1, last)), low)
    kept = x >= low
    return kept & (weights >= min_p.clamp(max=1) * weights.amax(-1, True)) if bool((min_p > 0).any()) else kept


@operation("sample_rows", "tokens", "valid")
def sample_rows(
    tokens: Tensor,
    valid: Tensor,
    x: Tensor,
    indices: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    temperature_value: float,
    top_k_value: int,
    top_p_value: float,
    min_p_value: float,
    seed_value: int,
    offset_value: int,
    logits: bool,
    joint: bool,
    greedy: bool,
) -> None:
    """Draw tokens, int [outputs], from the rows of x [rows, vocab], logits or else probabilities.

    indices: int [outputs], the row of each output; None: its own. Parameters are tensors with one value per row, or,
    if they are None, the values. joint: top-p refers to all tokens, and of probabilities to 1; otherwise to the tokens
    that top-k keeps. greedy: a temperature of 0 or less means the first of the largest tokens. seed, offset: int64 [1]
    or [outputs]. valid, bool [outputs], becomes False, and the token 0, where no token has a weight, or one has NaN or
    inf.
    """
    tensors, values = (temperature, top_k, top_p, min_p, seed, offset), (temperature_value, top_k_value, top_p_value)
    if greedy and logits and temperature is None and temperature_value <= 0 and indices is None:
        _choose(tokens, valid, x)
        return
    if on_triton(x.device):
        from quire.kernels.triton.sampling import sample

        everything = (*values, min_p_value, seed_value, offset_value)
        sample(tokens, valid, x, indices, tensors, everything, logits, joint, greedy)
        return
    if not len(tokens):
        return
    x, rows = x.float(), len(x)
    temperatures = _column(temperature, temperature_value, rows, torch.float64)
    first = (temperatures <= 0) & greedy
    chosen = x.argmax(-1)
    if bool(first.all()):
        good = x.gather(1, chosen[:, None])[:, 0].isfinite()
        picked = chosen if indices is None else chosen[indices]
    else:
        weights = _weigh(x, temperatures, logits)
        total = weights.sum(-1)
        good = (total > 0) & total.isfinite()
        k = _column(top_k, top_k_value, rows, torch.int64).masked_fill(first, 1)
        p = _column(top_p, top_p_value, rows, torch.float64).masked_fill(first, 1)
        kept = _kept(x, weights, temperatures, k, p, _column(min_p, min_p_value, rows, torch.float64), logits, joint)
        sums = weights.where(kept, 0).cumsum(-1)
        u = uniform(*_numbers(seed, seed_value, offset, offset_value, len(tokens)))
        picked = _invert(sums, u, indices)
        row = slice(None) if indices is None else indices
        picked = torch.where(first[row, 0], chosen[row], picked)
    ok = good if indices is None else good[indices]
    tokens.copy_(torch.where(ok, picked, 0))
    valid.copy_(ok)


def _choose(tokens: Tensor, valid: Tensor, x: Tensor) -> None:
    """`sample_rows` of logits whose temperature is 0."""
    if on_triton(x.device):
        from quire.kernels.triton.greedy import choose

        choose(tokens, valid, None, x)
    elif len(x):
        top, first = x.max(-1)
        torch.lt(top.abs(), torch.inf, out=valid)
        torch.mul(first, valid, out=tokens)


@operation("greedy_rows", "tokens", "marked")
def greedy_rows(tokens: Tensor, marked: Tensor, logits: Tensor) -> None:
    """Write the first of the largest logits of each row [rows, vocab], whose last stride is 1, to tokens and marked,
    int64 and int32 [rows]. Where logits are NaN or +inf, or all -inf, tokens becomes 0 and marked -1.
    """
    if on_triton(logits.device):
        from quire.kernels.triton.greedy import choose

        choose(tokens, None, marked, logits)
    elif len(logits):
        valid = torch.empty(len(logits), dtype=torch.bool)
        _choose(tokens, valid, logits)
        marked.copy_(torch.where(valid, tokens, -1))


def _invert(sums: Tensor, u: Tensor, indices: Tensor | None) -> Tensor:
    """The first token of each output's row whose running sum exceeds u times the last one: int64 [outputs]."""
    # argmax returns the first token at which the sum is reached.
    last = sums.argmax(-1)
    if indices is None:
        found = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)[:, 0]
        return torch.minimum(found, last)
    found = torch.zeros(len(u), dtype=torch.int64)
    for row in indices.unique().tolist():
        mine = indices == row
        found[mine] = torch.searchsorted(sums[row], u[mine] * sums[row, -1], right=True).clamp(max=int(last[row]))
    return found


@operation("transform_rows", "out")
def transform_rows(
    out: Tensor,
    x: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    temperature_value: float,
    top_k_value: int,
    top_p_value: float,
    kind: str,
) -> None:
    """Write x [rows, vocab] to out, of its shape: the softmax of logits (kind "softmax"), probabilities that are kept,
    divided by their sum ("probs"), or logits that are kept, -inf for others ("mask").
    """
    tensors, values = (temperature, top_k, top_p), (temperature_value, top_k_value, top_p_value)
    if on_triton(x.device):
        from quire.kernels.triton.sampling import transform

        transform(out, x, tensors, values, kind)
        return
    if not x.numel():
        return
    x, (rows, logits) = x.float(), (len(x), kind != "probs")
    temperatures = _column(temperature, temperature_value, rows, torch.float64)
    weights = _weigh(x, temperatures, logits)
    k, p = _column(top_k, top_k_value, rows, torch.int64), _column(top_p, top_p_value, rows, torch.float64)
    kept = _kept(x, weights, temperatures, k, p, torch.zeros(rows, 1), logits, True)
    if kind == "mask":
        wrong = (x.isnan() | (x == torch.inf)).any(-1, True)
        out.copy_(torch.where(kept | wrong, x, -torch.inf))
    else:
        # The sum of a row with NaN is NaN, and so is what is divided by it.
        kept |= weights.isnan().any(-1, True)
        weights = torch.where(kept, weights, 0)
        total = weights.sum(-1, True)
        out.copy_(torch.where(kept, weights / total, 0))


@operation("penalise_logits", "out")
def penalise_logits(
    out: Tensor,
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor | None,
    prompt_lens: Tensor,
    lens: Tensor,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
    repetition_value: float,
    presence_value: float,
    frequency_value: float,
) -> None:
    """Write logits [rows, vocab] to out, float32, with those of tokens that occurred penalised; see
    `quire.sampling.Penalties`. tokens: int [slots, max_len]; slots: int [rows] or None; prompt_lens, lens: int [rows].
    """
    tensors, values = (repetition, presence, frequency), (repetition_value, presence_value, frequency_value)
    if on_triton(out.device):
        from quire.kernels.triton.logprobs import penalise

        penalise(out, logits, tokens, slots, prompt_lens, lens, tensors, values)
        return
    out.copy_(logits)
    (rows, vocab), largest = logits.shape, torch.finfo(torch.float32).max
    divisor, once, often = (_column(t, v, rows, torch.float64) for t, v in zip(tensors, values, strict=True))
    slot = torch.arange(rows) if slots is None else slots.long()
    changes = ((divisor != 1) | (once != 0) | (often != 0))[:, 0]
    at = (changes & (slot >= 0) & (slot < len(tokens))).nonzero()[:, 0]
    listed, place = tokens[slot[at]].long(), torch.arange(tokens.shape[1])
    known = (place < lens[at].long()[:, None]) & (listed >= 0) & (listed < vocab)
    output = known & (place >= prompt_lens[at].long()[:, None])
    # How often each token of each row occurs, and occurs in its output.
    keys = listed + torch.arange(len(at))[:, None] * vocab
    occurs, counts = (torch.bincount(keys[x], minlength=len(at) * vocab) for x in (known, output))
    used = occurs.nonzero()[:, 0]
    row, token, times = at[used // vocab], used % vocab, counts[used]
    divisor, once, often = (x[row, 0] for x in (divisor, once, often))
    x = logits[row, token].double()
    # Without the clamp, inf - inf would be NaN later.
    y = torch.where(x > 0, x / divisor, x * divisor).clamp(-largest, largest)
    y -= torch.where(times > 0, once + often * times, 0)
    out[row, token] = torch.where(x.isinf(), x, y.clamp(-largest, largest)).float()


@operation("report_logprobs", "logprobs", "top_tokens", "top_logprobs")
def report_logprobs(logprobs: Tensor, top_tokens: Tensor, top_logprobs: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """Log-probabilities of tokens, int [rows], and of the most likely [rows, n] of logits [rows, vocab], in descending
    order, those of equal logits in the order of the vocabulary. Tokens that have none, whose logit is -inf, are -1.
    """
    if on_triton(logits.device):
        from quire.kernels.triton.logprobs import report

        report(logprobs, top_tokens, top_logprobs, logits, tokens)
        return
    if not len(logits):
        return
    x = logits.float()
    lse = x.logsumexp(-1, True)
    known = (tokens >= 0) & (tokens < x.shape[1])
    chosen = x.gather(1, tokens.where(known, 0).long()[:, None]) - lse
    logprobs.copy_(chosen[:, 0].where(known, -torch.inf))
    count = top_tokens.shape[1]
    if not count:
        return
    values, ids = x.topk(count)
    there = values > -torch.inf
    top_logprobs.copy_(torch.where(there | lse.isnan(), values - lse, -torch.inf))
    # Equal logits have no order in topk, which may leave out any of those that equal the last one.
    last = torch.where(there, values, torch.inf).amin(-1, True)
    among = ((values[:, 1:] == values[:, :-1]) & there[:, 1:]).any(-1)
    for row in (among | ((x >= last).sum(-1) > count)).nonzero()[:, 0].tolist():
        near = (x[row] >= last[row]).nonzero()[:, 0]
        order = x[row, near].sort(descending=True, stable=True).indices[:count]
        ids[row, : len(order)] = near[order]
    top_tokens.copy_(torch.where(there, ids, -1))


@operation("verify_drafts", "out", "accepted", "emitted")
def verify_drafts(
    out: Tensor,
    accepted: Tensor,
    emitted: Tensor,
    draft: Tensor,
    token_ids: Tensor,
    target: Tensor,
    seed: Tensor | None,
    offset: Tensor | None,
    seed_value: int,
    offset_value: int,
) -> None:
    """Speculative sampling (Chen et al., 2023) of chains of drafted tokens.

    draft: float [rows, n, vocab], the draft's probabilities; token_ids: int [rows, n]; target: float [rows, n + 1,
    vocab]. out, int [rows, n + 1]: the tokens accepted, one more from the target's excess over the draft or, after all,
    from the target, and then -1. How many were accepted, each for itself, and how many before the first rejected one,
    are added to accepted and emitted, int [rows].
    """
    if on_triton(out.device):
        from quire.kernels.triton.speculative import verify

        verify(out, accepted, emitted, draft, token_ids, target, (seed, offset), (seed_value, offset_value))
        return
    rows, count, vocab = draft.shape
    ids, known = token_ids.long(), (token_ids >= 0) & (token_ids < vocab)
    at = ids.where(known, 0)[..., None]
    p, q = (x.gather(2, at)[..., 0].double() for x in (target[:, :count], draft))
    numbers = _numbers(seed, seed_value, offset, offset_value, rows)
    u = torch.stack([uniform(*numbers, draw=i) for i in range(count + 1)], 1)
    agrees = known & (u[:, :count] * q < p)
    position = agrees.long().cumprod(1).sum(1)
    row, drafted = torch.arange(rows), (position < count)[:, None]
    whole = target[row, position].float().clamp(min=0)
    other = draft[row, position.clamp(max=max(count - 1, 0))] if count else torch.zeros_like(whole)
    weights = torch.where(drafted, (whole - other.float().clamp(min=0)).clamp(min=0), whole)
    weights = torch.where((weights.sum(-1, True) == 0) & drafted, whole, weights)
    sums = weights.double().cumsum(-1)
    good = (sums[:, -1] > 0) & sums[:, -1].isfinite()
    i = torch.arange(count + 1)
    drafts = torch.nn.functional.pad(ids, (0, 1), value=-1)
    final = torch.where(good, _invert(sums, u[:, -1], None), -1)
    emitted_ids = torch.where(i < position[:, None], drafts, -1)
    out.copy_(torch.where(i == position[:, None], final[:, None], emitted_ids))
    accepted.add_(agrees.sum(1))
    emitted.add_(position)
