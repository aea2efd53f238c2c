"""Sampling the next token of every request of a batch.

The token of a request depends on its own logits, parameters and random numbers only, which the host draws one per
token. A request with a seed is therefore reproducible in any batch and on any device. Parameters are applied in
float64, which represents every value that `SamplingParams` allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.request import Request


@dataclass(slots=True)
class Choice:
    """The next token of a request, or None and an error."""

    token: int | None
    logprobs: dict[int, float] | None = None
    error: str | None = None


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Choice]:
    """The next token of each request from its row of logits, [len(requests), vocab_size]."""
    logits = logits.float()
    broken = ~torch.isfinite(logits.amax(-1))  # a row with NaN, with +inf, or with -inf only
    raw, logits = logits, _penalise(logits, requests)
    tokens = logits.argmax(-1)
    sampled = [i for i, request in enumerate(requests) if not request.params.greedy]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        tokens[rows] = _draw(logits[rows], [requests[i] for i in sampled])
    reports = _logprobs(raw, tokens, requests)
    chosen, bad = tokens.tolist(), broken.tolist()
    failed = Choice(None, error="the model's logits are not finite")
    return [failed if bad[i] else Choice(chosen[i], reports[i]) for i in range(len(requests))]


def sample_each(logits: Tensor, requests: Sequence[Request]) -> list[Choice]:
    """Call `sample` row by row; the choice of a row that raises has the exception as its error."""
    choices = []
    for i, request in enumerate(requests):
        try:
            choices += sample(logits[i : i + 1], [request])
        except Exception as error:
            choices.append(Choice(None, error=f"{type(error).__name__}: {error}"))
    return choices


def _penalise(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Apply repetition, presence and frequency penalties, in a copy if any row has one."""
    penalised = [i for i, request in enumerate(requests) if request.params.penalised]
    if not penalised:
        return logits
    logits, largest = logits.clone(), torch.finfo(logits.dtype).max
    for i in penalised:
        params, row = requests[i].params, logits[i].double()
        used = torch.tensor(sorted(set(requests[i].tokens)), device=logits.device)
        values, penalty = row[used], params.repetition_penalty
        assert penalty is not None  # a request's parameters have no missing values
        row[used] = torch.where(values > 0, values / penalty, values * penalty)
        if requests[i].output:
            out, times = torch.tensor(requests[i].output, device=logits.device).unique(return_counts=True)
            row[out] -= (params.presence_penalty + params.frequency_penalty * times.double()).clamp(-largest, largest)
        # Only the logits that the model set to -inf are -inf afterwards.
        logits[i] = row.clamp(-largest, largest).masked_fill(logits[i] == -torch.inf, -torch.inf)
    return logits


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw one token per row by inverse transform sampling, after temperature, top-k, top-p and min-p."""

    def column(name: str) -> Tensor:
        values = [getattr(r.params, name) for r in requests]
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    values, order = torch.sort(logits, descending=True, stable=True, dim=-1)
    values = (values.double() - values[:, :1]) / column("temperature")
    rank = torch.arange(values.shape[1], device=values.device)
    top_k = column("top_k")
    values = values.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    p = torch.softmax(values, -1)
    before = p.cumsum(-1) - p
    allowed = (before < column("top_p")) & (p >= column("min_p") * p[:, :1])
    allowed[:, 0] = True
    total = torch.where(allowed, p, 0.0).cumsum(-1)
    u = torch.tensor([r.draw() for r in requests], dtype=torch.float64, device=logits.device)[:, None]
    picked = torch.searchsorted(total, u * total[:, -1:], right=True).clamp(max=values.shape[1] - 1)
    # Rounding must not select a token after the last allowed one.
    last = (allowed * rank).amax(-1, keepdim=True)
    return order.gather(1, torch.minimum(picked, last))[:, 0]


def _logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[Request]) -> list[dict[int, float] | None]:
    """For each request with logprobs, the log-probabilities of the likeliest tokens in descending order and of its
    token; None for other requests.
    """
    reports: list[dict[int, float] | None] = [None] * len(requests)
    for i, request in enumerate(requests):
        if request.params.logprobs is not None:
            row = torch.log_softmax(logits[i], -1)
            values, ids = row.topk(min(request.params.logprobs, len(row)))
            report = dict(zip(ids.tolist(), values.tolist(), strict=True))
            token = int(tokens[i])
            report.setdefault(token, float(row[token]))
            reports[i] = report
    return reports
