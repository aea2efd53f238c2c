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

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from quire.engine.adapters.adapter import Adapter
from quire.engine.adapters.registry import AdapterRegistry
from quire.engine.batch import ForwardOutput, StepBatch
from quire.engine.grammar import Grammar, Grammars
from quire.engine.model_info import AdapterInfo, ModelInfo
from quire.engine.multimodal import removed_parts
from quire.engine.parallel.errors import RankError
from quire.engine.params import SamplingParams
from quire.engine.pooling import PooledStates, launch_pooling
from quire.engine.prompt_logprobs import add_prompt_logprobs
from quire.engine.prompts import PromptReader, TokenRequest
from quire.engine.recovery import describe, run_each, sample_each
from quire.engine.report import Reporter
from quire.engine.request import Request, Update
from quire.engine.runner import Runner
from quire.engine.sampler import SampledTokens, Sampler
from quire.engine.scheduler import Scheduler
from quire.engine.stats import Stats
from quire.engine.step_log import StepLog

# Seconds; half of it is enough to wake up and launch a step.
_MIN_SPARE = 4e-3
# Seconds between two looks at copies of adapters, where nothing else is to be done.
_COPY_PAUSE = 2e-4


class Engine:
    """Runs requests step by step and sends updates to their sinks; for use in one thread.

    Args:
        runner: computes steps; `check_runner` has accepted it.
        max_num_seqs, max_batched_tokens: the largest number of running requests, and of tokens of a step.
        depth: 1 to read the results of a step after the next one has been launched, 0 to read them at once; None: as
            the runner wants it, and 0 with drafts, which follow from the results.
        speculative_tokens: the most drafts of a request in a step, see `quire.engine.drafts`.

    Attributes:
        adapters: those that requests can name.
        info: what is known of the model and the engine, also in other processes.
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
        self.stats, self.step_log = Stats(), StepLog()
        sizes = (runner.num_pages, runner.page_size, max_num_seqs, max_batched_tokens, speculative_tokens)
        pool = runner.adapters
        self.scheduler = Scheduler(*sizes, self.stats, None if pool is None else pool.slots)
        self.adapters = AdapterRegistry(pool, self.model.dtype, removed_parts(self.model.network))
        if pool is not None:
            pool.slots.is_named = self.adapters.has
        self.sampler = Sampler(self.model.device, self.scheduler.max_rows)
        self.reporter = Reporter(self.scheduler, self.stats)
        self.info = self._describe()
        # Held while the adapters of `info` are changed.
        self._describing = threading.Lock()
        self.prompts = PromptReader(self.info, self.model.tokenizer)
        self.grammars = Grammars(self.model)
        # The request of each row of the last launched step that samples, and whether any of them has a grammar.
        self._requests: Sequence[Request] = []
        self._has_grammar = False
        # Steps whose results have not been read: their chunks that sample, and the tokens of these.
        self._launched: deque[tuple[StepBatch, SampledTokens]] = deque()
        # Pooled states of launched steps that have not been read.
        self._pooled: deque[PooledStates] = deque()
        self.launch_at = 0.0
        # Seconds from the end of the last `step` to launch_at, and seconds for which the host had nothing to do in the
        # last step of decodes.
        self._pause = self._spare = 0.0

    def _describe(self) -> ModelInfo:
        model, runner = self.model, self.runner
        return ModelInfo(
            folder=str(model.folder),
            vocab_size=model.vocab_size,
            context=model.context,
            max_len=min(model.context, runner.num_pages * runner.page_size),
            max_num_seqs=self.scheduler.max_num_seqs,
            end_ids=model.end_ids,
            media_tokens=model.media_tokens,
            default_params=model.default_params,
            runner=type(runner).__name__,
            supports_all_logits=runner.supports_all_logits,
            is_headless=model.is_headless,
            embedding_size=model.hidden_states.size,
            pooling=model.pooling,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            max_adapters=0 if runner.adapters is None else runner.adapters.tables.num_slots,
        )

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._launched)

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        sink: Callable[[Update], None],
        name: str = "prompt",
        grammar: Grammar | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Make a request and check it; the model's defaults replace parameters that are left out. A grammar that has
        been prepared is used if it is that of the parameters. `adapter` is the name of one, None for none.

        Raises:
            ImportError: the request has a grammar, and llguidance is not installed.
            ValueError: the prompt is refused (`PromptReader.read`); the message has `name`. Or the grammar is not one,
                other parameters do not fit the model or the runner, or the adapter is not known; the message has the
                attribute of `params`, or `adapter`.
        """
        return self.make(self.prompts.request(prompt, params, name, adapter), sink, grammar)

    def make(
        self,
        checked: TokenRequest,
        sink: Callable[[Update], None],
        grammar: Grammar | None = None,
        text: bool = True,
    ) -> Request:
        """Make a request that has been checked.

        Args:
            checked: the tokens and parameters.
            sink, grammar: as for `request`.
            text: whether its output becomes text; otherwise no stop string ends it.

        Raises:
            ImportError, ValueError: the grammar is refused, as for `request`, or there is no such adapter any more.
        """
        params, model = checked.params, self.model
        adapter = None if checked.adapter is None else self.adapters.get(checked.adapter)
        if grammar is None or grammar.constraint != params.constraint:
            grammar = self.grammars.prepare(params)
        tokenizer = model.tokenizer if text else None
        known = (checked.prompt, params, tokenizer, model.end_ids)
        request = Request(*known, sink, grammar, checked.bad_words, adapter)
        request.max_total_tokens = min(request.max_total_tokens, self.info.max_len)
        return request

    def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Read an adapter in the thread of the caller, which may be any; see `LLM.load_adapter`."""
        info = self.adapters.load(name, folder)
        self._update_info()
        return info

    def unload_adapter(self, name: str) -> Adapter | None:
        """Forget the name of an adapter, in any thread; return it if `drop_adapter` should follow."""
        adapter = self.adapters.unload(name)
        self._update_info()
        return adapter

    def _update_info(self) -> None:
        """Report the adapters to those who check requests. When this returns, all listeners know them."""
        with self._describing:
            self.info = self.prompts.info = replace(self.info, adapters=self.adapters.infos)
            for listener in self.reporter.listeners:
                listener.adapters_changed()

    def drop_adapter(self, adapter: Adapter) -> None:
        """Evict an adapter without a name from the device, now or when the last request that runs with it has ended."""
        if self.scheduler.adapters is not None:
            self.scheduler.adapters.discard(adapter)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        if request.prompt_len == request.num_unneeded_tokens:
            # There is nothing to compute.
            self.reporter.end(request, "length")
            self._send()

    def cancel(self, request: Request) -> None:
        """Cancel a waiting or running request."""
        if request.finish_reason is None:
            self.reporter.end(request, "cancelled")
            self._send()

    def step(self) -> None:
        """Launch one step, and send the updates of the step before it (with depth 0, its own) to the sinks of its
        requests. An exception that one request causes ends that request with finish_reason "error" and a description;
        an exception without a known cause ends all requests.

        Raises:
            RankError: another process that computes a part of the model has ended. So have all requests.
        """
        try:
            batch = self.scheduler.schedule()
            if batch:
                self.step_log.launch(batch)
                self._sample(self._forward(batch))
            unread = self.depth if batch else 0
            self._read(unread)
            self._read_pooled(unread)
            self._send()
        except Exception as error:
            self._launched.clear()
            self._pooled.clear()
            self.reporter.end_all(describe(error))
            self._send()
            if isinstance(error, RankError):
                raise
        finally:
            if not self._launched:
                # It was measured with other requests than the next ones, whose first tokens must not wait for it.
                self._spare = 0.0
            self._pause = self._spare / 2 if self._spare > _MIN_SPARE else 0.0
            if self.scheduler.waiting and not self.scheduler.running and not self._launched:
                # The waiting requests wait for the copies of their adapters.
                self._pause = _COPY_PAUSE
            self.launch_at = time.perf_counter() + self._pause

    def check_ranks(self) -> None:
        """End all requests and raise a RankError if another process that computes a part of the model has ended."""
        if self.runner.leader is None:
            return
        try:
            self.runner.leader.check()
        except RankError as error:
            self.reporter.end_all(describe(error))
            self._send()
            raise

    def close(self) -> None:
        """End the other processes that compute parts of the model."""
        if self.runner.leader is not None:
            self.runner.leader.close()

    def _forward(self, batch: StepBatch) -> ForwardOutput:
        """Start to compute a step; return the chunks that sample, and their logits."""
        try:
            output = self.runner.forward(batch, self.sampler.last)
        except RankError:
            raise
        except Exception as error:
            self._read()
            chunks = [c for c in batch if c.request.finish_reason is None]
            output = run_each(chunks, error, self.runner, self.scheduler, self.reporter)
        self.stats.steps += 1
        output.batch.count_computed()
        if output.batch.decode_only:
            return output
        logits = add_prompt_logprobs(output.batch, output.logits)
        pooled = launch_pooling(self.stats.steps, output.batch, output.hidden)
        if pooled is not None:
            self._pooled.append(pooled)
        for request in [r for r in output.batch.requests if r.num_unneeded_tokens]:
            if request.num_computed_tokens == request.prompt_len - request.num_unneeded_tokens:
                self.reporter.end(request, "length")
        # Tokens that the forward pass has sampled are those of its own rows.
        greedy_done = output.greedy_done and logits is output.logits
        return ForwardOutput(output.batch.sampling(), logits, greedy_done)

    def _sample(self, output: ForwardOutput) -> None:
        """Start to sample the tokens of a step."""
        batch, logits = output.batch, output.logits
        if not batch:
            return
        requests, draft_index = batch.sampled_rows()
        is_same = requests is self._requests
        if not is_same:
            self._requests, self._has_grammar = requests, any(r.matcher is not None for r in requests)
        if self._has_grammar:
            # Masks depend on the last tokens. The device computes this step meanwhile.
            self._read()
        try:
            sampled = self.sampler.launch(logits, requests, draft_index, output.greedy_done)
        except Exception as error:
            self._requests = []
            self._read()
            first = [i for i, n in enumerate(draft_index or [0] * len(requests)) if n == 0]
            sample_each([requests[i] for i in first], logits[first], error, self.reporter)
            return
        for request in batch.requests:
            request.num_total_tokens += 1
        if not is_same:
            # A request has one row where a token can be in flight while a step is scheduled, that is, without drafts.
            for row, request in enumerate(batch.requests):
                request.row = row
        batch.sampled = True
        self._launched.append((batch, sampled))

    def _read(self, leave: int = 0) -> None:
        """Wait for launched steps except the last `leave` ones, and add their tokens to the requests."""
        while len(self._launched) > leave:
            batch, sampled = self._launched.popleft()
            start = time.perf_counter()
            with self._waiting():
                sampled.wait()
            if batch.decode_only:
                self._spare = self._pause + time.perf_counter() - start
            self.reporter.report(batch, sampled)

    def _waiting(self) -> AbstractContextManager[None]:
        """A context in which the thread waits for the device, and perhaps for those of other processes."""
        return nullcontext() if self.runner.leader is None else self.runner.leader.waiting()

    def _read_pooled(self, leave: int) -> None:
        """Wait for the embeddings of all launched steps but the last `leave` ones, and end their requests."""
        while self._pooled and self._pooled[0].step <= self.stats.steps - leave:
            with self._waiting():
                done = self._pooled.popleft().read()
            for request in done:
                if np.isfinite(request.values).all():
                    self.reporter.end(request, "stop")
                else:
                    self.reporter.end(request, "error", "the model's hidden states are not finite")

    def _send(self) -> None:
        """Send the updates of the requests to their sinks. This is the last thing that a step does, and all counts, the
        pages and the step log include its tokens by then, so that they agree with what the sinks' readers know.
        """
        self.step_log.read(len(self._launched))
        self.reporter.send()
