"""Sampling the next token of every request of a batch, on the device that has the logits.

The token of a request depends on its own logits, parameters and random numbers only. The random number of a token is a
hash of the request's seed and the token's index in the output (`quire.sampling`), so a request with a seed is
reproducible in any batch, on any device, and after a preemption.

Nothing here waits for a GPU except `Sampled.read`: tables go to the device and results to the host through pinned
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import sampling
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
        self._requests: Sequence[Request] = ()  # those that _parameters belong to
        self._parameters: dict[str, Tensor] = {}

    @torch.inference_mode()
    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Sampled:
        """Start to sample a token for each request from its row of logits, [len(requests), vocab_size]."""
        best, tokens = logits.max(-1)
        reports = None
        if not all(request.plain for request in requests):
            tokens, reports = self._choose(logits, tokens, requests)
        self.last[: len(requests)] = tokens
        # The largest logit is not finite in a row with NaN, with +inf, or with -inf only.
        return Sampled(requests, torch.where(torch.isfinite(best), tokens, _UNDEFINED), reports)

    def _choose(self, logits: Tensor, likeliest: Tensor, requests: Sequence[Request]) -> tuple[Tensor, _Reports | None]:
        """The tokens of a batch with requests that are not plain, and the reports."""
        tokens, penalised = likeliest, _penalise(logits, self.last, requests)
        if any(not request.params.greedy for request in requests):
            tokens = self._draw(penalised, requests)
        elif penalised is not logits:
            tokens = penalised.argmax(-1)
        return tokens, _logprobs(logits, tokens, requests)

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Tokens drawn by `quire.sampling`. Parameters go to the device when the batch changes, and the indices of the
        tokens in each step.
        """
        device = logits.device
        if requests != self._requests:
            params = [r.params for r in requests]
            columns = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
            floats = _on_device(np.array(columns, dtype=np.float64), device)
            seeds = np.array([r.seed % (1 << 64) for r in requests], dtype=np.uint64).view(np.int64)
            whole = _on_device(np.stack([seeds, np.array([p.top_k for p in params])]), device)
            self._parameters = dict(zip(("temperature", "top_p", "min_p"), floats, strict=True))
            self._parameters |= {"seed": whole[0], "top_k": whole[1]}
            self._requests = requests
        index = _on_device(np.array([len(r.tokens) + r.pending - r.prompt_len for r in requests]), device)
        return sampling.sample(logits, **self._parameters, offset=index).tokens.long()  # type: ignore[arg-type]


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Choice]:
    """The next token of each request from its row of logits, [len(requests), vocab_size]; waits for it."""
    return Sampler(logits.device, len(requests)).launch(logits, requests).read()


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Host values on a device, without waiting for it."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _penalise(logits: Tensor, last: Tensor, requests: Sequence[Request]) -> Tensor:
    """Apply repetition, presence and frequency penalties, in a copy if any row has one; `last` has pending tokens."""
    penalised = [i for i, request in enumerate(requests) if request.params.penalised]
    if not penalised:
        return logits
    vocab = logits.shape[1]
    logits, largest = logits.to(torch.float32, copy=True), torch.finfo(torch.float32).max
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
    logprobs = torch.log_softmax(logits[on_device].float(), -1)
    values, ids = logprobs.topk(min(max(asked.values()), logprobs.shape[1]))
    chosen = tokens[on_device][:, None]
    return _Reports(rows, torch.cat([chosen, ids], 1), torch.cat([logprobs.gather(1, chosen), values], 1))
