"""Sampling the next token of every request of a batch, on the device that has the logits.

The token of a request depends on its own logits, parameters and random numbers only. The random number of a token is a
hash of the request's seed and the token's index in the output, so a request with a seed is reproducible in any batch,
on any device, and after a preemption. Parameters are applied in float64, which represents every value that
`SamplingParams` allows.

Nothing here waits for a GPU except `Sampled.read`: tables go to the device and results to the host through pinned
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.request import Request

_UNDEFINED = -1  # in place of a token, where a row of logits is not finite


@dataclass(slots=True)
class Choice:
    """The next token of a request, or None and an error."""

    token: int | None
    logprobs: dict[int, float] | None = None
    error: str | None = None


class Sampled:
    """The next tokens of requests, on their way to the host.

    Args:
        requests: those that the rows of logits belong to.
        tokens: int64 [len(requests)], on the device; -1 where a row of logits is not finite.
        reports: see `_logprobs`.
    """

    def __init__(self, requests: Sequence[Request], tokens: Tensor, reports: _Reports | None) -> None:
        self.requests = requests
        self._rows = () if reports is None else reports.rows
        tensors = (tokens,) if reports is None else (tokens, reports.ids, reports.values)
        self._event = None
        if tokens.is_cuda:
            self._host = [
                torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tokens.device))
        else:
            self._host = list(tensors)

    def read(self) -> list[Choice]:
        """The choice of each request; waits until the device has sampled them."""
        if self._event is not None:
            self._event.synchronize()
        tokens = self._host[0].tolist()
        reports: list[dict[int, float] | None] = [None] * len(tokens)
        if self._rows:
            ids, values = (x.tolist() for x in self._host[1:])
            for i, row_ids, row_values in zip(self._rows, ids, values, strict=True):
                asked = self.requests[i].params.logprobs
                report = dict(zip(row_ids[1:][:asked], row_values[1:], strict=False))
                report.setdefault(row_ids[0], row_values[0])
                reports[i] = report
        broken = "the model's logits are not finite"
        return [
            Choice(None, error=broken) if token == _UNDEFINED else Choice(token, report)
            for token, report in zip(tokens, reports, strict=True)
        ]


class Sampler:
    """Samples the next tokens of batches, one batch after another.

    Args:
        device: where the logits are.
        rows: the most requests of a batch.

    Attributes:
        last: int64 [rows] on the device, the tokens of the last batch: the pending token of a request is at its `row`.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Sampled:
        """Start to sample a token for each request from its row of logits, [len(requests), vocab_size]."""
        best, tokens = logits.max(-1)
        reports = None
        if not all(request.plain for request in requests):
            tokens, reports = _choose(logits.float(), tokens, self.last, requests)
        self.last[: len(requests)] = tokens
        # The largest logit is not finite in a row with NaN, with +inf, or with -inf only.
        return Sampled(requests, torch.where(torch.isfinite(best), tokens, _UNDEFINED), reports)


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Choice]:
    """The next token of each request from its row of logits, [len(requests), vocab_size]; waits for it."""
    return Sampler(logits.device, len(requests)).launch(logits, requests).read()


