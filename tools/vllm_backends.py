"""vLLM with its own attention backends and with Quire's, on a GPU: greedy tokens, times of steps, tokens per second.

    PYTHONPATH=src python tools/vllm_backends.py --model qwen3-0.6b --json benchmarks/results/<device>-vllm.json

An engine per backend is loaded, all at the same time, and each cell is measured by one after the other, in turns, so
that they see the same machine; figures are medians of the rounds. Models have random weights. Cells are

    1x8k            one request of 8,192 tokens decodes: ms per step, and the time of its prefill
    64xlognormal    64 requests, lengths with a median of 1,024
    random:256      256 requests of random lengths, submitted at once: output tokens per second
    drafts:16       with --draft-tokens: prompts that repeat themselves, with drafts by n-grams

FLASHINFER is vLLM's backend over `quire.compat`. "tokens" compares greedy tokens with those of the first backend: how
many are equal before the first difference, by how much the first backend's logits prefer its own token there (rounding
decides if that is little), and log-probabilities of equal tokens. With --kv-cache-dtype fp8, whose rounding changes
tokens, all backends are compared with the first one over a cache of the model's dtype, so that the errors of both show.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from quire import __version__
from quire.bench.workloads import SHAPES

WORKER = str(Path(__file__).with_name("vllm_worker.py"))
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": SHAPES["qwen3-0.6b"],
    "llama-1b": LLAMA_1B,
    "llama-1b-gqa8-dim128": LLAMA_1B | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128},
    "gemma2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
}  # fmt: skip
CELLS = ["1x1k", "1x8k", "1x64k", "64x1k", "64xlognormal", "random:256"]
# Above this difference of log-probabilities, another token is not a matter of rounding: bf16 logits have steps of 1/32
# between 4 and 8, and those of two kernels differ by a few.
TIE = 0.15


class Worker:
    """A process with one engine."""

    def __init__(self, backend: str, kv_cache_dtype: str, options: list[str], log: Path) -> None:
        self.backend, self.kv_cache_dtype = backend, kv_cache_dtype
        self.log = log
        self.error = ""
        self.process = subprocess.Popen(
            [sys.executable, WORKER, "--backend", backend, "--kv-cache-dtype", kv_cache_dtype, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """The next answer; {"error": ...} if the process ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        lines = self.log.read_text(errors="replace").splitlines()
        self.error = next((x for x in reversed(lines) if "Error" in x), "the process ended")[-300:]
        return {"error": self.error}

    def ask(self, **request: Any) -> dict[str, Any]:
        if self.error:
            return {"error": self.error}
        assert self.process.stdin is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self.read()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare_tokens(reference: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    """How far greedy tokens are equal: tokens compared, requests that a rounding parts, and those that it does not. The
    largest gap is None if the reference's most likely tokens do not contain the other one; the mean error is that of
    the log-probabilities of the reference's tokens.
    """
    compared = 0
    gaps: list[float] = []
    errors: list[float] = []
    for ours, theirs in zip(other, reference, strict=True):
        for i, (token, expected) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
            here, there = ours["logprobs"][i], theirs["logprobs"][i]
            compared += 1
            if str(expected) in here:
                errors.append(abs(here[str(expected)] - there[str(expected)]))
            if token != expected:
                gaps.append(there[str(expected)] - there.get(str(token), -inf))
                break
    ties, largest = [gap for gap in gaps if gap <= TIE], max(gaps, default=0.0)
    return {
        "tokens": compared, "requests": len(other), "ties": len(ties), "different": len(gaps) - len(ties),
        "largest_gap": round(largest, 4) if largest < inf else None,
        "mean_logprob_error": round(fmean(errors), 4) if errors else None,
    }  # fmt: skip


def write_config(name: str, folder: Path, max_model_len: int) -> None:
    config = MODELS[name] | {"max_position_embeddings": max_model_len, "dtype": "bfloat16", "initializer_range": 0.04}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def row(cell: str, backend: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rounds. The prefill is that of the first one: later prompts are in the cache."""
    figures: dict[str, Any] = {"cell": cell, "backend": backend, "rounds": len(found)}
    for name in ("ms", "tokens_s"):
        values = [x[name] for x in found if name in x]
        if values:
            figures[name] = round(median(values), 3)
            figures[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)]
    if "prefill_ms" in found[0]:
        figures["prefill_ms"] = round(found[0]["prefill_ms"], 2)
    return figures


def check(workers: list[Worker], result: dict[str, Any]) -> None:
    """Compare the tokens of each engine with those of the first."""
    answers = [w.ask(do="check", seed=7) for w in workers]
    first = answers[0]
    for w, answer in zip(workers, answers, strict=True):
        tokens = answer if "error" in answer or "error" in first else compare_tokens(first["result"], answer["result"])
        result["tokens"].append({"backend": w.backend, "kv_cache_dtype": w.kv_cache_dtype, **tokens})
        print("tokens", json.dumps(result["tokens"][-1]), flush=True)


def measure(workers: list[Worker], args: argparse.Namespace, result: dict[str, Any], ends: float) -> None:
    """Measure all cells in turns, and put them into the result, which is written after each."""
    check(workers, result)
    # The engine over a cache of the model's dtype is only the reference of tokens.
    workers = [w for w in workers if w.kv_cache_dtype == args.kv_cache_dtype]
    for cell in args.cell:
        found: dict[str, list[dict[str, float]]] = {w.backend: [] for w in workers}
        for turn in range(args.rounds):
            for w in workers if turn % 2 == 0 else workers[::-1]:
                if time.monotonic() > ends and turn:
                    continue
                answer = w.ask(do="measure", cell=cell, seed=100 + turn)
                if "error" in answer:
                    result["errors"].append({"cell": cell, "backend": w.backend, "error": answer["error"]})
                    continue
                found[w.backend].append(answer["result"])
        rows = [row(cell, backend, values) for backend, values in found.items() if values]
        for one in rows:
            print(json.dumps(one), flush=True)
        result["cells"] += rows
        save(result, args.json)
        if time.monotonic() > ends:
            result["errors"].append({"error": f"the time was over after the cell {cell}"})
            break
    for cell in args.profile:
        for w in workers:
            kernels = w.ask(do="profile", cell=cell)
            result["profiles"].append({"cell": cell, "backend": w.backend, **kernels})
            for kernel in kernels.get("result", []):
                print(f"{w.backend:11} {cell} {kernel['us']:8.1f} us {kernel['calls']:6.1f} x {kernel['kernel']}")
            save(result, args.json)


def save(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict[str, Any]) -> str:
    """The cells as a table: each backend's figures, and the ratio of the first backend's time to each one's."""
    backends = list(dict.fromkeys(one["backend"] for one in result["cells"]))
    lines = [f"{'cell':14} " + " ".join(f"{name:>22}" for name in backends)]
    for cell in dict.fromkeys(one["cell"] for one in result["cells"]):
        of = {one["backend"]: one for one in result["cells"] if one["cell"] == cell}
        texts = []
        for name in backends:
            one, first = of.get(name, {}), of.get(backends[0], {})
            key = "ms" if "ms" in one else "tokens_s"
            ratio = ""
            if key in one and key in first:
                ratio = f"{first[key] / one[key] if key == 'ms' else one[key] / first[key]:.3f}"
            texts.append(f"{one.get(key, '-')} {'ms' if key == 'ms' else 'tok/s'} {ratio}".rjust(22))
        lines.append(f"{cell:14} " + " ".join(texts))
    return "\n".join(lines)


def start(args: argparse.Namespace, folder: Path) -> list[Worker]:
    """Write the model, and load an engine per backend, all at once."""
    longest = max(max(_tokens(cell) for cell in args.cell), 16384) + 1024
    config, model = folder / "config", folder / args.model
    write_config(args.model, config, longest)
    subprocess.run([sys.executable, WORKER, "--make-from", str(config), "--model", str(model)], check=True)
    engines = [(name, args.kv_cache_dtype) for name in args.backend]
    if args.kv_cache_dtype != "auto":
        engines.insert(0, (args.backend[0], "auto"))
    share = args.gpu_gib / len(engines)
    options = [
        "--model", str(model), "--max-model-len", str(longest),
        "--kv-gib", f"{max(share - 9, 2):.1f}", "--draft-tokens", str(args.draft_tokens),
        *(["--enforce-eager"] if args.enforce_eager else []),
    ]  # fmt: skip
    logs = Path(os.environ.get("OUT", folder))
    return [Worker(name, dtype, options, logs / f"{args.model}-{name}-{dtype}.log") for name, dtype in engines]


def _tokens(cell: str) -> int:
    size = cell.rpartition("x")[2]
    return int(size[:-1]) * 1024 if size[:-1].isdecimal() and size.endswith("k") else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--backend", action="append", help="default: FLASH_ATTN and CUSTOM; the first is the reference")
    parser.add_argument("--cell", action="append", help=f"default: {' '.join(CELLS)}")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="append", default=[], metavar="CELL", help="list the kernels of its steps")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--gpu-gib", type=float, default=74, help="memory for all engines together")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no further cell is begun")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.backend = args.backend or ["FLASH_ATTN", "CUSTOM"]
    args.cell = args.cell or (["drafts:16"] if args.draft_tokens else CELLS)
    begun = time.monotonic()
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "quire": __version__, "model": args.model, "seed": 1, "ceilings": {},
        "kv_cache_dtype": args.kv_cache_dtype, "draft_tokens": args.draft_tokens, "tokens": [], "cells": [],
        "profiles": [], "errors": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        workers = start(args, Path(name))
        try:
            for w in workers:
                ready = w.read()
                print(w.backend, json.dumps(ready), f"after {time.monotonic() - begun:.0f} s", flush=True)
                result |= {key: ready[key] for key in ("device", "vllm", "torch") if key in ready}
                if "error" in ready:
                    result["errors"].append({"backend": w.backend, **ready})
            measure([w for w in workers if not w.error], args, result, begun + args.limit)
        finally:
            for w in workers:
                w.close()
    save(result, args.json)
    print(table(result))
    return int(bool(result["errors"]))


if __name__ == "__main__":
    sys.exit(main())
