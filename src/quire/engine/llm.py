"""The public interface of the engine, usable from any thread or event loop."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine.arguments import Prompt, adapter_of_each, as_list, one_each
from quire.engine.completion import Completion
from quire.engine.config import EngineConfig
from quire.engine.embedding import NO_OUTPUT, Embedding, EmbeddingParams
from quire.engine.embedding_request import EmbeddingRequest
from quire.engine.grammar import Grammar
from quire.engine.hub import model_name
from quire.engine.load import load_engine
from quire.engine.model_info import AdapterInfo, ModelInfo
from quire.engine.params import SamplingParams
from quire.engine.prompts import TokenRequest
from quire.engine.report import StepListener
from quire.engine.request import Request, Update
from quire.engine.runner import Runner
from quire.engine.stats import Stats
from quire.engine.step_log import StepLog
from quire.engine.worker import Worker, check_process


def shipped_model() -> Path:
    """The folder of the bundled model, a small language model that completes Python code."""
    return Path(__file__).parent.parent / "models" / "tiny-python"


def _completion(request: Request) -> Completion:
    return _part(request, request.text, request.output, request.finish_reason, request.logprobs)


def _delta(update: Update) -> Completion:
    """The element of a stream for one step. The request may be some steps further already."""
    return _part(update.request, update.text, list(update.token_ids), update.finish_reason, update.logprobs)


def _part(request: Request, text: str, tokens: list[int], reason: str | None, logprobs: Any) -> Completion:
    ranks = None if request.prompt_logprobs is None else request.prompt_ranks
    error = request.error if reason == "error" else None
    known = (request.num_cached_tokens, error, request.prompt_logprobs, ranks)
    return Completion(request.prompt, text, tokens, reason, logprobs, *known)


class LLM:
    """A language model that serves many requests at once.

    Requests of all callers share every step (continuous batching), and prompts with a common prefix share its pages.

    Args:
        model: the folder of a Hugging Face checkpoint, or its name on the hub, such as "Qwen/Qwen3-0.6B", which is
            downloaded to the hub's cache; by default the bundled model.
        config: the configuration; by default that of `EngineConfig()`.
        runner: the class that computes steps; see docs/backends.md for those of serving backends.
        adapters: the folders of adapters that are loaded at once, by their names, see `load_adapter`.
        options: fields of `EngineConfig`, which replace those of `config`.

    Attributes:
        config: the configuration as it was given.
        model: the model that runs.
        name: of the model: its name on the hub, or that of its folder.

    Raises:
        FileNotFoundError: the checkpoint or its files are missing.
        OSError: a name of the hub could not be downloaded; a PermissionError if the model is gated.
        RuntimeError: the process was forked from one in which an LLM was made; or, as a RankError, a process that
            computes a part of the model has ended, or does not answer.
        TypeError: `EngineConfig` has no field of that name.
        ValueError: an argument is invalid, the checkpoint is broken, or the model is not supported (docs/engine.md).
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        runner: type[Runner] = Runner,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        check_process()
        self.config = replace(config or EngineConfig(), **options)
        source = shipped_model() if model is None else model
        self.name = model_name(source)
        self._engine = load_engine(source, self.config, runner)
        self.model = self._engine.model
        try:
            for name, folder in (adapters or {}).items():
                self._engine.load_adapter(name, Path(folder))
        except BaseException:
            # The exception refers to this frame, so processes of other ranks would run as long as it lives.
            self._engine.close()
            raise
        self._worker = Worker(self._engine)

    @property
    def stats(self) -> Stats:
        """Counts since the engine started, and the requests and pages of this moment."""
        return self._engine.scheduler.snapshot()

    @property
    def step_log(self) -> StepLog:
        """The last steps: what they computed, and how long they took."""
        return self._engine.step_log

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return self._engine.scheduler.allocator.num_pages

    @property
    def max_num_seqs(self) -> int:
        """The largest number of requests that run at once."""
        return self._engine.scheduler.max_num_seqs

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a request, prompt and output, that the context and the cache allow."""
        return self.info.max_len

    @property
    def info(self) -> ModelInfo:
        """What is known of the model and the engine, also in other processes."""
        return self._engine.info

    @property
    def alive(self) -> bool:
        """Whether requests are accepted: the LLM has not been closed, and its thread runs."""
        return self._worker.alive

    @property
    def default_params(self) -> SamplingParams:
        """The values of parameters that a request leaves out: those of the checkpoint's generation_config.json, as
        Transformers' `generate` reads it, and Quire's defaults for the others.
        """
        return self.model.default_params

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests can name."""
        return self.info.adapters

    def load_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Read an adapter (LoRA) in PEFT's format, in this thread, while the engine goes on. It is copied to the device
        when requests need it. A name that has an adapter with the same contents already keeps it.

        Args:
            name: by which requests choose the adapter.
            folder: has adapter_config.json and adapter_model.safetensors, or adapter_model.bin.

        Raises:
            FileNotFoundError: the folder, or a file of it, is missing.
            ValueError: the adapter is broken, not supported or not for this model; its rank exceeds max_adapter_rank or
                what adapter_rank_pages has room for; the name has another adapter; or max_adapters is 0.
        """
        return self._engine.load_adapter(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that have it keep it until they end, new ones are refused.

        Raises:
            ValueError: there is no adapter of this name.
        """
        adapter = self._engine.unload_adapter(name)
        if adapter is not None:
            self._worker.drop(adapter)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        name: str = "prompt",
        adapter: str | None = None,
    ) -> None:
        """Raise the ValueError that `generate` would raise for this prompt."""
        self._engine.request(prompt, params or SamplingParams(), lambda update: None, name, adapter=adapter)

    def prepare(self, params: SamplingParams) -> Grammar | None:
        """Compile the grammar of sampling parameters, so that requests with it start at once, and return it; None if
        there is none. The engine keeps only the last grammars; `start` also takes one that is not kept any more.

        Raises:
            ImportError, ValueError: as for `generate`.
        """
        return self._engine.grammars.prepare(params)

    def prepared(self, params: SamplingParams) -> Grammar | None:
        """What `prepare` returns if it has nothing to compile, else None; the ValueError of a grammar that was refused
        before.
        """
        return self._engine.grammars.prepared(params)

    def encode(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer adds to text.

        Raises:
            ValueError: the prompt is neither text nor token ids, or the model has no tokenizer; the message has `name`.
        """
        return self._engine.prompts.encode(prompt, name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_update: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all at once.

        Args:
            prompts: strings or lists of token ids; or a single one of either.
            params: for all prompts, or a list with one for each; `default_params` replaces what they leave out.
            adapter: the name of the adapter of all prompts, or a list with one for each; None: the model alone.
            on_update: called in this thread with the index of a prompt and the tokens that a step added to it.

        Returns:
            a completion per prompt, in the order of the prompts.

        Raises:
            ImportError: params have a JSON schema, a regular expression or a grammar, and llguidance is not installed.
            RuntimeError: this LLM has been closed, or was made in another process, from which this one was forked.
            ValueError: a prompt, its params or its adapter are invalid; the message has its index, or the attribute of
                the params, and no request has been started.
        """
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        requests = self._requests(prompts, params, lambda i: updates.put, adapter=adapter)
        for request in requests:
            request.final_only = on_update is None
        index = {id(request): i for i, request in enumerate(requests)}
        self._worker.submit(requests)
        try:
            for update in self._worker.until_done(updates, len(requests)):
                if on_update is not None:
                    on_update(index[id(update.request)], _delta(update))
        except BaseException:
            self._worker.cancel(requests)
            raise
        return [_completion(request) for request in requests]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: EmbeddingParams | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Embedding]:
        """Compute the embeddings of prompts, all at once.

        Args:
            prompts: strings or lists of token ids; or a single one of either.
            params: for all prompts; None: as the checkpoint says.
            adapter: as for `generate`.

        Returns:
            an embedding per prompt, in the order of the prompts.

        Raises:
            RuntimeError: as for `generate`.
            ValueError: a prompt, its params or its adapter are invalid, or embeddings cannot be computed; the message
                has the index of the prompt, or the attribute of the params, and no request has been started.
        """
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        read = self._engine.prompts
        resolved = read.embedding_params(params or EmbeddingParams())
        checked = [read.read(prompt, NO_OUTPUT, f"prompt {i}") for i, prompt in enumerate(as_list(prompts))]
        adapters = adapter_of_each(adapter, len(checked))
        for name in adapters:
            read.check_adapter(name)
        requests = self.embedding_requests(checked, resolved, updates.put, adapters)
        self._worker.submit(requests)
        try:
            deque(self._worker.until_done(updates, len(requests)), maxlen=0)
        except BaseException:
            self._worker.cancel(requests)
            raise
        return [request.result() for request in requests]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncIterator[Completion]:
        """Complete one prompt and yield, for each step, the text and tokens that it added; the last element has a
        finish_reason. Leaving the loop (or cancelling the task) cancels the request. Errors are those of `generate`.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Completion] = asyncio.Queue()

        def sink(index: int, part: Completion) -> None:
            # Where the loop has been closed, the update has no reader.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(updates.put_nowait, part)

        cancel = self.start([prompt], params, sink, adapter=adapter)
        try:
            while True:
                part = await updates.get()
                yield part
                if part.finish_reason is not None:
                    return
        finally:
            cancel()

    def start(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sink: Callable[[int, Completion], None],
        grammar: Grammar | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Callable[[], None]:
        """Begin to complete prompts, all at once, and return without waiting.

        Args:
            prompts, params: as for `generate`.
            sink: called in the engine's thread with the index of a prompt and what a step added to it, with a
                finish_reason the last time. The engine waits for it, and it must not raise.
            grammar: what `prepare` has returned. Grammars of params that equal it are not compiled again.
            adapter: as for `generate`.

        Returns:
            a function that cancels the requests that have not ended; each gets the finish_reason "cancelled".

        Raises:
            ValueError: as for `generate`.
            RuntimeError: as for `generate`.
        """
        requests = self._requests(prompts, params, lambda i: lambda update: sink(i, _delta(update)), grammar, adapter)
        self._worker.submit(requests)
        return lambda: self._worker.cancel(requests)

    def token_requests(
        self, checked: Sequence[TokenRequest], sink: Callable[[Update], None], grammar: Grammar | None = None
    ) -> list[Request]:
        """Requests for `submit`, whose outputs do not become text: for a server in another process, which has checked
        them (`PromptReader.request`).

        Args:
            checked: the requests.
            sink: called in the engine's thread with what a step added to a request. It must not raise.
            grammar: as for `start`.

        Raises:
            ImportError, ValueError: a grammar is refused, or there is no such adapter any more.
        """
        return [self._engine.make(each, sink, grammar, text=False) for each in checked]

    def embedding_requests(
        self,
        prompts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        sink: Callable[[Update], None],
        adapters: Sequence[str | None] | None = None,
    ) -> list[EmbeddingRequest]:
        """Requests for `submit`, whose `result` is an embedding when they have ended.

        Args:
            prompts: tokens that have been checked (`PromptReader.read`).
            params: without missing values (`PromptReader.embedding_params`).
            sink: called once for each request, in the engine's thread. It must not raise.
            adapters: the name of each prompt's adapter; None: there are none.

        Raises:
            ValueError: an adapter is not known.
        """
        get, names = self._engine.adapters.get, adapters or [None] * len(prompts)
        known = [None if name is None else get(name) for name in names]
        return [EmbeddingRequest(prompt, params, sink, of) for prompt, of in zip(prompts, known, strict=True)]

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin to compute requests of `token_requests` or `embedding_requests`; RuntimeError if the LLM has been
        closed.
        """
        self._worker.submit(requests)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel those of submitted requests that have not ended; each gets the finish_reason "cancelled"."""
        self._worker.cancel(requests)

    def listen(self, listener: StepListener) -> Callable[[], None]:
        """Call a listener from now on; return a function that ends that."""
        reporter = self._engine.reporter
        reporter.listeners = [*reporter.listeners, listener]

        def end() -> None:
            reporter.listeners = [other for other in reporter.listeners if other is not listener]

        return end

    def close(self) -> None:
        """Cancel all requests and end the engine's thread."""
        self._worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sink: Callable[[int], Callable[[Update], None]],
        grammar: Grammar | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Request]:
        """Check prompts and make their requests, each with the sink that `sink` returns for its index."""
        listed = as_list(prompts)
        count = len(listed)
        each = enumerate(zip(listed, one_each(params, count), adapter_of_each(adapter, count), strict=True))
        return [self._engine.request(prompt, p, sink(i), f"prompt {i}", grammar, name) for i, (prompt, p, name) in each]