def _choose(
    logits: Tensor, tokens: Tensor, last: Tensor, requests: Sequence[Request]
) -> tuple[Tensor, _Reports | None]:
    """The tokens of a batch with requests that are not plain, of which `tokens` are the likeliest, and the reports."""
    raw, logits = logits, _penalise(logits, last, requests)
    if logits is not raw:
        tokens = logits.argmax(-1)
    sampled = [i for i, request in enumerate(requests) if not request.params.greedy]
    if sampled:
        rows = _on_device(np.array(sampled), logits.device)
        drawn = _draw(logits if len(sampled) == len(requests) else logits[rows], [requests[i] for i in sampled])
        tokens = drawn if len(sampled) == len(requests) else tokens.index_copy(0, rows, drawn)
    return tokens, _logprobs(raw, tokens, requests)


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Host values on a device, without waiting for it."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _penalise(logits: Tensor, last: Tensor, requests: Sequence[Request]) -> Tensor:
    """Apply repetition, presence and frequency penalties, in a copy if any row has one; `last` has pending tokens."""
    penalised = [i for i, request in enumerate(requests) if request.params.penalised]
    if not penalised:
        return logits
    logits, largest, vocab = logits.clone(), torch.finfo(logits.dtype).max, logits.shape[1]
    for i in penalised:
        request, params, row = requests[i], requests[i].params, logits[i].double()
        known = _on_device(np.array(request.tokens), logits.device)
        if request.pending:
            known = torch.cat([known, last[request.row : request.row + 1]])
        ones = torch.ones((), dtype=torch.float64, device=logits.device)
        used = row.new_zeros(vocab).index_put_((known,), ones)
        output = known[request.prompt_len :]
        times = row.new_zeros(vocab).index_put_((output,), ones, accumulate=True)
        penalty = params.repetition_penalty
        assert penalty is not None  # a request's parameters have no missing values
        row = torch.where(used > 0, torch.where(row > 0, row / penalty, row * penalty), row)
        minus = params.presence_penalty + params.frequency_penalty * times
        row = row - torch.where(times > 0, minus, 0.0).clamp(-largest, largest)
        # Only the logits that the model set to -inf are -inf afterwards.
        logits[i] = row.clamp(-largest, largest).masked_fill(logits[i] == -torch.inf, -torch.inf)
    return logits


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw one token per row by inverse transform sampling, after temperature, top-k, top-p and min-p."""
    params = [r.params for r in requests]
    u = _uniform([r.seed for r in requests], [len(r.tokens) + r.pending - r.prompt_len for r in requests])
    columns = np.array([[p.temperature, p.top_p, p.min_p, p.top_k] for p in params], dtype=np.float64)
    host = np.concatenate([columns, u[:, None]], 1)
    temperature, top_p, min_p, top_k, uniform = _on_device(host, logits.device)[:, :, None].unbind(1)
    values, order = torch.sort(logits, descending=True, stable=True, dim=-1)
    values = (values.double() - values[:, :1]) / temperature
    rank = torch.arange(values.shape[1], device=values.device)
    values = values.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    p = torch.softmax(values, -1)
    before = p.cumsum(-1) - p
    allowed = (before < top_p) & (p >= min_p * p[:, :1])
    allowed[:, 0] = True
    total = torch.where(allowed, p, 0.0).cumsum(-1)
    picked = torch.searchsorted(total, uniform * total[:, -1:], right=True).clamp(max=values.shape[1] - 1)
    # Rounding must not select a token after the last allowed one.
    last = (allowed * rank).amax(-1, keepdim=True)
    return order.gather(1, torch.minimum(picked, last))[:, 0]


def _uniform(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Numbers in [0, 1), float64, each a hash of a seed and an index: the generator SplitMix64 (Steele et al. 2014),
    whose state is a hash of the seed, after `index` steps.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(np.array([seed % (1 << 64) for seed in seeds], dtype=np.uint64) + golden)
        mixed = _mix(state + (np.array(indices, dtype=np.uint64) + np.uint64(1)) * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64, on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class _Reports:
    """Log-probabilities of the requests at `rows`: ids int64 and values [len(rows), 1 + n], of the chosen token first
    and then of the n likeliest in descending order.
    """

    rows: list[int]
    ids: Tensor
    values: Tensor


def _logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[Request]) -> _Reports | None:
    """The reports of the requests that want log-probabilities; None if there are none."""
    asked = {i: r.params.logprobs for i, r in enumerate(requests) if r.params.logprobs is not None}
    if not asked:
        return None
    rows = list(asked)
    on_device = _on_device(np.array(rows), logits.device)
    logprobs = torch.log_softmax(logits[on_device], -1)
    values, ids = logprobs.topk(min(max(asked.values()), logprobs.shape[1]))
    chosen = tokens[on_device][:, None]
    return _Reports(rows, torch.cat([chosen, ids], 1), torch.cat([logprobs.gather(1, chosen), values], 1))
