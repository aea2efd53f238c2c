"""The loop: schedule, compute, sample, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

from quire.engine.params import SamplingParams
from quire.engine.request import Request, Update
from quire.engine.runner import Runner
from quire.engine.sampler import sample
from quire.engine.scheduler import Scheduler


class Engine:
    """Requests in, updates out, one step at a time; for one thread.

    Args:
        runner: computes steps.
        max_num_seqs, max_batched_tokens: of a step.
    """

    def __init__(self, runner: Runner, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.runner, self.model = runner, runner.model
        runner.warm_up()
        self.scheduler = Scheduler(runner.num_pages, runner.page_size, max_num_seqs, max_batched_tokens)
        self.max_len = min(self.model.context, runner.num_pages * runner.page_size)

    def request(
        self, prompt: str | Sequence[int], params: SamplingParams, sink: Callable[[Update], None], name: str = "prompt"
    ) -> Request:
        """A request, checked.

        Raises:
            ValueError: an empty prompt, one that leaves no room for a token, or unknown tokens; `name` says which.
        """
        tokens = self._tokens(prompt, name)
        if not tokens:
            raise ValueError(f"{name} is empty: there must be at least one token")
        bad = next((t for t in tokens if not 0 <= t < self.model.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name} has token {bad}: tokens are 0 to {self.model.vocab_size - 1}")
        if len(tokens) >= self.model.context:
            raise ValueError(
                f"{name} has {len(tokens)} tokens: the model's context of {self.model.context} leaves no room"
            )
        if len(tokens) >= self.max_len:
            raise ValueError(f"{name} has {len(tokens)} tokens: the cache of {self.max_len} tokens leaves no room")
        if self.model.tokenizer is None and params.stop:
            raise ValueError(f"{name} has stop strings, but {self.model.folder} has no tokenizer")
        return Request(tokens, params, self.model.tokenizer, self.model.end_ids, sink)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request now, wherever it is."""
        if request.finish_reason is None:
            self.scheduler.remove(request)
            request.sink(request.fail("cancelled"))

    def step(self) -> None:
        """One step; updates go to the requests' sinks. If computing fails, every request ends with the error."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return
        try:
            logits = self.runner.run(chunks)
            sampling = [c.request for c in chunks if c.samples]
            choices = sample(logits, sampling) if sampling else []
        except Exception as error:
            for request in self.scheduler.reset():
                request.sink(request.fail("error", f"{type(error).__name__}: {error}"))
            return
        for chunk in chunks:
            chunk.request.computed = chunk.start + chunk.count
        self.scheduler.stats.steps += 1
        for request, choice in zip(sampling, choices, strict=True):
            if choice.token is None:
                update = request.fail("error", "the model's logits are not finite")
            else:
                self.scheduler.stats.generated_tokens += 1
                if request.logprobs is not None and choice.logprobs is not None:
                    request.logprobs.append(choice.logprobs)
                update = request.push(choice.token, self.max_len)
            if request.finish_reason is not None:
                self.scheduler.remove(request)
            request.sink(update)

    def _tokens(self, prompt: str | Sequence[int], name: str) -> list[int]:
        if isinstance(prompt, str):
            if self.model.tokenizer is None:
                raise ValueError(f"{name} is a string, but {self.model.folder} has no tokenizer: pass token ids")
            return self.model.tokenizer(prompt)["input_ids"] if prompt else []
        try:
            return [index(t) for t in prompt]
        except TypeError:
            raise ValueError(f"{name} must be a string or a sequence of token ids") from None
