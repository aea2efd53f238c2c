"""Engines that complete requests, called alike: Quire, Transformers and vLLM."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from quire.bench.workloads import Work
from quire.engine import LLM, Completion, SamplingParams

# The time of each token of a request, in seconds after the requests were submitted.
Times = list[float]


class _Enough(Exception):
    """Ends requests that have been decoding long enough."""


class Quire:
    """`quire.engine.LLM`.

    Attributes:
        takes_adapters: whether the options may have `adapters`, `max_adapters` and `max_adapter_rank`.

    Args:
        folder: a checkpoint, or only a config.json, whose model gets random weights.
        longest, max_num_seqs: the largest numbers of tokens of a request, and of requests that run at once.
        options: further arguments of LLM.
    """

    title, package = "Quire", "quire"
    takes_adapters = True

    def __init__(self, folder: Path, device: str, longest: int, max_num_seqs: int, **options: Any) -> None:
        self.llm = LLM(folder, device=device, load_format=_load_format(folder), max_num_seqs=max_num_seqs, **options)
        # A full collection of garbage takes a fraction of a second with a model in memory. Servers do the same.
        gc.freeze()
        self.longest = longest
        if self.llm.model.context < longest:
            raise ValueError(f"requests have {longest} tokens: the context of the model is {self.llm.model.context}")

    def run(self, work: Sequence[Work]) -> list[Times]:
        """Complete all requests, submitted at once."""
        times: list[Times] = [[] for _ in work]
        start = time.perf_counter()

        def note(i: int, part: Completion) -> None:
            times[i] += [time.perf_counter() - start] * len(part.token_ids)

        params, adapters = [_params(w.max_tokens) for w in work], [w.adapter for w in work]
        done = self.llm.generate([w.prompt for w in work], params, adapter=adapters, on_update=note)
        for completion in done:
            if completion.finish_reason != "length":
                raise RuntimeError(f"a request of Quire ended by {completion.finish_reason}: {completion.error}")
        return times

    def arrivals(self, background: Sequence[Work], arriving: Sequence[Work]) -> Times:
        """Seconds to the first token of each of the `arriving`, which come one by one while the background decodes."""
        busy, enough = threading.Event(), threading.Event()
        started = set[int]()

        def note(i: int, part: Completion) -> None:
            started.add(i)
            if len(started) == len(background):
                busy.set()
            if enough.is_set():
                raise _Enough

        def decode() -> None:
            try:
                adapters = [w.adapter for w in background]
                self.llm.generate([w.prompt for w in background], _params(None), adapter=adapters, on_update=note)
                raise RuntimeError("the background ended before all requests had arrived")
            except _Enough:
                pass
            except BaseException as error:
                failures.append(error)
            finally:
                busy.set()

        failures: list[BaseException] = []
        thread = threading.Thread(target=decode, name="background")
        thread.start()
        busy.wait()
        try:
            seconds = [self.run([replace(w, max_tokens=1)])[0][0] for w in arriving] if not failures else []
        finally:
            enough.set()
            thread.join()
        if failures:
            raise failures[0]
        return seconds

    def close(self) -> None:
        self.llm.close()
        del self.llm
        # Frozen objects that refer to each other, as captured graphs and what they compute, would never be collected.
        gc.unfreeze()
        _free()


class Invariant(Quire):
    """`quire.engine.LLM(batch_invariant=True)`, to measure what batch invariance costs."""

    title = "Quire, batch-invariant"

    def __init__(self, folder: Path, device: str, longest: int, max_num_seqs: int, **options: Any) -> None:
        super().__init__(folder, device, longest, max_num_seqs, **options, batch_invariant=True)


class Transformers:
    """Transformers' own engines: `generate` for requests of one length, and continuous batching for others."""

    title, package = "Transformers", "transformers"
    takes_adapters = False

    def __init__(self, folder: Path, device: str, longest: int, max_num_seqs: int, **options: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = torch.float32 if device == "cpu" else "auto"
        code = options.get("trust_remote_code", False)
        if _load_format(folder) == "auto":
            network = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=dtype, trust_remote_code=code
            )
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=code)
            with torch.device(device):
                dtype = config.dtype if dtype == "auto" else dtype
                network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=code)
        self.network, self.device = network.to(device).eval(), device

    def run(self, work: Sequence[Work]) -> list[Times]:
        if len({(len(w.prompt), w.max_tokens) for w in work}) == 1:
            return self._generate(work)
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(w.max_tokens for w in work))
        with self.network.continuous_batching_context_manager(generation_config=config) as manager:
            start = time.perf_counter()
            for i, w in enumerate(work):
                manager.add_request(w.prompt, f"request {i}", max_new_tokens=w.max_tokens, record_timestamps=True)
            times: dict[str, Times] = {}
            while len(times) < len(work):
                done = manager.get_result(timeout=1)
                if done is not None and done.is_finished():
                    if done.error:
                        raise RuntimeError(f"a request of Transformers failed: {done.error}")
                    times[done.request_id] = [at - start for at in done.timestamps]
        return [times[f"request {i}"] for i in range(len(work))]

    def _generate(self, work: Sequence[Work]) -> list[Times]:
        ids = torch.tensor([w.prompt for w in work], device=self.device)
        times: Times = []
        start = time.perf_counter()

        def note(tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            if self.device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        with torch.inference_mode():
            self.network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=work[0].max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        return [times] * len(work)

    def close(self) -> None:
        del self.network
        _free()


class VLLM:
    """vLLM's `LLMEngine`, stepped in this process."""

    title, package = "vLLM", "vllm"
    takes_adapters = True

    def __init__(self, folder: Path, device: str, longest: int, max_num_seqs: int, **options: Any) -> None:
        # The engine must end when it is closed.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import vllm

        self.llm = vllm.LLM(
            str(folder),
            load_format=_load_format(folder),
            trust_remote_code=options.get("trust_remote_code", False),
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=max_num_seqs,
            tensor_parallel_size=options.get("tensor_parallel_size", 1),
            # Quire caches prefixes by default, too.
            enable_prefix_caching=True,
            disable_log_stats=True,
            **_lora_options(options),
        )
        self.longest, self.count = longest, 0
        self.adapters: dict[str | None, Any] = {None: None}
        for i, (name, path) in enumerate(options.get("adapters", {}).items(), 1):
            from vllm.lora.request import LoRARequest

            self.adapters[name] = LoRARequest(name, i, str(path))
            # This loads the adapter into host memory, where Quire's adapters are, too.
            self.llm.llm_engine.add_lora(self.adapters[name])

    def run(self, work: Sequence[Work]) -> list[Times]:
        start = time.perf_counter()
        names = [self._add(w) for w in work]
        times: dict[str, Times] = {name: [] for name in names}
        self._step(times, start, lambda: not self.llm.llm_engine.has_unfinished_requests())
        return [times[name] for name in names]

    def arrivals(self, background: Sequence[Work], arriving: Sequence[Work]) -> Times:
        names = [self._add(replace(w, max_tokens=self.longest - len(w.prompt))) for w in background]
        times: dict[str, Times] = {name: [] for name in names}
        self._step(times, 0.0, lambda: all(times.values()))
        seconds = []
        for w in arriving:
            start = time.perf_counter()
            name = self._add(replace(w, max_tokens=1))
            times[name] = []
            self._step(times, start, lambda new=times[name]: bool(new))  # type: ignore[misc]
            seconds.append(times[name][0])
        self.llm.llm_engine.abort_request(names)
        self._step(times, 0.0, lambda: not self.llm.llm_engine.has_unfinished_requests())
        return seconds

    def _add(self, work: Work) -> str:
        import vllm

        self.count += 1
        name = str(self.count)
        params = vllm.SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True, detokenize=False)
        lora = self.adapters[work.adapter]
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": work.prompt}, params, lora_request=lora)
        return name

    def _step(self, times: dict[str, Times], start: float, done: Callable[[], bool]) -> None:
        while not done():
            for output in self.llm.llm_engine.step():
                # vLLM may add a suffix to the id.
                known = times.get(output.request_id.split("-")[0], [])
                known += [time.perf_counter() - start] * (len(output.outputs[0].token_ids) - len(known))

    def close(self) -> None:
        # vLLM has frozen its objects for the collection of garbage, and does not free its memory otherwise.
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        _free()


def _lora_options(options: dict[str, Any]) -> dict[str, Any]:
    """VLLM's options for the adapters of Quire's options."""
    if "adapters" not in options:
        return {}
    ranks = next(size for size in (8, 16, 32, 64, 128, 256) if size >= options["max_adapter_rank"])
    counts = {"max_loras": options["max_adapters"], "max_cpu_loras": len(options["adapters"])}
    return {"enable_lora": True, "max_lora_rank": ranks, **counts}


ENGINES: dict[str, Any] = {"quire": Quire, "invariant": Invariant, "transformers": Transformers, "vllm": VLLM}


def _params(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _load_format(folder: Path) -> Literal["auto", "dummy"]:
    """Random weights for a folder without weights."""
    return "auto" if any(folder.glob("*.safetensors")) else "dummy"


def _free() -> None:
    """Return the memory of an engine that has been closed to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
