"""Sampling the next token of every request of a batch, on the device that has the logits.

The token of a request depends on its own logits, parameters and random numbers only. The random number of a token is a
hash of the request's seed and the token's index in the output (`quire.sampling`), so a request with a seed is
reproducible in any batch, on any device, and after a preemption.

Nothing here waits for a GPU except `SampledTokens.wait`: tables go to the device and results to the host through pinned
memory. What a batch of requests needs on the device stays there as long as the batches have the same requests: their
parameters, the number of tokens of each, which every step counts up, and for penalties and bad words the tokens
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire import sampling
from quire.definition.tensors import check_tensor
from quire.engine.grammar import masked
from quire.engine.host_copy import HostCopies
from quire.engine.logits_processors import LogitsProcessors
from quire.engine.request import UNDEFINED, Request
from quire.engine.token_lists import TokenLists
from quire.steps import greedy_rows, upload

_LARGEST = float(np.finfo(np.float32).max)


class SampledTokens:
    """The next tokens of requests, on their way to the host.

    Args:
        requests: those that the rows of logits belong to.
        tokens: int32 [len(requests)], on the device; UNDEFINED where a row of logits is not finite. The next batch may
            overwrite them.
        reports: their log-probabilities, None if no request wants them.
    """

    def __init__(self, requests: Sequence[Request], tokens: Tensor, reports: sampling.Logprobs | None) -> None:
        self.requests = requests
        self._copies = HostCopies([tokens, *(reports or ())])

    def wait(self) -> None:
        """Wait until the device has sampled the tokens."""
        self._copies.wait()

    def tokens(self) -> list[int]:
        """The token of each request, or UNDEFINED, once they are sampled."""
        return self._copies.wait()[0].tolist()

    def logprobs(self) -> list[dict[int, float] | None] | None:
        """For each request, the log-probabilities of its token and of the most likely ones, or None; None if no request
        wants them.
        """
        if len(self._copies) == 1:
            return None
        return [
            None if r.params.logprobs is None else top_logprobs(r.params.logprobs, *columns)
            for r, *columns in zip(self.requests, *(x.tolist() for x in self._copies.wait()), strict=True)
        ]


def top_logprobs(
    count: int, token: int, logprob: float, ids: Sequence[int], logprobs: Sequence[float]
) -> dict[int, float]:
    """The log-probabilities of the first `count` ids, which are -1 where no token is left, and of a token."""
    report = {i: value for i, value in zip(ids[:count], logprobs, strict=False) if i >= 0}
    report.setdefault(token, logprob)
    return report


class SamplingBatch:
    """What a batch of requests that are not all plain needs on the device.

    Args:
        requests: one for each row of logits.
        draft_index: how many drafts come before the token of each row; None: none.
        lists: has the tokens of requests with penalties or bad words of several tokens.
        vocab_size: the number of columns of the logits.
        device: where the logits are.

    Attributes:
        index: int64 [rows], the index in its output of the token that each row samples next.
        logprobs: how many most likely tokens are reported; None: no report.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        draft_index: Sequence[int] | None,
        lists: TokenLists,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        params = [r.params for r in requests]
        asked = [p.logprobs for p in params if p.logprobs is not None]
        self.logprobs = max(asked) if asked else None
        penalised = any(p.penalised for p in params)
        listed = [i for i, r in enumerate(requests) if r.needs_last_tokens]
        lens = [r.num_total_tokens for r in requests]
        slots = [-1] * len(requests)
        if listed:
            for i, slot in zip(listed, lists.hold([requests[i] for i in listed]), strict=True):
                slots[i] = slot
        prompts, top_k = [r.prompt_len for r in requests], [p.top_k for p in params]
        seeds = np.array([r.seed % (1 << 64) for r in requests], dtype=np.uint64).view(np.int64)
        whole = upload(np.stack([seeds, *np.array([top_k, prompts, lens, slots], dtype=np.int64)]), device)
        names = ["temperature", "top_p", "min_p"]
        factors = ["repetition_penalty", "presence_penalty", "frequency_penalty"] if penalised else []
        floats = _floats([[getattr(p, name) for p in params] for name in [*names, *factors]], device)
        self._filters, self._factors = floats[:3], list(floats[3:])
        self._seeds, self._top_k, self._prompts, self._lens, self._slots = whole
        self.index, self._lists = self._lens - self._prompts, lists
        if draft_index is not None:
            self.index += upload(np.array(draft_index), device)
        self._listed = upload(np.array(listed), device) if listed else None
        rules = [r.rules for r in requests]
        self._processors = LogitsProcessors(rules, slots, vocab_size, device) if any(rules) else None

    def sample(self, logits: Tensor) -> sampling.Sampled:
        """Sample a token for each row."""
        penalties = None
        if self._processors is not None:
            logits = self._processors.apply(logits, self.index, self._lens, self._lists.tokens)
        if self._factors:
            tables = (self._lists.tokens, self._prompts, self._lens, self._slots)
            penalties = sampling.Penalties(*tables, *self._factors)
        temperature, top_p, min_p = self._filters
        return sampling.sample(
            logits, temperature, self._top_k, top_p, min_p, seed=self._seeds, offset=self.index, penalties=penalties
        )

    def count(self, tokens: Tensor) -> None:
        """Count the sampled tokens, int32 [rows], so that the requests' next tokens can be sampled."""
        if self._listed is not None:
            at = self._listed
            self._lists.append(self._slots[at], self._lens[at], tokens[at])
        self._lens += 1
        self.index += 1


