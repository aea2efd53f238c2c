"""The server's side of an engine that runs elsewhere: in another process, or in other threads of this one."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine import Embedding, EmbeddingParams, SamplingParams
from quire.engine.embedding import NO_OUTPUT
from quire.engine.messages import (
    AdapterChanged,
    Adapters,
    Cancel,
    Close,
    Frames,
    GetState,
    LoadAdapter,
    NumberedUpdate,
    Prepare,
    Prepared,
    PromptLogprobs,
    Start,
    StartEmbedding,
    State,
    StepUpdates,
    ToHost,
    UnloadAdapter,
    as_error,
    connected_sockets,
    frame,
    receive,
    to_client,
)
from quire.engine.model_info import AdapterInfo, ModelInfo
from quire.engine.output_text import OutputText
from quire.engine.prompts import PromptReader
from quire.engine.stats import Stats
from quire.server.request_outputs import EmbeddingOutput, RequestOutput, Sink

if TYPE_CHECKING:
    from quire.engine import LLM


# A number beyond those of all steps.
_NO_STEP = 1 << 62


class EngineEnded(RuntimeError):
    """The process of an engine has ended, although nobody wanted it to."""


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
        name, info: as given; `info` is replaced when adapters have come or gone.
        prompts: checks requests.
        stats: the engine's counts, as `state` has last brought them.
        alive: whether requests are accepted: neither side has ended.
        on_adapters: called with the adapters when some have come or gone, by whichever client.
        on_end: called when the host has ended although it was not closed.
        how_ended: as given.
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
        self.on_adapters: Callable[[tuple[AdapterInfo, ...]], None] = lambda infos: None
        self.how_ended = how_ended
        self._sock, self._frames = sock, Frames()
        self._loop: asyncio.AbstractEventLoop | None = None
        # What the system has not taken yet.
        self._unsent: deque[memoryview] = deque()
        # The requests that have not ended, by their numbers, and answers that are waited for, by their keys.
        self._outputs: dict[int, RequestOutput | EmbeddingOutput] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next = 0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None if it has none."""
        return self.prompts.tokenizer

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests can name."""
        return self.info.adapters

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
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        sink: Sink,
        adapter: str | None = None,
    ) -> Callable[[], None]:
        """Begin to complete prompts, all at once, and return without waiting.

        Args:
            prompts: tokens.
            params: of each prompt; they all have the same grammar, or none.
            sink: called with the index of a prompt and what a step added to it, with a finish_reason the last time.
                That is "error" if the host ends.
            adapter: the name of that of all prompts; None: the model alone.

        Returns:
            a function that cancels the requests that have not ended; each gets the finish_reason "cancelled".

        Raises:
            ValueError: a prompt, its params or the adapter are refused, see `PromptReader.request`.
        """
        pairs = zip(prompts, params, strict=True)
        requests = [self.prompts.request(prompt, p, f"prompt {i}", adapter) for i, (prompt, p) in enumerate(pairs)]
        outputs = []
        for i, request in enumerate(requests):
            outputs.append(RequestOutput(i, request, OutputText(request, self.info, self.tokenizer), sink))
        numbers = self._number(outputs)
        self._send(Start(numbers.start, requests))
        return lambda: self._cancel(numbers)

    def start_embedding(
        self,
        prompts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        sink: Callable[[int, Embedding], None],
        adapter: str | None = None,
    ) -> Callable[[], None]:
        """Begin to compute embeddings, all at once, and return without waiting.

        Args:
            prompts: tokens.
            params: of all prompts.
            sink: called once for each prompt, with its index and its embedding.
            adapter: as for `start`.

        Returns:
            as for `start`.

        Raises:
            ValueError: a prompt, the params or the adapter are refused, see `PromptReader`.
        """
        self.prompts.check_adapter(adapter)
        resolved = self.prompts.embedding_params(params)
        checked = [self.prompts.read(prompt, NO_OUTPUT, f"prompt {i}") for i, prompt in enumerate(prompts)]
        numbers = self._number([EmbeddingOutput(i, prompt, sink) for i, prompt in enumerate(checked)])
        self._send(StartEmbedding(numbers.start, checked, resolved, adapter))
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

    async def load_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Load an adapter, as `LLM.load_adapter` does, while requests go on. All clients know it then.

        Args:
            folder: as the host's process sees it.

        Raises:
            OSError, ValueError: as for that.
            ConnectionError: the engine has ended.
        """
        answer = await self._change_adapters(lambda key: LoadAdapter(key, name, str(folder)))
        assert answer.info is not None
        return answer.info

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, as `LLM.unload_adapter` does: its requests keep it, new ones of all clients are refused.

        Raises:
            ValueError: there is no adapter of this name.
            ConnectionError: the engine has ended.
        """
        await self._change_adapters(lambda key: UnloadAdapter(key, name))

    async def _change_adapters(self, message: Callable[[int], ToHost]) -> AdapterChanged:
        answer: AdapterChanged | None = await self._ask(message)
        if answer is None:
            raise ConnectionError("the engine has ended")
        if answer.refused is not None:
            raise as_error(answer.refused.kind, answer.refused.message)
        return answer

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

    def _number(self, outputs: Sequence[RequestOutput | EmbeddingOutput]) -> range:
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
                if isinstance(output, RequestOutput):
                    output.add_prompt(message)
            elif isinstance(message, Adapters):
                self.info = self.prompts.info = replace(self.info, adapters=message.infos)
                self.on_adapters(message.infos)
            elif isinstance(message, (Prepared, State, AdapterChanged)) and message.key in self._answers:
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
