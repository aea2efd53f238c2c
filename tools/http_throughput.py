"""The engine's throughput alone and over HTTP, with one process that speaks HTTP or several, on one machine.

    PYTHONPATH=src python tools/http_throughput.py --shape qwen3-0.6b --api-processes 1 2 4 --out result.json
    PYTHONPATH=src python tools/http_throughput.py --shape qwen3-0.6b --vllm --rate inf,16,40 --out result.json
    PYTHONPATH=src python tools/http_throughput.py --device cpu --requests 32 --output 16:16 --out result.json

Requests of random tokens arrive all at once, at `quire bench throughput` and, from --clients processes, at `quire
serve`. With --rate inf,16,40 others follow, which arrive at these rates. With --vllm, `vllm serve` has the same
requests afterwards, and each server has more of them by `vllm bench serve`, whose prompts are text. A shape has random
weights, and a tokenizer in which each token is a word, so that each has text; without --shape, the model is the bundled
one. The last column is the part of the engine's own throughput that clients have over HTTP.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from benchmark_tables import http
from soak_server import Server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from quire.bench.workloads import as_range, write_shape


def write_tokenizer(folder: Path) -> int:
    """Give a folder with a config.json a tokenizer of as many words as the model's vocabulary has; return how many."""
    size = int(AutoConfig.from_pretrained(folder).vocab_size)
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(size)}, unk_token="Ġw0"))
    # Words begin with a space, which ByteLevel writes as another character.
    words = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="Ġw1").save_pretrained(folder)
    return size


class VllmServer:
    """`vllm serve` in a process, for a model with random weights.

    Args:
        folder: has a config.json and a tokenizer.
        max_num_seqs: the requests that run at once.
    """

    def __init__(self, folder: Path, max_num_seqs: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = ["--load-format", "dummy", "--port", str(port), "--max-num-seqs", str(max_num_seqs)]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--max-model-len", "4096"]
        self.log = folder / "vllm.log"
        with self.log.open("w") as file:
            self.process = subprocess.Popen([*command, *options], stdout=file, stderr=file)
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM's server has ended: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


def vllm_bench(url: str, folder: Path, rate: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The row of `vllm bench serve` at a rate."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    options = {
        "base-url": url, "model": model, "tokenizer": folder, "dataset-name": "random", "seed": seed,
        "num-prompts": args.requests, "random-input-len": args.input.split(":")[0], "num-warmups": 8,
        "random-output-len": args.output.split(":")[0], "request-rate": rate, "temperature": 0,
        "percentile-metrics": "ttft,tpot", "metric-percentiles": "50,95,99", "result-dir": folder,
        "result-filename": "vllm-bench.json",
    }  # fmt: skip
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *given]
    subprocess.run([*command, "--ignore-eos", "--save-result", "--disable-tqdm"], check=True, stdout=sys.stderr)
    result = json.loads((folder / "vllm-bench.json").read_text())
    if result["completed"] != args.requests:
        raise RuntimeError(f"{result['completed']} of {args.requests} requests by `vllm bench serve` were answered")
    times = {f"{name}_ms": {p: result[f"{p}_{name}_ms"] for p in ("p50", "p95", "p99")} for name in ("ttft", "tpot")}
    return {"rate": rate, "seconds": result["duration"], "output_tokens_s": result["output_throughput"], **times}


def bench(words: list[str], folder: Path) -> dict[str, Any]:
    """The result of `quire bench`."""
    out = folder / "quire-bench.json"
    subprocess.run([sys.executable, "-m", "quire", "bench", *words, "--json", str(out)], check=True, stdout=sys.stderr)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def load(url: str, folder: Path, size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a server, by all clients at all rates."""
    work = ["--requests", str(args.requests), "--input", args.input, "--output", args.output, "--rate", args.rate]
    given = ["--url", url, "--clients", str(args.clients), "--vocab-size", str(size)]
    rows = [{"client": "quire bench serve", **row} for row in bench(["serve", *given, *work], folder)["runs"]]
    if args.vllm:
        for seed, rate in enumerate(args.rate.split(",")):
            rows.append({"client": "vllm bench serve", **vllm_bench(url, folder, rate, args, seed)})
    return rows


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The rows of all servers, after that of the engine alone."""
    work = ["--requests", str(args.requests), "--input", args.input, "--output", args.output]
    shape, model = [], []
    # Random tokens are below the size of the vocabulary.
    size = 4096
    if args.shape is not None:
        size = write_tokenizer(write_shape(args.shape, folder))
        shape, model = ["--shape", args.shape], [str(folder), "--load-format", "dummy"]
    device = ["--device", args.device]
    result = bench(["throughput", *shape, *device, *work, "--max-num-seqs", str(args.max_num_seqs)], folder)
    engine = result["cells"][0]["output_tokens_s"]
    result |= {"operation": "http_throughput", "clients": args.clients, "runs": []}
    options = ["--max-num-seqs", str(args.max_num_seqs), "--max-queue", str(2 * args.requests)]

    def add(server: str, api_processes: int, url: str) -> None:
        """Load a server, and save what is known by then."""
        for row in load(url, folder, size, args):
            part = row["output_tokens_s"] / engine
            result["runs"].append({"server": server, "api_processes": api_processes, **row, "part": part})
        args.out.write_text(json.dumps(result, indent=2) + "\n")

    for count in args.api_processes:
        given = [] if count == "auto" else ["--api-processes", count]
        server = Server(folder / "server.log", options=(*model, *device, *options, *given))
        # The next server needs the memory of this one, which is free when all of its processes have ended.
        with ended(server.process):
            add("Quire", httpx.get(f"{server.url}/server_info").json()["api_processes"], server.url)
    if args.vllm:
        peer = VllmServer(folder, args.max_num_seqs)
        with ended(peer.process):
            add(f"vLLM {httpx.get(f'{peer.url}/version').json()['version']}", 1, peer.url)
    return result


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A context at whose end a process is asked to end, and waited for."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="of `quire bench --shape`; default: the bundled model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--api-processes", nargs="+", default=["1", "2", "4"], help="or auto: as many as it chooses")
    parser.add_argument("--clients", type=int, default=8, help="processes that send and read")
    parser.add_argument("--requests", type=int, default=1536)
    parser.add_argument("--input", default="400:400", help="tokens of prompts, MIN:MAX")
    parser.add_argument("--output", default="256:256", help="tokens that they generate")
    parser.add_argument(
        "--rate", default="inf", help="requests per second; inf: all at once; inf,16,40: one after the other"
    )
    parser.add_argument("--vllm", action="store_true", help="measure `vllm serve`, too, and by `vllm bench serve`")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.vllm and any(
        low != high for low, high in (as_range(args.input, "--input"), as_range(args.output, "--output"))
    ):
        parser.error("--vllm: requests must have one length, like 400:400, since `vllm bench serve` draws others")
    with tempfile.TemporaryDirectory() as folder:
        print(http(measure(args, Path(folder))))


if __name__ == "__main__":
    main()