class Sampler:
    """Samples the next tokens of batches, one batch after another.

    Args:
        device: where the logits are.
        rows: the most rows of logits of a batch, those after drafts included.

    Attributes:
        last: int64 [rows] on the device, the tokens of the last batch, 0 where they are undefined: the token in flight
            of a request is at its `row`.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)
        # The tokens of plain batches, with UNDEFINED.
        self._marked = torch.zeros(rows, dtype=torch.int32, device=device)
        self._undefined = torch.full((), UNDEFINED, dtype=torch.int32, device=device)
        self._lists = TokenLists(device, rows)
        # The requests of the last batch, and what they need; None: they are all plain.
        self._requests: Sequence[Request] = ()
        self._batch: SamplingBatch | None = None

    def sample_greedy(self, logits: Tensor) -> None:
        """Sample a token for each row of logits, [rows, vocab_size], as if all requests were plain. It may be captured
        in a CUDA graph; a `launch` that follows reads or replaces the tokens.
        """
        check_tensor(logits, "logits", (None, None), None, self.last.device)
        rows = len(logits)
        greedy_rows(self.last[:rows], self._marked[:rows], logits)

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        draft_index: Sequence[int] | None = None,
        greedy_done: bool = False,
    ) -> SampledTokens:
        """Start to sample a token for each row of logits, [len(requests), vocab_size].

        Each call samples the next token of its requests, so no token may be sampled elsewhere unless a call raises.

        Args:
            requests: the request of each row.
            draft_index: how many drafts come before the token of each row, for requests with several rows; None: there
                are none, and each request has one row.
            greedy_done: whether `sample_greedy` of these logits, and perhaps of more rows, has been launched before, by
                itself or in a graph.
        """
        try:
            return self._launch(logits, requests, draft_index, greedy_done)
        except BaseException:
            self._requests = ()
            self._lists.invalidate()
            raise

    def _launch(
        self, logits: Tensor, requests: Sequence[Request], draft_index: Sequence[int] | None, greedy_done: bool
    ) -> SampledTokens:
        is_same = requests is self._requests or requests == self._requests
        if not is_same or draft_index is not None:
            plain = all(request.plain for request in requests)
            self._batch = (
                None if plain else SamplingBatch(requests, draft_index, self._lists, logits.shape[1], self.last.device)
            )
            # With drafts, the host learns only later how many of the sampled tokens are accepted.
            self._requests = requests if draft_index is None else ()
        batch, reports = self._batch, None
        if batch is None:
            if not greedy_done:
                self.sample_greedy(logits)
            return SampledTokens(requests, self._marked[: len(requests)], None)
        matchers = [None if request.finish_reason else request.matcher for request in requests]
        drawn = batch.sample(masked(logits, matchers))
        if batch.logprobs is not None:
            reports = sampling.token_logprobs(logits, drawn.tokens, min(batch.logprobs, logits.shape[1]))
        batch.count(drawn.tokens)
        self.last[: len(requests)] = drawn.tokens
        return SampledTokens(requests, torch.where(drawn.valid, drawn.tokens, self._undefined), reports)


def _floats(columns: list[list[float]], device: torch.device) -> Tensor:
    """Parameters as float64 on a device, in the range of float32, in which a GPU computes."""
    values = np.array(columns, dtype=np.float64).clip(-_LARGEST, _LARGEST)
    return upload(values.view(np.int64), device).view(torch.float64)
