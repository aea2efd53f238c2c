"""What an fp8 cache does to the next tokens: the bundled model, with and without scales.

    PYTHONPATH=src python tools/kv_cache.py --json benchmarks/results/<device>-kv-cache.json

Python files of installed packages are computed with each kind of cache, and the distribution of the token after each
prefix is compared with that of a float32 cache. Scales are measured over other files. The same model is measured with
larger or smaller keys and values, too: powers of two, which are divided out of queries and outputs, so that in float32
it computes the same.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.bench.cpu import machine
from quire.engine import EngineConfig, shipped_model
from quire.engine.calibrate import calibrate
from quire.engine.load import load_model
from quire.engine.model import Model
from quire.engine.runner import Runner
from quire.engine.selfcheck import probe_chunk

MEASURED = ("torch.optim.sgd", "transformers.activations", "numba.core.config", "fastapi.params")
COMPARED = ("torch.optim.adamw", "transformers.pytorch_utils", "numba.core.compiler", "fastapi.routing", "httpx._urls")
MODELS = {"as it is": (1, 1), "keys x 64": (64, 1), "keys x 64, values / 64": (64, 1 / 64)}
PAGE = 16


def source(module: str) -> str:
    """The text of a module's file."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def changed(folder: Path, keys: float, values: float) -> Path:
    """A copy of the model in a folder, with larger keys and values."""
    weights = load_file(shutil.copytree(shipped_model(), folder) / "model.safetensors")
    factors = {"k_proj": keys, "q_proj": 1 / keys, "v_proj": values, "o_proj": 1 / values}
    for name in weights:
        weights[name] *= next((factor for part, factor in factors.items() if f".{part}." in name), 1.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def log_probs(model: Model, texts: list[list[int]], **cache: Any) -> Tensor:
    """The log-probabilities of all next tokens, float64 [tokens, vocab_size], of texts that are computed whole."""
    runner, found = Runner(model, -(-model.context // PAGE), PAGE, **cache), []
    for text in texts:
        chunk = probe_chunk(runner, text, 0, 0, len(text))
        tables = runner.tables([chunk])
        runner.begin([chunk], tables)
        tokens, _ = runner.inputs([chunk])
        found.append(model.logits(tokens, tables.positions, torch.arange(len(text)), runner).double().log_softmax(-1))
    return torch.cat(found)


def difference(exact: Tensor, other: Tensor) -> dict[str, float]:
    """The divergence of distributions from the exact ones, in nats, and how often the most likely tokens are equal."""
    divergence = (exact.exp() * (exact - other)).sum(-1)
    return {
        "mean_kl": float(divergence.mean()),
        "p99_kl": float(divergence.quantile(0.99)),
        "equal_greedy": float((exact.argmax(-1) == other.argmax(-1)).double().mean()),
    }


def main() -> None:
    """Measure all models and caches, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cpu")
    runs: list[dict[str, Any]] = []
    for name, (keys, values) in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = changed(Path(place) / "model", keys, values)
            scales = calibrate(folder, [source(module) for module in MEASURED], Path(place) / "scales", device=device)
            model = load_model(folder, device)
            rounded = load_model(folder, device, EngineConfig(dtype=torch.bfloat16))
        texts = [model.tokenizer(source(module))["input_ids"][: model.context] for module in COMPARED]
        caches: dict[str, tuple[Model, dict[str, Any]]] = {
            "bfloat16, weights and activations too": (rounded, {}),
            "fp8_e4m3": (model, {"kv_cache_dtype": "fp8_e4m3"}),
            "fp8_e4m3, measured scales": (model, {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": scales}),
            "fp8_e5m2": (model, {"kv_cache_dtype": "fp8_e5m2"}),
            "fp8_e5m2, measured scales": (model, {"kv_cache_dtype": "fp8_e5m2", "kv_cache_scales": scales}),
        }
        exact = log_probs(model, texts)
        for cache, (which, options) in caches.items():
            found = difference(exact, log_probs(which, texts, **options))
            assert all(map(math.isfinite, found.values()))
            print(f"{name}, {cache}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
            runs.append({"model": name, "cache": cache, "scales": options.get("kv_cache_scales", 1), **found})
    if args.json is not None:
        about = {**machine(), "model": "tiny-python", "tokens": len(exact), "texts": COMPARED, "measured": MEASURED}
        args.json.write_text(json.dumps({**about, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
