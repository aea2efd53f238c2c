"""The server's side of an engine that runs elsewhere: in another process, or in other threads of this one."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine import Completion, Embedding, EmbeddingParams, SamplingParams
from quire.engine.embedding import NO_OUTPUT
from quire.engine.messages import (
    Cancel,
    Close,
    Frames,
    GetState,
    NumberedUpdate,
    Prepare,
    Prepared,
    PromptLogprobs,
    Start,
    StartEmbedding,
    State,
    StepUpdates,
    ToHost,
    as_error,
    connected_sockets,
    frame,
    receive,
    to_client,
)
from quire.engine.model_info import ModelInfo
from quire.engine.output_text import OutputText
from quire.engine.prompts import PromptReader, TokenRequest
from quire.engine.stats import Stats

if TYPE_CHECKING:
    from quire.engine import LLM


# A number beyond those of all steps.
_NO_STEP = 1 << 62


class EngineEnded(RuntimeError):
    """The process of an engine has ended, although nobody wanted it to."""


Sink = Callable[[int, Completion], None]


class EngineClient:
    """Checks requests, sends them to an engine's host, and makes text of the tokens that come back; for use in one
    event loop.

    Args:
        sock: connected to the host.
        name: of the model.
        info: the model and the engine.
        tokenizer: of the model; None if it has none.
        how_ended: waits for the end of the host's process, and returns how it has ended; None: the host is in this one.

    Attributes:
        name, info: those.
        prompts: checks requests.
        stats: the engine's counts, as `state` has last brought them.
        alive: whether requests are accepted: neither side has ended.
        on_end: called when the host has ended although it was not closed.
        how_ended: that.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        info: ModelInfo,
        tokenizer: Any,
        how_ended: Callable[[], str] | None = None,
    ) -> None:
        self.name, self.info = name, info
        self.prompts = PromptReader(info, tokenizer)
        self.alive, self.stats = True, Stats()
        self.on_end: Callable[[], None] = lambda: None
        self.how_ended = how_ended
        self._sock, self._frames = sock, Frames()
        self._loop: asyncio.AbstractEventLoop | None = None
        # What the system has not taken yet.
        self._unsent: deque[memoryview] = deque()
        # The requests that have not ended, by their numbers, and answers that are waited for, by their keys.
        self._outputs: dict[int, _Output | _EmbeddingOutput] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next = 0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None if it has none."""
        return self.prompts.tokenizer

    def attach(self) -> None:
        """Receive messages in the running event loop from now on; all that sends does so, too."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._sock.setblocking(False)
            self._loop.add_reader(self._sock, self._read)

    def encode(self, prompt: str | Sequence[int], name: str = "prompt") -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer adds to text.

        Raises:
            ValueError: the prompt is neither text nor token ids, or the model has no tokenizer; the message has `name`.
        """
        return self.prompts.encode(prompt, name)

    def start(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], sink: Sink
    ) -> Callable[[], None]:
        """Begin to complete prompts, all at once, and return without waiting.

        Args:
            prompts: tokens.
            params: of each prompt; they all have the same grammar, or none.
            sink: called with the index of a prompt and what a step added to it, with a finish_reason the last time.
                That is "error" if the host ends.

        Returns:
            a function that cancels the requests that have not ended; each gets the finish_reason "cancelled".

        Raises:
            ValueError: a prompt or its params are refused, see `PromptReader.request`.
        """
        pairs = zip(prompts, params, strict=True)
        requests = [self.prompts.request(prompt, p, f"prompt {i}") for i, (prompt, p) in enumerate(pairs)]
        outputs = []
        for i, request in enumerate(requests):
            outputs.append(_Output(i, request, OutputText(request, self.info, self.tokenizer), sink))
        numbers = self._number(outputs)
        self._send(Start(numbers.start, requests))
        return lambda: self._cancel(numbers)

    def start_embedding(
        self, prompts: Sequence[Sequence[int]], params: EmbeddingParams, sink: Callable[[int, Embedding], None]
    ) -> Callable[[], None]:
        """Begin to compute embeddings, all at once, and return without waiting.

        Args:
            prompts: tokens.
            params: of all prompts.
            sink: called once for each prompt, with its index and its embedding.

        Returns:
            as for `start`.

        Raises:
            ValueError: a prompt or the params are refused, see `PromptReader`.
        """
        resolved = self.prompts.embedding_params(params)
        checked = [self.prompts.read(prompt, NO_OUTPUT, f"prompt {i}") for i, prompt in enumerate(prompts)]
        numbers = self._number([_EmbeddingOutput(i, prompt, sink) for i, prompt in enumerate(checked)])
        self._send(StartEmbedding(numbers.start, checked, resolved))
        return lambda: self._cancel(numbers)

    async def prepared(self, params: SamplingParams, compiles: bool) -> bool:
        """Whether the engine has a grammar, so that requests with it start at once.

        Args:
            params: have the grammar.
            compiles: whether to compile it, which takes long, and then return True.

        Raises:
            ImportError, ValueError: the grammar is refused.
            RuntimeError: it could not be compiled.
            ConnectionError: the engine has ended.
        """
        answer: Prepared | None = await self._ask(lambda key: Prepare(key, params, compiles))
        if answer is None:
            raise ConnectionError("the engine has ended")
        if answer.refused is not None:
            raise as_error(answer.refused.kind, answer.refused.message)
        return answer.kept

    async def state(self, after: int = _NO_STEP) -> State:
        """The engine's counts, and its last steps with larger numbers than `after`; no steps if it has ended."""
        answer: State | None = await self._ask(lambda key: GetState(key, after))
        if answer is None:
            return State(0, self.stats, 0.0, [])
        self.stats = answer.stats
        return answer

    def close(self) -> None:
        """End the engine; its requests get the finish_reason "cancelled"."""
        if self.alive:
            self._send(Close())
            self._end("cancelled", None)

    def leave(self) -> None:
        """Close the connection. A process that is the engine's host ends then."""
        self._detach()
        self._end("cancelled", None)
        self.on_end = lambda: None

    async def _ask(self, message: Callable[[int], ToHost]) -> Any:
        """The answer to a message that has a key; None if the engine has ended."""
        if not self.alive:
            return None
        key, self._next = self._next, self._next + 1
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._send(message(key))
        return await answer

    def _number(self, outputs: Sequence[_Output | _EmbeddingOutput]) -> range:
        """The numbers of outputs, which are open from now on."""
        first, self._next = self._next, self._next + len(outputs)
        numbers = range(first, self._next)
        self._outputs.update(zip(numbers, outputs, strict=True))
        return numbers

    def _cancel(self, numbers: Sequence[int]) -> None:
        left = [number for number in numbers if number in self._outputs]
        if left:
            self._send(Cancel(left))
            for number in left:
                self._outputs.pop(number).end("cancelled", None)

    def _send(self, message: ToHost) -> None:
        if not self.alive:
            return
        self.attach()
        self._unsent.append(memoryview(frame(message)))
        if len(self._unsent) == 1:
            self._write()

    def _write(self) -> None:
        """Send what the system takes, and go on when it takes more."""
        assert self._loop is not None
        try:
            while self._unsent:
                part = self._unsent[0]
                sent = self._sock.send(part)
                if sent < len(part):
                    self._unsent[0] = part[sent:]
                    raise BlockingIOError
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._write)
        except OSError:
            # The host has ended, which the next read notices.
            self._unsent.clear()
        else:
            self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data = receive(self._sock)
        except BlockingIOError:
            return
        if not data:
            self._detach()
            self._end("error", "its process has ended")
            return
        for content in self._frames.add(data):
            message = to_client.decode(content)
            if isinstance(message, StepUpdates):
                self._deliver(message.updates)
            elif isinstance(message, PromptLogprobs):
                output = self._outputs.get(message.number)
                if isinstance(output, _Output):
                    output.add_prompt(message)
            elif isinstance(message, (Prepared, State)) and message.key in self._answers:
                answer = self._answers.pop(message.key)
                if not answer.done():
                    answer.set_result(message)

    def _deliver(self, updates: Sequence[NumberedUpdate]) -> None:
        """Pass what a step has produced on to the sinks."""
        stopped = []
        for update in updates:
            output = self._outputs.get(update.number)
            # The requests that have been cancelled, or ended here, may have produced something meanwhile.
            if output is None:
                continue
            ended_there = update.details is not None and update.details.finish_reason is not None
            if output.add(update):
                del self._outputs[update.number]
                if not ended_there:
                    stopped.append(update.number)
        if stopped:
            self._send(Cancel(stopped))

    def _detach(self) -> None:
        if self._sock.fileno() < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._sock.close()

    def _end(self, reason: str, error: str | None) -> None:
        """All requests end, and nobody is to wait for an answer."""
        was_alive, self.alive = self.alive, False
        outputs, self._outputs = self._outputs, {}
        for output in outputs.values():
            output.end(reason, error)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(None)
        if was_alive and reason == "error":
            self.on_end()


