"""Between HTTP and the engine: admits completions, counts them, and hands their parts to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

from quire.engine import Completion, Embedding, SamplingParams
from quire.engine.completion import NO_TOKEN
from quire.engine.model_info import AdapterInfo
from quire.engine.prompt_size import check_size, context_length, longest_token
from quire.engine.text import TokenBytes
from quire.server.counts import Counts
from quire.server.engine_client import EngineClient
from quire.server.errors import ApiError, bad, invalid
from quire.server.limits import ServerLimits
from quire.server.metrics import Metrics
from quire.server.tokens import text_name

# Characters of texts that are tokenized in milliseconds.
_SHORT = 1 << 16


class Service:
    """One engine that requests share; for use in one event loop.

    Args:
        engine: the engine.
        names: of the model.
        limits: what is accepted at most.
        counts: where the server counts.
        metrics_prefix: of the metrics' names.

    Attributes:
        name: the first of the names, which answers have.
        metrics: what is reported of the counts.
        connections: the open ones of each process, if there are several.
        started, created: the time of the server's start, in seconds since 1970, as float and as int.
    """

    def __init__(
        self, engine: EngineClient, names: Sequence[str], limits: ServerLimits, counts: Counts, metrics_prefix: str
    ) -> None:
        self.engine, self.limits = engine, limits
        self.names, self.name = tuple(names), names[0]
        self.counts, self.metrics = counts, Metrics(engine, counts, names[0], metrics_prefix)
        self.started = counts.started
        self.created = int(self.started)
        self._adapters: dict[str, AdapterInfo] = {}
        self._set_adapters(engine.adapters)
        engine.on_adapters = self._receive_adapters
        # The lists of adapters that this process has received: the engine sends each list to all processes.
        self._num_adapter_lists = counts.allocate()
        self._running, self._waiting_grammars = counts.allocate(), counts.allocate()
        self._draining, self.connections = counts.allocate(), counts.allocate()
        self.capacity = engine.info.max_num_seqs + limits.max_queue
        self._compiling: dict[tuple[str, str] | None, asyncio.Future[bool]] = {}
        # Long texts take seconds: they are tokenized one at a time, and short ones do not wait for them.
        self._short_texts = ThreadPoolExecutor(2, "quire-short-texts")
        self._long_texts = ThreadPoolExecutor(1, "quire-long-texts")
        self._longest_token = longest_token(engine.tokenizer)
        self.token_bytes = lru_cache(1 << 16)(lambda token: self._token_bytes(token))

    def _set_adapters(self, infos: tuple[AdapterInfo, ...]) -> None:
        """Replace the adapters that requests can name."""
        self._adapters = {info.name: info for info in infos}
        self.metrics.adapters.set_names(infos)

    def _receive_adapters(self, infos: tuple[AdapterInfo, ...]) -> None:
        self._set_adapters(infos)
        self._num_adapter_lists.add(1)

    async def wait_for_all_processes(self) -> None:
        """Wait until requests to all processes of the server can name the adapters that this one has."""
        counts = self._num_adapter_lists
        received = counts.local[0]
        while min(counts.others(), default=received) < received and self.engine.alive and not self.draining:
            await asyncio.sleep(0.001)

    @property
    def running(self) -> int:
        """Completions that the server has admitted and that have not ended."""
        return self._running.total

    def count_running(self, change: int) -> None:
        """Count completions that this process has admitted, or, as a negative number, that have ended."""
        self._running.add(change)

    @property
    def draining(self) -> bool:
        """Whether the server is being shut down and admits nothing."""
        return self._draining.total > 0

    def drain(self) -> None:
        """Admit nothing from now on, in any process."""
        self._draining.local[0] = 1

    def check_model(self, model: str | None) -> AdapterInfo | None:
        """The adapter that a request names as its model; None: the model alone. An ApiError if it names another one."""
        if model is None or model in self.names:
            return None
        if model not in self._adapters:
            shown = " or ".join(map(repr, self.names))
            raise ApiError(404, f"there is no model {model!r}: this is {shown}", "model", "model_not_found")
        return self._adapters[model]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; an ApiError if there is none."""
        if self.engine.tokenizer is None:
            raise bad(None, f"{self.name} has no tokenizer, which this request needs")
        return self.engine.tokenizer

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a request, prompt and output."""
        return self.engine.info.max_len

    def now(self) -> int:
        """The time of an answer, in seconds since 1970."""
        return int(time.time())

    async def encode(
        self, prompt: str | Sequence[int], name: str, any_length: bool = False, field: str = "prompt"
    ) -> list[int]:
        """The tokens of a prompt.

        Args:
            prompt: text or tokens.
            name: of the prompt in messages.
            field: the request's field that has the prompt.
            any_length: whether text that cannot fit is tokenized, too, since the caller counts or cuts the tokens.

        Raises:
            ApiError: the prompt is not text, or text that cannot fit.
        """
        if not isinstance(prompt, str):
            # `start` refuses token ids that the model does not have.
            return list(prompt)
        try:
            return await self.tokenize(partial(self.engine.encode, name=name), prompt, name, field, any_length)
        except ValueError as error:
            raise invalid(error, field) from None

    async def tokenize(
        self, encode: Callable[[str], list[int]], text: str, name: str, field: str, any_length: bool
    ) -> list[int]:
        """`encode(text)`, in a thread. Unless it may have any length, text that cannot fit is refused before."""
        if not any_length:
            try:
                check_size(text, name, self._longest_token, self.max_len)
            except ValueError as error:
                raise bad(field, str(error), "context_length_exceeded") from None
        pool = self._short_texts if len(text) <= _SHORT else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(pool, encode, text)

    async def prepare(self, params: SamplingParams, field: str) -> None:
        """Have `start` find what takes long to make: the tokens of bad words, and the engine's grammar of completions.
        The grammar may be refused.

        Raises:
            ApiError: the grammar is refused, or too many others wait to be compiled.
        """
        if params.bad_words and self.engine.tokenizer is not None:
            try:
                await asyncio.to_thread(self.engine.prompts.word_tokens, params)
            except ValueError as error:
                raise invalid(error) from None
        if params.constraint is None:
            return
        try:
            if not await self.engine.prepared(params, compiles=False):
                await self._compile(params)
        except (ImportError, ValueError) as error:
            raise bad(field, f"{field}: {error}") from None
        except ConnectionError:
            raise self.ended() from None

    async def _compile(self, params: SamplingParams) -> None:
        key = params.constraint
        work = self._compiling.get(key)
        if work is None:
            if self.draining:
                raise self.ended()
            max_waiting, waiting = self.limits.max_grammars, self._waiting_grammars.total
            if waiting >= max_waiting:
                message = f"{waiting} grammars wait to be compiled, and {max_waiting} are the most"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            work = self._compiling[key] = asyncio.ensure_future(self.engine.prepared(params, compiles=True))
            self._waiting_grammars.add(1)
            # Counted until it has been compiled, also if the requests are closed before.
            work.add_done_callback(partial(self._compiled, key))
        # Other requests may wait for the same grammar, so that the end of one must not cancel it.
        await asyncio.shield(work)

    def _compiled(self, key: tuple[str, str] | None, work: asyncio.Future[bool]) -> None:
        del self._compiling[key]
        self._waiting_grammars.add(-1)
        if not work.cancelled():
            # asyncio logs exceptions that nobody has retrieved.
            work.exception()

    def start(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        field: str,
        requested: tuple[str, int] | None = None,
        model: str | None = None,
    ) -> Generation:
        """Begin to complete prompts, each once for every element of params.

        Args:
            prompts: tokens.
            params: of each completion of a prompt.
            field: the request's field that has the prompts.
            requested: the field with the largest number of tokens of a completion, and its value, which must fit into
                the context beside the prompt; None: there is no such field, and completions have as many tokens as fit,
                at most those of params.
            model: that the request names, which may be an adapter.

        Raises:
            ApiError: a prompt is invalid or too long, there is no room, or there is no such model any more.
        """
        count = len(prompts) * len(params)
        if not count:
            raise bad(field, f"{field} is empty: there must be at least one prompt")
        if count > self.capacity:
            raise bad("n", f"the request is for {count} completions: this server holds {self.capacity} at most")
        for i, prompt in enumerate(prompts):
            name = f"{field} {i}" if len(prompts) > 1 else field
            self.check_length(name, prompt, requested, 0 if params[0].max_tokens == 0 else 1, field)
        self.check_room(count)
        return Generation(self, prompts, params, field, self.check_model(model))

    def check_room(self, count: int) -> None:
        """Raise the ApiError if `count` more completions cannot be admitted now."""
        if self.draining or not self.engine.alive:
            raise self.ended()
        running = self.running
        if running + count > self.capacity:
            self.metrics.rejected.inc(count)
            message = f"{running} completions are running or waiting, and the server holds {self.capacity} at most"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    def fail_all(self) -> None:
        """End the engine, and thereby all requests, which are answered with an error."""
        self.drain()
        self.engine.close()

    def ended(self) -> ApiError:
        """Why no requests are accepted any more."""
        return _unavailable("the server is being shut down" if self.draining else "the engine has ended")

    def check_length(
        self, name: str, prompt: list[int], requested: tuple[str, int] | None, min_tokens: int, field: str
    ) -> None:
        """Raise the ApiError for a prompt that is empty or too long; the arguments are those of `start`, and the fewest
        tokens of a completion.
        """
        capacity = self.max_len - len(prompt)
        if not prompt:
            raise bad(field, f"{name} is empty: there must be at least one token")
        if capacity < min_tokens or (requested and requested[1] > capacity):
            what = f" and {requested[0]} is {requested[1]}" if requested else ""
            message = f"{name} has {len(prompt)} tokens{what}: {context_length(self.max_len)}"
            raise bad(
                field if capacity < min_tokens or not requested else requested[0], message, "context_length_exceeded"
            )

    def token_name(self, token: int) -> str:
        """The name by which reports have a token."""
        return text_name(self.token_bytes(token))

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)


class Generation:
    """The completions of one HTTP request, which the engine works on until `close`.

    Iteration yields the index of a completion and what one step added to it, or several steps if the reader is late;
    completion j of prompt i has the index `i * len(params) + j`. An ApiError is raised when a completion fails.

    Attributes:
        model: the name that the answer has: that of the adapter, or of the model.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        params: list[SamplingParams],
        field: str,
        adapter: AdapterInfo | None = None,
    ) -> None:
        self._service, self._arrival = service, time.perf_counter()
        self._adapter, self.model = adapter, service.name if adapter is None else adapter.name
        self.prompts, self.count = prompts, len(prompts) * len(params)
        self.output_tokens, self.cached_tokens = 0, [0] * len(prompts)
        self._open = set(range(self.count))
        self._last = [self._arrival] * self.count
        self._tokens = [0] * self.count
        # The parts that have not been read.
        self._parts: list[tuple[int, Completion]] = []
        # The reader waits for it, if there is nothing to read.
        self._arrival_of_more: asyncio.Future[None] | None = None
        repeated = [prompt for prompt in prompts for _ in params]
        try:
            name = None if adapter is None else adapter.name
            self._cancel = service.engine.start(repeated, params * len(prompts), self._add, name)
        except ValueError as error:
            raise invalid(error, field) from None
        service.count_running(self.count)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Completion]]:
        async for late in self._arrivals():
            parts = _merged(late)
            if len(parts) < len(late):
                self._service.metrics.late.inc(len(late) - len(parts))
            for index, part in parts:
                check_end(part)
                yield index, part

    async def steps(self) -> AsyncIterator[tuple[int, Completion]]:
        """What iteration yields, but each step on its own however late the reader is, for readers that count tokens by
        the text that comes with them.
        """
        async for late in self._arrivals():
            for index, part in late:
                check_end(part)
                yield index, part

    async def _arrivals(self) -> AsyncIterator[list[tuple[int, Completion]]]:
        """The parts that have arrived since the last time, until all completions have ended."""
        left = self.count
        while left:
            if not self._parts:
                self._arrival_of_more = asyncio.get_running_loop().create_future()
                await self._arrival_of_more
            late, self._parts = self._parts, []
            left -= sum(part.finish_reason is not None for _, part in late)
            yield late

    def close(self) -> None:
        """Cancel the completions that have not ended."""
        if self._open:
            self._cancel()

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and of the completions so far."""
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.output_tokens,
            "total_tokens": prompt + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens)},
        }

    def usage_of(self, index: int, tokens: int) -> dict[str, Any]:
        """Tokens of the prompt of a completion, and of the completion, which has `tokens` so far."""
        prompt = len(self.prompts[index * len(self.prompts) // self.count])
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _add(self, index: int, part: Completion) -> None:
        """Count a part, which a completion that was closed has, too, and keep it for the reader."""
        metrics, now = self._service.metrics, time.perf_counter()
        samples = self.count // len(self.prompts)
        if part.token_ids:
            histogram = metrics.inter_token if self._tokens[index] else metrics.first_token
            histogram.observe(now - self._last[index])
            self._last[index] = now
            self._tokens[index] += len(part.token_ids)
            self.output_tokens += len(part.token_ids)
        if index % samples == 0:
            self.cached_tokens[index // samples] = part.num_cached_tokens
        if part.finish_reason is not None:
            self._open.discard(index)
            self._service.count_running(-1)
            metrics.ended[part.finish_reason].inc()
            metrics.whole.observe(now - self._arrival)
            metrics.prompt.observe(len(part.prompt_token_ids))
            metrics.output.observe(self._tokens[index])
            if self._adapter is not None:
                metrics.adapters.add(self._adapter, len(part.prompt_token_ids), self._tokens[index])
        self._parts.append((index, part))
        waited_for, self._arrival_of_more = self._arrival_of_more, None
        # The reader may have been cancelled.
        if waited_for is not None and not waited_for.done():
            waited_for.set_result(None)


def _merged(parts: list[tuple[int, Completion]]) -> list[tuple[int, Completion]]:
    """Parts with those of the same completion put together."""
    if len(parts) == 1:
        return parts
    whole: dict[int, Completion] = {}
    for index, part in parts:
        before = whole.get(index)
        if before is not None:
            logprobs = [*(before.logprobs or []), *(part.logprobs or [])] or None
            text, ids = before.text + part.text, before.token_ids + part.token_ids
            part = replace(part, text=text, token_ids=ids, logprobs=logprobs)
        whole[index] = part
    return list(whole.items())


def check_end(part: Completion | Embedding) -> None:
    """Raise the ApiError for the part of a completion, or an embedding, that says that it failed."""
    if part.finish_reason == "error":
        if part.error == NO_TOKEN:
            raise bad(None, NO_TOKEN, "no_possible_token")
        raise ApiError(500, f"the engine failed: {part.error}", code="engine_error")
    if part.finish_reason == "cancelled":
        raise _unavailable("the server was shut down before the completion had ended")


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "10"})
