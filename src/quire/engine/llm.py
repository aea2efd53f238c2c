"""The public interface of the engine, usable from any thread or event loop."""

from __future__ import annotations

import asyncio
import queue
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quire.definition.spec import as_dtype
from quire.engine.arguments import (
    Prompt,
    as_list,
    check_sizes,
    default_batched_tokens,
    invariant_backend,
    one_each,
    usable_device,
)
from quire.engine.engine import Engine
from quire.engine.grammar import Grammar
from quire.engine.inputs import Shape
from quire.engine.memory import free_pages, profiled_pages
from quire.engine.model import Model
from quire.engine.params import SamplingParams
from quire.engine.request import Request, Update
from quire.engine.runner import Runner
from quire.engine.scales import Scales, read_scales
from quire.engine.scheduler import Stats
from quire.engine.timeline import Timeline
from quire.engine.worker import Worker, check_process
from quire.steps import fp8_dtype


def shipped_model() -> Path:
    """The folder of the small language model that comes with Quire and completes Python code."""
    return Path(__file__).parent.parent / "models" / "tiny-python"


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of a prompt, or an element of a stream.

    Attributes:
        prompt_token_ids: the tokens of the prompt.
        text: the text of the output, without the stop string or end token that ended it; "" without a tokenizer.
        token_ids: the tokens of the output, with the end token if there was one.
        finish_reason: "stop", "length", "cancelled" or "error"; None in a stream that has not ended.
        logprobs: for each output token, its log-probability and those of the likeliest tokens, if requested.
        reused_tokens: the number of tokens of the prompt whose keys and values were in the cache already.
        error: the type and message of the exception, if finish_reason is "error".
        prompt_logprobs: for each token of the prompt, its log-probability and those of the likeliest tokens, if
            requested; None for the first token. Each element of a stream has the whole list.
        prompt_ranks: with prompt_logprobs, one more than the number of tokens that are likelier than each token of the
            prompt; None for the first token.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = None
    reused_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    prompt_ranks: list[int | None] | None = None


def _completion(request: Request) -> Completion:
    return _part(request, request.text, request.output, request.finish_reason, request.logprobs)


def _delta(update: Update) -> Completion:
    """The element of a stream for one step. The request may be some steps further already."""
    return _part(update.request, update.text, update.token_ids, update.finish_reason, update.logprobs)


def _part(request: Request, text: str, tokens: list[int], reason: str | None, logprobs: Any) -> Completion:
    ranks = None if request.prompt_logprobs is None else request.prompt_ranks
    error = request.error if reason == "error" else None
    known = (request.reused, error, request.prompt_logprobs, ranks)
    return Completion(request.prompt, text, tokens, reason, logprobs, *known)


