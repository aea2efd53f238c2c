"""The engine's throughput alone and over HTTP, with one process that speaks HTTP or several, on one machine.

    PYTHONPATH=src python tools/http_throughput.py --shape qwen3-0.6b --api-processes 1 2 4 --out result.json
    PYTHONPATH=src python tools/http_throughput.py --device cpu --requests 32 --output 16:16 --out result.json

Requests of random tokens arrive all at once, at `quire bench throughput` and, from --clients processes, at `quire
serve`. With --rate inf,16,40 others follow, which arrive at these rates. A shape has random weights, and a tokenizer in
which each token is a word, so that each has text; without --shape, the model is the bundled one. The last column is the
part of the engine's own throughput that clients have over HTTP.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from soak_server import Server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from quire.bench.workloads import write_shape


def write_tokenizer(folder: Path) -> int:
    """Give a folder with a config.json a tokenizer of as many words as the model's vocabulary has; return how many."""
    size = int(AutoConfig.from_pretrained(folder).vocab_size)
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(size)}, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="Ġw1").save_pretrained(folder)
    return size


def bench(words: list[str], out: Path) -> dict[str, Any]:
    """The result of `quire bench`."""
    subprocess.run([sys.executable, "-m", "quire", "bench", *words, "--json", str(out)], check=True, stdout=sys.stderr)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The rows of all numbers of processes, after that of the engine alone."""
    work = ["--requests", str(args.requests), "--input", args.input, "--output", args.output]
    shape, model = [], []
    # Random tokens are below the size of the vocabulary.
    size = 4096
    if args.shape is not None:
        size = write_tokenizer(write_shape(args.shape, folder))
        shape, model = ["--shape", args.shape], [str(folder), "--load-format", "dummy"]
    device = ["--device", args.device]
    result = bench(["throughput", *shape, *device, *work, "--max-num-seqs", str(args.max_num_seqs)], args.out)
    engine = result["cells"][0]["output_tokens_s"]
    rows: list[dict[str, Any]] = []
    options = ["--max-num-seqs", str(args.max_num_seqs), "--max-queue", str(2 * args.requests)]
    for count in args.api_processes:
        load = ["--clients", str(args.clients), "--rate", args.rate, "--vocab-size", str(size)]
        server = Server(folder / "server.log", options=(*model, *device, *options, "--api-processes", str(count)))
        try:
            found = bench(["serve", "--url", server.url, *load, *work], args.out)
        finally:
            # The next server needs the memory of this one, which is free when all of its processes have ended.
            server.process.terminate()
            server.process.wait(60)
        rows += [{"api_processes": count, **row, "part": row["output_tokens_s"] / engine} for row in found["runs"]]
    return {**result, "operation": "http_throughput", "clients": args.clients, "runs": rows}


def table(result: dict[str, Any]) -> str:
    """The throughput of the engine, and a line for each row."""
    cell = result["cells"][0]
    lines = [f"{cell['cell']}: {cell['output_tokens_s']:,.0f} output tokens/s by the engine alone", ""]
    heads = ["HTTP processes", "rate", "output tokens/s", "first token ms p50", "p99", "per token ms p50", "p99"]
    heads.append("of the engine")
    lines += [f"| {' | '.join(heads)} |", f"|{'--:|' * len(heads)}"]
    for row in result["runs"]:
        times = [f"{row[name][p]:.1f}" for name in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")]
        part = f"{row['part']:.2f}" if row["rate"] == "inf" else ""
        numbers = [str(row["api_processes"]), str(row["rate"]), f"{row['output_tokens_s']:,.0f}", *times, part]
        lines.append(f"| {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="of `quire bench --shape`; default: the bundled model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--api-processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=8, help="processes that send and read")
    parser.add_argument("--requests", type=int, default=1536)
    parser.add_argument("--input", default="400:400", help="tokens of prompts, MIN:MAX")
    parser.add_argument("--output", default="256:256", help="tokens that they generate")
    parser.add_argument(
        "--rate", default="inf", help="requests per second; inf: all at once; inf,16,40: one after the other"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