def attached(llm: LLM) -> EngineClient:
    """The client of an engine in this process, whose host runs in a thread until the client leaves."""
    from quire.engine.host import EngineHost

    own, other = connected_sockets()
    EngineHost(llm, other).start()
    return EngineClient(own, llm.name, llm.info, llm.model.tokenizer)


class _Output:
    """A request, and what it has produced so far."""

    def __init__(self, index: int, request: TokenRequest, text: OutputText, sink: Sink) -> None:
        self._index, self._prompt = index, request.prompt
        self._text, self._sink = text, sink
        # What is known of the prompt since the first update.
        self._num_cached_tokens = 0
        self._logprobs: list[dict[int, float] | None] | None = None
        self._ranks: list[int | None] | None = None

    def add_prompt(self, part: PromptLogprobs) -> None:
        """Add the log-probabilities of the prompt's next tokens."""
        if self._logprobs is None or self._ranks is None:
            self._logprobs, self._ranks = [], []
        self._logprobs.extend(part.logprobs)
        self._ranks.extend(part.ranks)

    def add(self, update: NumberedUpdate) -> bool:
        """Pass an update on to the sink; return whether it is the last one."""
        details, tokens = update.details, update.token_ids
        if details is None:
            reason = error = logprobs = None
        else:
            reason, error = details.finish_reason, details.error
            logprobs = details.logprobs
            self._num_cached_tokens = max(self._num_cached_tokens, details.num_cached_tokens)
        try:
            text, count, reason = self._text.add(tokens, reason)
        except Exception as raised:
            # The tokenizer has raised.
            text, count = "", len(tokens)
            reason, error = "error", f"{type(raised).__name__}: {raised}"
        if count < len(tokens):
            tokens, logprobs = tokens[:count], logprobs and logprobs[:count]
        self._pass(text, tokens, reason, logprobs, error)
        return reason is not None

    def end(self, reason: str, error: str | None) -> None:
        """End without another token."""
        self._pass("", [], reason, None, error)

    def _pass(
        self,
        text: str,
        tokens: list[int],
        reason: str | None,
        logprobs: list[dict[int, float]] | None,
        error: str | None,
    ) -> None:
        prompt = (self._num_cached_tokens, error, self._logprobs, self._ranks)
        self._sink(self._index, Completion(self._prompt, text, tokens, reason, logprobs, *prompt))


class _EmbeddingOutput:
    """A request for an embedding."""

    def __init__(self, index: int, prompt: list[int], sink: Callable[[int, Embedding], None]) -> None:
        self._index, self._prompt = index, prompt
        self._sink = sink

    def add(self, update: NumberedUpdate) -> bool:
        """Pass the embedding on to the sink; return True, since there is one update."""
        details = update.details
        assert details is not None
        assert details.finish_reason is not None
        values = np.frombuffer(details.values, dtype="<f4")
        known = (details.num_cached_tokens, details.error)
        self._sink(self._index, Embedding(self._prompt, values, details.finish_reason, *known))
        return True

    def end(self, reason: str, error: str | None) -> None:
        """End without an embedding."""
        self._sink(self._index, Embedding(self._prompt, np.empty(0, dtype=np.float32), reason, error=error))