class LLM:
    """A language model that serves many requests at once.

    Requests of all callers share every step (continuous batching), and prompts with a common prefix share its pages.

    Args:
        folder: a Hugging Face checkpoint folder; by default the model that comes with Quire.
        device: "cpu", "cuda", "cuda:1", ...; "auto" is "cuda" where there is a GPU, and else "cpu".
        dtype: of weights and cache, or its name; "auto" is float32 on the CPU and the checkpoint's dtype on other
            devices.
        page_size: tokens in a page.
        max_model_len: the largest number of tokens of a request, prompt and output; by default the model's context.
        num_pages: pages in the cache; by default enough for max_num_seqs full contexts, or fewer to fit in what
            gpu_memory_utilization leaves, on the CPU in a quarter of the free memory.
        max_num_seqs: the largest number of requests that run at once.
        max_batched_tokens: the largest number of tokens of a step; longer prompts are computed in chunks. By default
            2,048 on the CPU and 8,192 on a GPU; with batch_invariant, 64 on the CPU, and on a GPU max_num_seqs, but at
            least 256.
        backend: "auto" or a kernel family.
        compile: whether torch.compile compiles the model's decoder layers; "auto": on a GPU. A model that it cannot
            compile runs as Transformers has it, and a RuntimeWarning says why.
        load_format: "dummy" makes random weights instead of reading them, so that the folder needs only a config.json.
        trust_remote_code: whether to run Python code that comes with the checkpoint, which may do anything. Without it,
            a checkpoint that needs such code is refused.
        runner: the class that computes steps; see docs/backends.md for those of serving backends.
        cuda_graphs: on a GPU, capture CUDA graphs of steps before the first request. A model that cannot be captured
            runs without them, after a warning that says why.
        gpu_memory_utilization: the part of a GPU's memory, above 0 and at most 1, that weights, cache and everything
            else on the GPU may take, measured in a step of the largest size; without effect if num_pages is given.
        kv_cache_dtype: "auto" for the model's dtype; "fp8" or "fp8_e4m3", or "fp8_e5m2", to store keys and values in
            half the memory of 16-bit elements.
        kv_cache_scales: for an fp8 cache, a safetensors file with a scale for each layer's keys and one for its values
            (`quire.engine.calibrate` writes one); by default those of the checkpoint, or else 1. A RuntimeWarning says
            so if that is 1 for a cache of e4m3, whose largest number is 448.
        speculative_tokens: guess up to so many next tokens of a request from its own tokens, and verify them in one
            step; 0: none. The outputs are the same; see docs/engine.md for what it costs and brings.
        batch_invariant: give a request the same bits whatever runs beside it, by padding all steps to
            max_batched_tokens; see docs/engine.md for what it costs.

    Raises:
        FileNotFoundError: the folder or its files are missing.
        RuntimeError: the process was forked from one in which an LLM was made.
        ValueError: an argument is invalid, the checkpoint is broken, or the model is not supported (docs/engine.md).
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        max_num_seqs: int = 64,
        max_batched_tokens: int | None = None,
        backend: str = "auto",
        compile: bool | Literal["auto"] = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        trust_remote_code: bool = False,
        runner: type[Runner] = Runner,
        cuda_graphs: bool = True,
        gpu_memory_utilization: float = 0.9,
        kv_cache_dtype: str = "auto",
        kv_cache_scales: str | Path | None = None,
        batch_invariant: bool = False,
        speculative_tokens: int = 0,
    ) -> None:
        check_process()
        optional = {"num_pages": num_pages, "max_model_len": max_model_len, "max_batched_tokens": max_batched_tokens}
        given = {name: value for name, value in optional.items() if value is not None}
        check_sizes(page_size=page_size, max_num_seqs=max_num_seqs, **given)
        if not isinstance(speculative_tokens, int) or isinstance(speculative_tokens, bool) or speculative_tokens < 0:
            raise ValueError(f"speculative_tokens = {speculative_tokens!r}: it must be an integer, 0 or larger")
        if speculative_tokens and runner.run is not Runner.run:
            what = f"{runner.__name__} has a `run` of its own, which samples one token of each request"
            raise ValueError(f"speculative_tokens = {speculative_tokens}: {what}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization = {gpu_memory_utilization!r}: it must be above 0, and 1 at most")
        if kv_cache_dtype != "auto":
            fp8_dtype(kv_cache_dtype)  # refuses unknown names before the weights are loaded
        elif kv_cache_scales is not None:
            raise ValueError(
                f"kv_cache_scales = {str(kv_cache_scales)!r}: only an fp8 cache (kv_cache_dtype) has scales"
            )
        if kv_cache_scales is not None and not Path(kv_cache_scales).is_file():
            raise FileNotFoundError(f"kv_cache_scales = {str(kv_cache_scales)!r}: there is no such file")
        chosen = None if dtype == "auto" else as_dtype(dtype)
        on = usable_device(device)
        if max_batched_tokens is None:
            max_batched_tokens = default_batched_tokens(on, max_num_seqs, batch_invariant)
        if batch_invariant:
            backend = invariant_backend(backend, on)
        folder = shipped_model() if folder is None else folder
        self.model = Model(folder, on, chosen, max_model_len, compile, load_format, trust_remote_code)
        if batch_invariant:
            self.model.pad_steps(max_batched_tokens)
        # What subclasses that run a serving backend do not take is only passed if it is asked for.
        options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype} if kv_cache_dtype != "auto" else {}
        options |= {"batch_invariant": True} if batch_invariant else {}
        if kv_cache_dtype != "auto":
            scales = self._scales(kv_cache_scales, fp8_dtype(kv_cache_dtype), load_format)
            options |= {"kv_cache_scales": scales} if scales is not None else {}

        def make(pages: int) -> Runner:
            return runner(self.model, pages, page_size, backend, **options)

        if num_pages is None:
            page_bytes, needed = (
                Runner.page_bytes(self.model, page_size, kv_cache_dtype),
                -(-self.model.context // page_size),
            )
            if self.model.device.type == "cuda":
                largest = Shape(min(max_num_seqs, max_batched_tokens), max_batched_tokens)
                room = profiled_pages(make, page_size, page_bytes, largest, gpu_memory_utilization, cuda_graphs)
            else:
                room = free_pages(page_bytes)
            num_pages = min(max_num_seqs * needed, room)
        chosen_runner = make(num_pages)
        self._engine = Engine(chosen_runner, max_num_seqs, max_batched_tokens, speculative_tokens=speculative_tokens)
        if cuda_graphs:
            rows = min(self._engine.scheduler.max_rows, max_batched_tokens)
            chosen_runner.capture(rows, max_batched_tokens, _progress)
        self._worker = Worker(self._engine)

    @property
    def stats(self) -> Stats:
        """Counts since the engine started, and the requests and pages of this moment."""
        return self._engine.scheduler.state()

    @property
    def timeline(self) -> Timeline:
        """The last steps: what they computed, and how long they took."""
        return self._engine.timeline

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
        return self._engine.max_len

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

    def check(self, prompt: Prompt, params: SamplingParams | None = None, name: str = "prompt") -> None:
        """Raise the ValueError that `generate` would raise for this prompt."""
        self._engine.request(prompt, params or SamplingParams(), lambda update: None, name)

    def prepare(self, params: SamplingParams) -> Grammar | None:
        """Compile the grammar of sampling parameters, so that requests with it start at once, and return it; None if
        there is none. The engine keeps the last grammars only, `start` takes one that is not kept any more, too.

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
        return self._engine.tokens(prompt, name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_update: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all at once.

        Args:
            prompts: strings or lists of token ids; or a single one of either.
            params: for all prompts, or a list with one for each; `default_params` replaces what they leave out.
            on_update: called in this thread with the index of a prompt and the tokens that a step added to it.

        Returns:
            a completion per prompt, in the order of the prompts.

        Raises:
            ImportError: params have a JSON schema, a regular expression or a grammar, and llguidance is not installed.
            RuntimeError: this LLM has been closed, or was made in another process, from which this one was forked.
            ValueError: a prompt or its params are invalid; the message has its index, or the attribute of the params,
                and no request has been started.
        """
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        requests = self._requests(prompts, params, lambda i: updates.put)
        for request in requests:
            request.silent = on_update is None
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

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Completion]:
        """Complete one prompt and yield, for each step, the text and tokens that it added; the last element has a
        finish_reason. Leaving the loop (or cancelling the task) cancels the request. Errors are those of `generate`.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Completion] = asyncio.Queue()

        def sink(index: int, part: Completion) -> None:
            with suppress(RuntimeError):  # the loop has been closed, so the update has no reader
                loop.call_soon_threadsafe(updates.put_nowait, part)

        cancel = self.start([prompt], params, sink)
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
    ) -> Callable[[], None]:
        """Begin to complete prompts, all at once, and return without waiting.

        Args:
            prompts, params: as for `generate`.
            sink: called in the engine's thread with the index of a prompt and what a step added to it, with a
                finish_reason the last time. The engine waits for it, and it must not raise.
            grammar: what `prepare` has returned. Grammars of params that equal it are not compiled again.

        Returns:
            a function that cancels the requests that have not ended; each gets the finish_reason "cancelled".

        Raises:
            ValueError: as for `generate`.
            RuntimeError: as for `generate`.
        """
        requests = self._requests(prompts, params, lambda i: lambda update: sink(i, _delta(update)), grammar)
        self._worker.submit(requests)
        return lambda: self._worker.cancel(requests)

    def close(self) -> None:
        """Cancel all requests and end the engine's thread."""
        self._worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _scales(self, file: str | Path | None, dtype: torch.dtype, load_format: str) -> Scales | None:
        """The scales of an fp8 cache: of a file, or else of the checkpoint."""
        source, layers = self.model.folder if file is None else Path(file), len(self.model.layers)
        scales = None if file is None and load_format == "dummy" else read_scales(source, layers)
        if scales is None and file is not None:
            raise ValueError(f"kv_cache_scales = {str(file)!r}: the file has no scales")
        if scales is None and dtype == torch.float8_e4m3fn:
            message = (
                f"{source} has no scales for an fp8 cache: keys and values beyond 448 become 448; see `quire calibrate`"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return scales

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sink: Callable[[int], Callable[[Update], None]],
        grammar: Grammar | None = None,
    ) -> list[Request]:
        """Check prompts and make their requests, each with the sink that `sink` returns for its index."""
        listed = as_list(prompts)
        each = enumerate(zip(listed, one_each(params, len(listed)), strict=True))
        return [self._engine.request(prompt, p, sink(i), f"prompt {i}", grammar) for i, (prompt, p) in each]


def _progress(shapes: Sequence[Any]) -> Iterable[Any]:
    """The shapes of CUDA graphs with a progress bar on a terminal."""
    from tqdm import tqdm

    return tqdm(shapes, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None)
