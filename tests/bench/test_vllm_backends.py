"""The tool that times vLLM's attention backends, over an engine of a few lines in vLLM's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT

sys.path.append(str(ROOT / "tools"))
import benchmark_tables
import vllm_backends
import vllm_worker

# An engine that takes one step per token. Its greedy tokens depend on the prompt and on the backend.
FAKE_VLLM = """
from types import SimpleNamespace as Space
__version__ = "0.26.0"

class SamplingParams:
    def __init__(self, max_tokens, logprobs=0, **options):
        self.max_tokens, self.logprobs = max_tokens, logprobs

class Engine:
    def __init__(self, backend):
        self.running, self.backend = {}, backend
        self.model_config = Space(get_vocab_size=lambda: 1000)
    def add_request(self, name, prompt, params):
        self.running[name] = (prompt["prompt_token_ids"], params, [], [])
    def abort_request(self, names):
        self.running = {name: x for name, x in self.running.items() if name not in names}
    def has_unfinished_requests(self):
        return bool(self.running)
    def step(self):
        out = []
        for name, (prompt, params, tokens, logprobs) in list(self.running.items()):
            tokens.append((len(tokens) + sum(prompt)) % 1000)
            logprobs.append({tokens[-1]: Space(logprob=-1.0), 7: Space(logprob=-1.05)})
            if self.backend == "CUSTOM" and len(prompt) == 17 and len(tokens) == 3:
                tokens[-1] = 7
            out.append(Space(request_id=name, outputs=[Space(token_ids=list(tokens), logprobs=list(logprobs))]))
            if len(tokens) == params.max_tokens:
                del self.running[name]
        return out

class LLM:
    def __init__(self, model, attention_backend, **options):
        if attention_backend == "BROKEN":
            raise RuntimeError("no such backend")
        self.llm_engine = Engine(attention_backend)
    def generate(self, prompts, params, use_tqdm):
        done = {}
        for i, prompt in enumerate(prompts):
            self.llm_engine.add_request(i, prompt, params)
        while self.llm_engine.has_unfinished_requests():
            done |= {x.request_id: x for x in self.llm_engine.step()}
        return [done[i] for i in range(len(prompts))]
"""
TORCH = """
__version__ = "2.11"
class cuda:
    get_device_name = staticmethod(lambda: "a GPU")
"""


@pytest.fixture
def environment(tmp_path):
    """An environment in which the worker finds the engine, and no other torch."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, text in {"vllm": FAKE_VLLM, "torch": TORCH}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "quire").mkdir()
    for name in ("__init__", "integrations/__init__", "integrations/vllm"):
        (folder / "quire" / f"{name}.py").parent.mkdir(exist_ok=True)
        (folder / "quire" / f"{name}.py").write_text("register = lambda: None\n")
    return {**os.environ, "PYTHONPATH": str(folder), "OUT": str(tmp_path)}


def test_measure_takes_turns_and_compares_tokens(environment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_backends.subprocess, "Popen", lambda *a, **k: subprocess_popen(*a, **k, env=environment))
    workers = [
        vllm_backends.Worker(name, "auto", ["--model", str(tmp_path)], tmp_path / f"{name}.log")
        for name in ("FLASH_ATTN", "CUSTOM", "BROKEN")
    ]
    ready = [w.read() for w in workers]
    assert [x.get("vllm") for x in ready] == ["0.26.0", "0.26.0", None]
    assert ready[2]["error"] == "RuntimeError: no such backend"
    args = vllm_backends.argparse.Namespace(
        cell=["2x16", "3xlognormal", "random:4", "drafts:2", "nonsense"], rounds=3, profile=[],
        json=tmp_path / "x.json", kv_cache_dtype="auto",
    )  # fmt: skip
    result = {"tokens": [], "cells": [], "profiles": [], "errors": []}
    try:
        vllm_backends.measure(workers[:2], args, result, float("inf"))
    finally:
        for w in workers:
            w.close()
    assert result["tokens"][1] == {
        "backend": "CUSTOM", "kv_cache_dtype": "auto", "tokens": 7 * 32 + 3, "requests": 8, "ties": 1, "different": 0,
        "largest_gap": 0.05, "mean_logprob_error": 0.0,
    }  # fmt: skip
    cells = [(one["cell"], one["backend"], one["rounds"]) for one in result["cells"]]
    assert cells == [(cell, name, 3) for cell in args.cell[:4] for name in ("FLASH_ATTN", "CUSTOM")]
    assert len(result["errors"]) == 6
    assert json.loads((tmp_path / "x.json").read_text())["cells"] == result["cells"]
    assert vllm_backends.table(result).count("tok/s") == 2
    assert '"cell": "random:4"' in capsys.readouterr().out


