"""The steps of the engine: schedule, compute, sample, report.

On a GPU, a step is scheduled and launched while the one before it computes, and the results of that one are read after
the launch, so the device never waits for the host. What is not known when a step is launched is the token that the step
before samples for each request. Such a token is in flight: the scheduler counts it, and its value is taken from the
device's memory. Some ends follow from the token itself (an end token, a stop string, logits that are not finite). The
request is in one more step by the time that the host learns of them, and the token of that step is dropped.

A request that arrives waits for all steps that have been launched. So where the host has much time to spare, it
launches the next step late, at half of that time (`Engine.launch_at`), and takes in what arrives until then.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from quire.engine.batch import Chunk, ForwardOutput, StepBatch
from quire.engine.grammar import Grammar, Grammars
from quire.engine.logits_processors import word_tokens
from quire.engine.multimodal import check_text
from quire.engine.params import SamplingParams
from quire.engine.prompt_logprobs import add_prompt_logprobs
from quire.engine.prompt_size import check_size, longest_token
from quire.engine.request import Request, Update
from quire.engine.runner import Runner
from quire.engine.sampler import UNDEFINED, Choice, Sampled, Sampler, sample, undefined
from quire.engine.scheduler import Scheduler
from quire.engine.step_log import StepLog

_WORDS = 64  # how many lists of bad words are kept as tokens
_LEAST_SPARE = 4e-3  # seconds; half of it is enough to wake up and launch a step


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _warn(count: int, error: Exception) -> None:
    """Warn of a step that raised though none of its requests did alone, since no request reports that error."""
    message = f"a step of {count} requests raised, though none of them did alone, and they go on: {_describe(error)}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class Engine:
    """Runs requests step by step and sends updates to their sinks; for use in one thread.

    Args:
        runner: computes steps; `check_runner` has accepted it.
        max_num_seqs, max_batched_tokens: the largest number of running requests, and of tokens of a step.
        depth: 1 to read the results of a step after the next one has been launched, 0 to read them at once; None: as
            the runner wants it, and 0 with drafts, which follow from the results.
        speculative_tokens: the most drafts of a request in a step, see `quire.engine.drafts`.

    Attributes:
        launch_at: when `step` should be called, if the engine is busy, by time.perf_counter(). Later, the device might
            wait for it; earlier, requests that arrive in between wait for one more step.
    """

    def __init__(
        self,
        runner: Runner,
        max_num_seqs: int,
        max_batched_tokens: int,
        depth: int | None = None,
        speculative_tokens: int = 0,
    ) -> None:
        self.runner, self.model = runner, runner.model
        self.depth = int(runner.overlaps and not speculative_tokens) if depth is None else depth
        sizes = (runner.num_pages, runner.page_size, max_num_seqs, max_batched_tokens, speculative_tokens)
        self.scheduler = Scheduler(*sizes)
        self.max_len = min(self.model.context, runner.num_pages * runner.page_size)
        self.grammars = Grammars(self.model)
        self._word_tokens = lru_cache(_WORDS)(partial(word_tokens, self.model.tokenizer))
        self.sampler = Sampler(self.model.device, self.scheduler.max_rows)
        self._requests: Sequence[Request] = []  # those of the last launched step that samples; they have their rows
        self._masked = False  # whether any of them has a grammar
        # Steps whose results have not been read, and their chunks that sample.
        self._launched: deque[tuple[Sampled, StepBatch]] = deque()
        self._updates: deque[Update] = deque()  # those that have not been sent, in order
        self.step_log = StepLog()
        self.launch_at = 0.0
        self._pause = 0.0  # seconds from the end of the last `step` to launch_at
        self._spare = 0.0  # seconds of the last step of single tokens in which the host had nothing to do

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        sink: Callable[[Update], None],
        name: str = "prompt",
        grammar: Grammar | None = None,
    ) -> Request:
        """Make a request and check it; the model's defaults replace parameters that are left out. A grammar that has
        been prepared is used if it is that of the parameters.

        Raises:
            ImportError: the request has a grammar, and llguidance is not installed.
            ValueError: the prompt is empty, leaves no room for a token or has unknown tokens; the message has `name`.
                Or the grammar is not one, or other parameters do not fit the model; the message has the attribute of
                `params`.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} has params = {params!r}: they must be SamplingParams")
        params = params.over(self.model.default_params)
        if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
            check_size(prompt, name, self._longest_token, self.max_len)
        tokens = params.truncated(self.tokens(prompt, name), self.max_len)
        self._check_length(name, len(tokens), params)
        if params.prompt_logprobs is not None and not self.runner.supports_all_logits:
            what = f"{type(self.runner).__name__} does not compute the logits of prompts"
            raise ValueError(f"prompt_logprobs = {params.prompt_logprobs}: {what}")
        for what, ids in (
            (name, tokens),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
        ):
            self._check_tokens(what, ids or ())
        check_text(name, tokens, self.model.media_tokens)
        if self.model.tokenizer is None and (params.stop or params.bad_words):
            what = "stop strings" if params.stop else "bad_words"
            raise ValueError(f"{name} has {what}, but {self.model.folder} has no tokenizer")
        words = self._word_tokens(params.bad_words) if params.bad_words else ()
        if grammar is None or grammar.constraint != params.constraint:
            grammar = self.grammars.prepare(params)
        request = Request(tokens, params, self.model.tokenizer, self.model.end_ids, sink, grammar, words)
        request.max_total_tokens = min(request.max_total_tokens, self.max_len)
        return request

    def _check_length(self, name: str, count: int, params: SamplingParams) -> None:
        """Refuse a prompt without tokens, or without room for a token of the output, if there is to be one."""
        if not count:
            raise ValueError(f"{name} is empty: there must be at least one token")
        end = count + (params.max_tokens != 0)
        if end > self.model.context:
            raise ValueError(f"{name} has {count} tokens: the model's context of {self.model.context} leaves no room")
        if end > self.max_len:
            raise ValueError(f"{name} has {count} tokens: the cache of {self.max_len} tokens leaves no room")

    def _check_tokens(self, name: str, ids: Collection[int]) -> None:
        """Refuse tokens that the model does not have."""
        size = self.model.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            bad = next(t for t in ids if not 0 <= t < size)
            raise ValueError(f"{name} has token {bad}: tokens are 0 to {size - 1}")

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self.model.tokenizer)

    def tokens(self, prompt: str | Sequence[int], name: str) -> list[int]:
        """The token ids of a prompt; a ValueError has `name`."""
        if isinstance(prompt, str):
            if self.model.tokenizer is None:
                raise ValueError(f"{name} is a string, but {self.model.folder} has no tokenizer: pass token ids")
            surrogate = next((c for c in prompt if "\ud800" <= c <= "\udfff"), None)
            if surrogate is not None:
                what = f"{surrogate!r} at {prompt.index(surrogate)} is half a character or a byte that is not UTF-8"
                raise ValueError(f"{name} is not text: {what}")
            # `verbose` is for warnings of texts beyond the tokenizer's own length, which is no bound here.
            return self.model.tokenizer(prompt, verbose=False)["input_ids"] if prompt else []
        try:
            if isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set)):
                raise TypeError
            if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:  # as most are, and long
                return list(prompt)
            return [_token(t) for t in prompt]
        except TypeError:
            raise ValueError(f"{name} must be a string or a sequence of token ids") from None

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._launched)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        if request.prompt_only and request.prompt_len == 1:  # there is nothing to compute
            self._end(request, "length")
            self._report()

    def cancel(self, request: Request) -> None:
        """Cancel a waiting or running request."""
        if request.finish_reason is None:
            self._end(request, "cancelled")
            self._report()

    def step(self) -> None:
        """Launch one step, and send the updates of the step before it (with depth 0, its own) to the sinks of its
        requests. An exception that one request causes ends that request with finish_reason "error" and a description;
        an exception without a known cause ends all requests.
        """
        try:
            batch = self.scheduler.schedule()
            if batch:
                self.step_log.launch(batch)
                self._launch(batch)
            self._read(self.depth if batch else 0)
            self._report()
        except Exception as error:
            self._launched.clear()
            self._updates.extend(request.fail("error", _describe(error)) for request in self.scheduler.reset())
            self._report()
        finally:
            if not self._launched:
                self._spare = 0.0  # of other requests than those that come next, whose first token must not wait for it
            self._pause = self._spare / 2 if self._spare > _LEAST_SPARE else 0.0
            self.launch_at = time.perf_counter() + self._pause

    def _report(self) -> None:
        """Send the updates of the requests to their sinks. This is the last thing that a step does, and all counts, the
        pages and the step log include its tokens by then, so that they agree with what the sinks' readers know.
        """
        self.step_log.read(len(self._launched))
        while self._updates:
            update = self._updates.popleft()
            update.request.sink(update)

    def _launch(self, batch: StepBatch) -> None:
        """Start to compute a step and to sample its tokens."""
        try:
            output = self.runner.forward(batch, self.sampler.last)
        except Exception as error:
            self._read()
            output = self._run_each([c for c in batch if c.request.finish_reason is None], error)
        self.scheduler.stats.steps += 1
        batch, logits, greedy_done = output
        batch.count_computed()
        if not batch.decode_only:
            logits = add_prompt_logprobs(batch, logits)
            for request in [r for r in batch.requests if r.prompt_only]:
                if request.num_computed_tokens == request.prompt_len - 1:
                    self._end(request, "length")
            # Otherwise the rows of the logits are others.
            greedy_done = greedy_done and logits is output.logits
            batch = batch.sampling()
        if not batch:
            return
        requests, draft_index = batch.sampled_rows()
        again = requests is self._requests
        if not again:
            self._requests, self._masked = requests, any(request.matcher is not None for request in requests)
        if self._masked:
            self._read()  # masks depend on the last tokens; the device computes this step meanwhile
        try:
            sampled = self.sampler.launch(logits, requests, draft_index, greedy_done)
        except Exception as error:
            self._requests = []
            self._read()
            first = [i for i, n in enumerate(draft_index or [0] * len(requests)) if n == 0]
            self._sample_each([requests[i] for i in first], logits[first], error)
            return
        for request in batch.requests:
            request.num_inflight_tokens += 1
        if not again:
            # A request has one row where a token can be in flight while a step is scheduled, that is, without drafts.
            for row, request in enumerate(batch.requests):
                request.row = row
        batch.sampled = True
        self._launched.append((sampled, batch))

    def _read(self, leave: int = 0) -> None:
        """Wait for launched steps except the last `leave` ones, and add their tokens to the requests."""
        while len(self._launched) > leave:
            sampled, batch = self._launched.popleft()
            start = time.perf_counter()
            sampled.wait()
            if batch.decode_only:
                self._spare = self._pause + time.perf_counter() - start
            # Without log-probabilities and drafts, each request has one token.
            if not sampled.reported and len(sampled.requests) == len(batch):
                self._push_each(sampled.requests, sampled.tokens())
                continue
            for chunk, choices in zip(batch, _by_chunk(batch, sampled.read()), strict=True):
                request = chunk.request
                if request.finish_reason is None:  # else it has ended since the step was launched
                    request.num_inflight_tokens -= 1
                    self._push(request, self._verify(chunk, choices) if chunk.drafts else choices)

    def _push_each(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """`_push` of one token to each request, without log-probabilities."""
        count = 0
        for request, token in zip(requests, tokens, strict=True):
            if request.finish_reason is not None:  # it has ended since the step was launched
                continue
            request.num_inflight_tokens -= 1
            if token == UNDEFINED:
                self._end(request, "error", undefined(request))
                continue
            count += 1
            try:
                update = request.push(token)
            except Exception as error:  # raised by the tokenizer or the grammar
                self._end(request, "error", _describe(error))
                continue
            if request.finish_reason is not None:
                self.scheduler.remove(request)
            if update is not None:
                self._updates.append(update)
        self.scheduler.stats.generated_tokens += count

    def _verify(self, chunk: Chunk, choices: Sequence[Choice]) -> Sequence[Choice]:
        """Count the drafts of a chunk that were sampled themselves, up to the first other one, as computed tokens of
        its request; return the choices of these drafts and the one after them.
        """
        pairs = enumerate(zip(chunk.drafts, choices, strict=False))
        accepted = next((i for i, (draft, choice) in pairs if choice.token != draft), len(chunk.drafts))
        chunk.request.num_computed_tokens += accepted
        self.scheduler.stats.accepted_tokens += accepted
        return choices[: accepted + 1]

    def _sample_each(self, requests: Sequence[Request], logits: Tensor, error: Exception) -> None:
        """Sample the rows of a step whose sampling raised one by one. No step is launched."""
        count = 0
        for row, request in zip(logits, requests, strict=True):
            if request.finish_reason is None:
                try:
                    (choice,) = sample(row[None], [request])
                except Exception as own:
                    choice = Choice(None, error=_describe(own))
                count += choice.error is not None
                self._push(request, [choice])
        if not count:
            _warn(len(requests), error)

    def _run_each(self, chunks: Sequence[Chunk], error: Exception) -> ForwardOutput:
        """Compute each chunk of a step that raised alone, and end the requests of chunks that raise again; return what
        was computed of the others.
        """
        # The prefix tree has the pages of the step already, whose contents are undefined now.
        self.scheduler.tree.clear()
        size, done, logits, again = self.runner.page_size, [], [], []
        undefined: set[int] = set()  # pages that were not computed
        for chunk in chunks:
            request, first = chunk.request, chunk.start // size
            written = request.pages[first : -(-(chunk.start + chunk.count) // size)]
            if not undefined.isdisjoint(request.pages[:first]):  # a failed chunk was to compute the prefix
                again.append(request)
                undefined.update(written)
                continue
            try:
                logits.append(self.runner.run([chunk]))
                done.append(chunk)
            except Exception as own:
                undefined.update(written)
                self._end(request, "error", _describe(own))
        for request in reversed(again):
            self.scheduler.compute_again(request)
        if len(done) == len(chunks):
            _warn(len(chunks), error)
        return ForwardOutput(StepBatch.of(done), torch.cat(logits) if logits else torch.empty(0))

    def _push(self, request: Request, choices: Sequence[Choice]) -> None:
        """Add the sampled tokens to a request until it ends; end it with the error of a choice, if there is one."""
        added: list[int] = []
        try:
            for choice in choices:
                if choice.token is None:
                    break
                self.scheduler.stats.generated_tokens += 1
                if choice.logprobs is not None and request.logprobs is not None:
                    request.logprobs.append(choice.logprobs)
                request.add(choice.token)
                added.append(choice.token)
                if request.finish_reason is not None:
                    break
            update = request.update(added) if added else None
        except Exception as error:  # raised by the tokenizer or the grammar
            self._end(request, "error", _describe(error))
            return
        if request.finish_reason is not None:
            self.scheduler.remove(request)
        if update is not None:
            self._updates.append(update)
        if choice.token is None:
            self._end(request, "error", choice.error)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Remove a waiting or running request, which ends for this reason."""
        self.scheduler.remove(request)
        self._updates.append(request.fail(reason, error))


def _by_chunk(batch: StepBatch, choices: Sequence[Choice]) -> Iterable[Sequence[Choice]]:
    """The choices of each chunk: one after its last token, and one after each draft."""
    if len(choices) == len(batch):
        return zip(choices, strict=True)
    ends = accumulate((1 + len(c.drafts) for c in batch), initial=0)
    return (choices[start:end] for start, end in pairwise(ends))


def _token(value: Any) -> int:
    """A token id as int; TypeError for bool and for values that are not integers."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)
