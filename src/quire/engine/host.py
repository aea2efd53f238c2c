"""The engine's side of a server in another process: takes its messages, and sends one for each step of the engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from quire.engine.embedding_request import EmbeddingRequest
from quire.engine.grammar import Grammar
from quire.engine.llm import LLM
from quire.engine.messages import (
    AdapterChanged,
    Adapters,
    Cancel,
    Details,
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
    ToClient,
    ToHost,
    UnloadAdapter,
    as_failed,
    frame,
    receive,
    to_host,
)
from quire.engine.params import SamplingParams
from quire.engine.request import Request, Update

# Tokens of a prompt whose log-probabilities are sent at once.
_PART = 512


class EngineHost:
    """Serves one client over a socket until either side ends; then the client's requests are cancelled.

    A thread reads messages and makes requests. The engine's thread sends what its steps have produced; where the client
    does not read, it waits. Grammars are compiled in a third thread, one at a time,
    and adapters are loaded in a fourth.

    Args:
        llm: has the engine.
        sock: connected to the client.

    Attributes:
        ended: set when the client has left, or the engine has ended.
        closed: whether the client has ended the engine, or has left.
    """

    def __init__(self, llm: LLM, sock: socket.socket) -> None:
        self._llm, self._sock = llm, sock
        self.ended, self.closed = threading.Event(), False
        self._engine_has_ended = False
        self._sending = threading.Lock()
        # The requests that have not ended, by their numbers, and the numbers of those that have sent nothing yet.
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._silent: set[int] = set()
        # The numbers of requests that wait for their grammar, without those that have been cancelled.
        self._delayed: set[int] = set()
        # The updates of the current step so far; only the engine's thread uses them.
        self._updates: list[Update] = []
        self._compiler = ThreadPoolExecutor(1, "quire-grammars")
        self._loader = ThreadPoolExecutor(1, "quire-adapters")
        self._stop_listening = llm.listen(self)

    def start(self, received: Frames | None = None) -> None:
        """Serve the client, in a thread; `received` has the bytes of incomplete messages that were read before."""
        threading.Thread(target=self._serve, args=(received or Frames(),), name="quire-host", daemon=True).start()

    def updates_sent(self) -> None:
        """Send what a step has added to the requests of the client."""
        if self._updates:
            message = StepUpdates([self._numbered(update) for update in self._updates])
            self._updates.clear()
            self._send(message)

    def engine_ended(self) -> None:
        """End the connection."""
        self._engine_has_ended = True
        self._end()

    def adapters_changed(self) -> None:
        """Send the adapters that requests can name."""
        self._send(Adapters(self._llm.adapters))

    def _serve(self, frames: Frames) -> None:
        while data := receive(self._sock):
            for content in frames.add(data):
                self._handle(to_host.decode(content))
        self.closed = self.closed or not self._engine_has_ended
        self._stop_listening()
        self._end_threads()
        self._llm.cancel(list(self._requests.values()))
        self._end()
        self._sock.close()

    def _handle(self, message: ToHost) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, StartEmbedding):
            self._start_embedding(message)
        elif isinstance(message, Cancel):
            self._delayed.difference_update(message.numbers)
            self._llm.cancel([r for n in message.numbers if (r := self._requests.get(n)) is not None])
        elif isinstance(message, GetState):
            log = self._llm.step_log
            self._send(State(message.key, self._llm.stats, log.now, log.steps(message.after)))
        elif isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._loader.submit(self._change_adapters, message)
        else:
            self.closed = True
            self._end_threads()
            self._llm.close()

    def _end_threads(self) -> None:
        for pool in (self._compiler, self._loader):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, message: Start) -> None:
        """Begin to complete requests. If their grammar is not kept any more, they wait until it is compiled."""
        params = message.requests[0].params
        try:
            grammar = self._llm.prepared(params)
        except ValueError as error:
            self._refuse(message, error)
            return
        if params.constraint is None or grammar is not None:
            self._begin(message, grammar)
            return
        self._delayed.update(_numbers(message))
        self._compiler.submit(self._start_later, message)

    def _start_later(self, message: Start) -> None:
        if not self._delayed.issuperset(_numbers(message)):
            return
        try:
            self._begin(message, self._llm.prepare(message.requests[0].params))
        except (ImportError, ValueError, RuntimeError) as error:
            self._refuse(message, error)
        self._delayed.difference_update(_numbers(message))

    def _begin(self, message: Start, grammar: Grammar | None) -> None:
        try:
            requests = self._llm.token_requests(message.requests, self._updates.append, grammar)
        except (ImportError, ValueError, RuntimeError) as error:
            # The client has checked the requests, so this is not their fault. An adapter may have gone since then.
            self._refuse(message, error)
        else:
            self._submit(message, requests)

    def _start_embedding(self, message: StartEmbedding) -> None:
        adapters = [message.adapter] * len(message.prompts)
        try:
            given = (message.prompts, message.params, self._updates.append, adapters)
            requests = self._llm.embedding_requests(*given)
        except ValueError as error:
            self._refuse(message, error)
        else:
            self._submit(message, requests)

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        info = None
        try:
            if isinstance(message, LoadAdapter):
                info = self._llm.load_adapter(message.name, message.folder)
            else:
                self._llm.unload_adapter(message.name)
        except Exception as error:
            self._send(AdapterChanged(message.key, refused=as_failed(error)))
        else:
            self._send(AdapterChanged(message.key, info))

    def _submit(self, message: Start | StartEmbedding, requests: Sequence[Request]) -> None:
        for number, request in zip(_numbers(message), requests, strict=True):
            self._requests[number] = request
            self._numbers[request] = number
            self._silent.add(number)
        # The client learns from the end of the connection that the engine has ended.
        with suppress(RuntimeError):
            self._llm.submit(requests)

    def _refuse(self, message: Start | StartEmbedding, error: Exception) -> None:
        first = message.requests[0] if isinstance(message, Start) else message
        if first.adapter is None or any(info.name == first.adapter for info in self._llm.adapters):
            details = Details("error", f"{type(error).__name__}: {error}")
        else:
            details = Details("error", f"adapter {first.adapter!r} was unloaded before the request began")
        self._send(StepUpdates([NumberedUpdate(number, [], details) for number in _numbers(message)]))

    def _prepare(self, message: Prepare) -> None:
        """Answer whether a grammar is kept, or compile it."""
        try:
            kept = self._llm.prepared(message.params) is not None
        except ValueError as error:
            self._send(Prepared(message.key, False, as_failed(error)))
            return
        if kept or not message.compiles:
            self._send(Prepared(message.key, kept))
        else:
            self._compiler.submit(self._compile, message.key, message.params)

    def _compile(self, key: int, params: SamplingParams) -> None:
        try:
            self._llm.prepare(params)
        except Exception as error:
            self._send(Prepared(key, False, as_failed(error)))
        else:
            self._send(Prepared(key, True))

    def _numbered(self, update: Update) -> NumberedUpdate:
        request, reason = update.request, update.finish_reason
        number, tokens = self._numbers[request], list(update.token_ids)
        is_first = number in self._silent
        if reason is None and update.logprobs is None and not is_first:
            return NumberedUpdate(number, tokens)
        details = Details(reason, request.error if reason == "error" else None, update.logprobs)
        if is_first:
            self._silent.discard(number)
            details.num_cached_tokens = request.num_cached_tokens
            self._send_prompt(number, request)
        if isinstance(request, EmbeddingRequest):
            details.values = request.values.tobytes()
        if reason is not None:
            del self._requests[number], self._numbers[request]
        return NumberedUpdate(number, tokens, details)

    def _send_prompt(self, number: int, request: Request) -> None:
        """Send the log-probabilities of a prompt, if they are wanted."""
        logprobs, ranks = request.prompt_logprobs or [], request.prompt_ranks
        for start in range(0, len(logprobs), _PART):
            part = slice(start, start + _PART)
            self._send(PromptLogprobs(number, logprobs[part], ranks[part]))

    def _send(self, message: ToClient) -> None:
        content = frame(message)
        # An error says that the client has left, which the thread that reads notices.
        with suppress(OSError), self._sending:
            self._sock.sendall(content)

    def _end(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.ended.set()


def _numbers(message: Start | StartEmbedding) -> range:
    count = len(message.requests if isinstance(message, Start) else message.prompts)
    return range(message.first, message.first + count)