subprocess_popen = subprocess.Popen


def test_measure_after_the_limit_begins_no_cell(tmp_path):
    """Nor does it time the engine over another cache, which is the reference of tokens."""

    class Quick:
        def __init__(self, kv_cache_dtype):
            self.backend, self.kv_cache_dtype = "CUSTOM", kv_cache_dtype

        def ask(self, do, **request):
            return {"result": [] if do == "check" else {"ms": 2.0, "tokens_s": 500.0, "prefill_ms": 3.0}}

    args = vllm_backends.argparse.Namespace(
        cell=["1x1k", "1x8k"], rounds=4, profile=[], json=None, kv_cache_dtype="fp8"
    )
    result = {"tokens": [], "cells": [], "profiles": [], "errors": []}
    vllm_backends.measure([Quick("auto"), Quick("fp8")], args, result, 0.0)
    assert [one["kv_cache_dtype"] for one in result["tokens"]] == ["auto", "fp8"]
    assert [(one["cell"], one["rounds"], one["ms"]) for one in result["cells"]] == [("1x1k", 1, 2.0)]
    assert result["errors"] == [{"error": "the time was over after the cell 1x1k"}]


def test_compare_tokens_of_rounding_differences_counts_them_as_ties():
    logprobs = [{"1": -1.0, "2": -1.1, "3": -3.0}] * 3
    reference = [{"tokens": [1, 1, 1], "logprobs": logprobs}] * 4
    errors = [{"1": -1.25, "2": -1.0}] * 3
    others = [{"tokens": tokens, "logprobs": errors} for tokens in ([1, 1, 1], [1, 2, 9], [3, 1, 1], [1, 1, 4])]
    found = vllm_backends.compare_tokens(reference, others)
    counts = {"tokens": 9, "requests": 4, "ties": 1, "different": 2}
    assert found == counts | {"largest_gap": None, "mean_logprob_error": 0.25}
    assert vllm_backends.compare_tokens(reference[:3], others[:3])["largest_gap"] == 2.0


def test_lengths_of_a_cell_are_those_of_its_name(rng):
    assert vllm_worker.lengths_of("3x2k", rng) == [2048] * 3
    assert vllm_worker.lengths_of("1x17", rng) == [17]
    mixed = vllm_worker.lengths_of("400xlognormal", rng)
    assert len(mixed) == 400
    assert 16 <= min(mixed) < 300 < 5000 < max(mixed) <= 16384
    assert [vllm_backends._tokens(x) for x in ("1x64k", "64xlognormal", "random:256")] == [65536, 0, 0]


def test_table_of_a_result_has_each_backends_figures():
    cells = [
        {"cell": "1x8k", "backend": "FLASH_ATTN", "ms": 3.0},
        {"cell": "1x8k", "backend": "CUSTOM", "ms": 2.0},
        {"cell": "random:256", "backend": "FLASH_ATTN", "tokens_s": 10000.0},
        {"cell": "random:256", "backend": "CUSTOM", "tokens_s": 12500.0},
        {"cell": "1x64k", "backend": "CUSTOM", "ms": 5.0},
    ]
    result = {
        "device": "a GPU", "vllm": "0.26.0", "torch": "2.11", "date": "2026-11-27", "model": "m", "cells": cells,
        "kv_cache_dtype": "fp8", "draft_tokens": 3,
    }  # fmt: skip
    lines = benchmark_tables.vllm(result).splitlines()
    assert lines[0] == "a GPU, vLLM 0.26.0, torch 2.11, 2026-11-27; m, cache fp8, 3 drafts per step:"
    assert lines[2:] == [
        "| cell | FLASH_ATTN | CUSTOM (Quire) |",
        "|---|---|---|",
        "| 1x8k | 3.00 ms per step | 2.00 ms per step, 1.50 times as fast |",
        "| random:256 | 10,000 tokens/s | 12,500 tokens/s, 1.25 times as fast |",
        "| 1x64k | no result | 5.00 ms per step |",
    ]
