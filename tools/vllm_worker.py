"""One engine of vLLM with one attention backend, which `tools/vllm_backends.py` starts and asks for measurements.

It reads requests from standard input and answers on standard output, one JSON object per line each; whatever vLLM
prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

Prompts = list[list[int]]
# Decoding steps that are timed, after as many that are not: the first ones end the prefill of other requests.
STEPS, WARM_UP = 48, 8


def lengths_of(cell: str, rng: Random) -> list[int]:
    """The tokens of each prompt of a cell: "64x1k", or "64xlognormal" with a median of 1,024 and at most 16,384."""
    count, _, size = cell.partition("x")
    if size == "lognormal":
        drawn = (int(math.exp(rng.gauss(math.log(1024), 1.0))) for _ in range(int(count)))
        return [min(max(n, 16), 16384) for n in drawn]
    return [int(size[:-1]) * 1024 if size.endswith("k") else int(size)] * int(count)


class Engine:
    """vLLM's engine, stepped in this process, or in one of its own with VLLM_ENABLE_V1_MULTIPROCESSING=1 in the
    environment, as in its server. A profile needs it in this process.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if args.backend == "FLASHINFER":
            import quire.compat  # noqa: F401  (which is FlashInfer to vLLM from now on)
        if args.backend == "CUSTOM":
            from quire.integrations.vllm import register

            # The entry point does this where the package is installed.
            register()
        import vllm

        self.vllm, self.count = vllm, 0
        more: dict[str, Any] = {}
        if args.draft_tokens:
            more["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": args.draft_tokens, "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }  # fmt: skip
        started = time.perf_counter()
        self.llm = vllm.LLM(
            str(args.model), skip_tokenizer_init=True, attention_backend=args.backend, dtype="bfloat16",
            kv_cache_dtype=args.kv_cache_dtype, kv_cache_memory_bytes=int(args.kv_gib * (1 << 30)),
            gpu_memory_utilization=0.1, max_model_len=args.max_model_len, max_num_seqs=256,
            max_num_batched_tokens=8192, enforce_eager=args.enforce_eager, enable_prefix_caching=True,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]},
            disable_log_stats=True, **more,
        )  # fmt: skip
        self.seconds_to_load = time.perf_counter() - started
        self.engine: Any = self.llm.llm_engine
        self.vocab = self.engine.model_config.get_vocab_size()

    def prompts(self, lengths: list[int], seed: int) -> Prompts:
        rng = Random(seed)
        return [[rng.randrange(10, self.vocab - 10) for _ in range(n)] for n in lengths]

    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> str:
        self.count += 1
        params = self.vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options
        )
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        return str(self.count)

    def step(self, done: dict[str, int]) -> None:
        """One step; `done` has the number of tokens of each request."""
        for output in self.engine.step():
            done[output.request_id.split("-")[0]] = len(output.outputs[0].token_ids)

    def drain(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def decode(self, prompts: Prompts, steps: int = STEPS) -> dict[str, float]:
        """Milliseconds per step in which all requests decode, and of all steps before; tokens per second."""
        names = [self.add(prompt, steps + WARM_UP + 256) for prompt in prompts]
        done = dict.fromkeys(names, 0)
        start = time.perf_counter()
        while not all(done.values()):
            self.step(done)
        first = time.perf_counter()
        for _ in range(WARM_UP):
            self.step(done)
        before, times = sum(done.values()), [time.perf_counter()]
        began = time.perf_counter()
        for _ in range(steps):
            self.step(done)
            times.append(time.perf_counter())
        tokens = sum(done.values()) - before
        self.drain(names)
        each = [b - a for a, b in pairwise(times)]
        return {
            "ms": median(each) * 1e3, "prefill_ms": (first - start) * 1e3, "tokens_s": tokens / (times[-1] - began),
        }  # fmt: skip

    def throughput(self, count: int, seed: int) -> dict[str, float]:
        """Output tokens per second of requests with random lengths of prompts and outputs, submitted at once."""
        rng = Random(seed)
        lengths = [(rng.randint(100, 1024), rng.randint(100, 512)) for _ in range(count)]
        for prompt, (_, output) in zip(self.prompts([n for n, _ in lengths], seed), lengths, strict=True):
            self.add(prompt, output)
        start, done = time.perf_counter(), dict[str, int]()
        while self.engine.has_unfinished_requests():
            self.step(done)
        return {"tokens_s": sum(done.values()) / (time.perf_counter() - start)}

    def drafts(self, count: int, seed: int) -> dict[str, float]:
        """Milliseconds per step and tokens per second of prompts that repeat themselves, so that drafts are found."""
        return self.decode([prompt * 16 for prompt in self.prompts([64] * count, seed)])

    def measure(self, cell: str, seed: int) -> dict[str, float]:
        kind, _, count = cell.rpartition(":")
        if kind == "random":
            return self.throughput(int(count), seed)
        if kind == "drafts":
            return self.drafts(int(count), 1)
        # Later rounds find the prompts in the cache, so that a round is little more than its decoding steps.
        return self.decode(self.prompts(lengths_of(cell, Random(1)), 1))

    def check(self, seed: int) -> list[dict[str, Any]]:
        """Greedy tokens of prompts of many lengths that run together, and the most likely tokens of each step."""
        lengths = [1, 17, 64, 100, 333, 1000, 2047, 4200]
        params = self.vllm.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False, logprobs=20)
        inputs = [{"prompt_token_ids": prompt} for prompt in self.prompts(lengths, seed)]
        answers = []
        for output in self.llm.generate(inputs, params, use_tqdm=False):
            one = output.outputs[0]
            top_logprobs = [{str(token): x.logprob for token, x in at.items()} for at in one.logprobs]
            answers.append({"tokens": list(one.token_ids), "logprobs": top_logprobs})
        return answers

    def profile(self, cell: str) -> list[dict[str, Any]]:
        """The kernels of a decoding step, by their time on the GPU in microseconds."""
        from torch.profiler import ProfilerActivity, profile

        prompts, steps = self.prompts(lengths_of(cell, Random(1)), 1), 16
        names = [self.add(prompt, steps + WARM_UP + 256) for prompt in prompts]
        done = dict.fromkeys(names, 0)
        while not all(done.values()):
            self.step(done)
        for _ in range(WARM_UP):
            self.step(done)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                self.step(done)
        self.drain(names)
        rows = sorted(trace.key_averages(), key=lambda x: -x.device_time_total)[:14]
        return [
            {"kernel": x.key[:90], "calls": x.count / steps, "us": x.device_time_total / steps}
            for x in rows
        ]  # fmt: skip


def make_model(config: Path, folder: Path) -> None:
    """Write a checkpoint with random weights of a usual spread: with vLLM's own, all logits are nearly equal."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = AutoConfig.from_pretrained(config)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def serve(answer: Callable[[Any], None], args: argparse.Namespace) -> None:
    engine = Engine(args)
    import torch

    versions = {"vllm": engine.vllm.__version__, "torch": torch.__version__}
    answer({"ready": engine.seconds_to_load, "device": torch.cuda.get_device_name(), **versions})
    for line in sys.stdin:
        request = json.loads(line)
        method = getattr(engine, request.pop("do"))
        try:
            answer({"result": method(**request)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"[:500]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--make-from", type=Path, help="write the model of this config.json's folder, and end")
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-gib", type=float, default=16)
    parser.add_argument("--max-model-len", type=int, default=20480)
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    if args.make_from:
        make_model(args.make_from, args.model)
        return
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(lambda value: print(json.dumps(value), file=answers, flush=True), args)


if __name__ == "__main__":
    main()
