"""How fast the weights of a sharded checkpoint are loaded, beside reading its files from the page cache, and how much
memory of the host that takes.

    PYTHONPATH=src python tools/load_weights.py --json benchmarks/results/<device>-load.json

A checkpoint of a Llama's or a Qwen3 mixture's shape with random bf16 weights is written first. Each round, in a process
of its own, loads it and adds up a byte of each page of the weights, since those of the CPU may be pages of the mapped
files that nobody has touched. The same process then reads the files, in as many threads as there are CPUs; all files
are in the page cache by then. Memory is sampled each 5 ms: `private` is what the process allocated beyond its start,
and `mapped` are pages of files in its address space, which the system may take back. On a GPU the weights are copied to
it, so that both are what loading needs beyond the model; on the CPU the model itself is among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
RESULT = "RESULT "
BLOCK = 16 << 20
PAGE = 4096


def write_checkpoint(folder: Path, kind: str, gib: float, shards: int) -> None:
    """Write a checkpoint of random weights of `gib` GiB, in files of equal size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 32000, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
    shape |= {"head_dim": 128, "intermediate_size": 7168, "max_position_embeddings": 4096}
    if kind == "qwen3_moe":
        shape |= {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    sizes = []
    for layers in (1, 2):
        config = AutoConfig.for_model(kind, **shape, num_hidden_layers=layers)
        with torch.device("meta"):
            sizes.append(sum(2 * param.numel() for param in AutoModelForCausalLM.from_config(config).parameters()))
    layer = sizes[1] - sizes[0]
    config = AutoConfig.for_model(kind, **shape, num_hidden_layers=max(1, round((gib * GIB - sizes[0]) / layer) + 1))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for param in model.parameters():
        param.data.view(torch.int16).random_(0, 1 << 14)
    size = sum(2 * param.numel() for param in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + layer)


def memory() -> tuple[int, int]:
    """The bytes of this process that are its own, and those of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {
        name: int(value.split()[0]) * 1024 for name, _, value in (x.partition(":") for x in lines) if "Rss" in name
    }
    return found["RssAnon"] + found["RssShmem"], found["RssFile"]


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """The most that was added to `memory()` in the block, which is filled in when it ends."""
    start, most = memory(), [0, 0]
    ended = threading.Event()
    result: dict[str, int] = {}

    def watch() -> None:
        while not ended.wait(0.005):
            most[:] = map(max, most, memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield result
    finally:
        ended.set()
        watcher.join()
        result["private"], result["mapped"] = (max(0, a - b) for a, b in zip(most, start, strict=True))


def read_seconds(files: Sequence[Path]) -> float:
    """The time in which threads read all files into memory that they reuse."""
    parts = [(file, start) for file in files for start in range(0, file.stat().st_size, BLOCK)]
    local = threading.local()

    def read(part: tuple[Path, int]) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(BLOCK)
        file, start = part
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            opened.readinto(local.buffer)

    with ThreadPoolExecutor(os.cpu_count()) as readers:
        begun = time.perf_counter()
        list(readers.map(read, parts))
        return time.perf_counter() - begun


def touch(network: Any) -> None:
    """Add up a byte of each page of the weights that lie on the CPU; wait for those that do not."""
    for param in network.parameters():
        if param.device.type == "cpu":
            param.data.view(-1).view(torch.uint8)[::PAGE].sum()
        else:
            torch.cuda.synchronize()


def run_child(folder: Path, device: str, dtype: str) -> None:
    """Load the checkpoint, read its files, and print the result."""
    from quire.engine.checkpoint import load_network, read_config

    target = torch.device(device)
    torch.empty(1, device=target)
    files = sorted(folder.glob("*.safetensors"))
    read_seconds(files)
    # The first model imports the code of its class, which is not loading.
    load_network(folder, read_config(folder, False), torch.device("meta"), None, True, False)
    with peak_memory() as peak:
        begun = time.perf_counter()
        network = load_network(folder, read_config(folder, False), target, getattr(torch, dtype), False, False)
        touch(network)
        seconds = time.perf_counter() - begun
    shard = max(file.stat().st_size for file in files)
    found = {"load_seconds": seconds, "read_seconds": min(read_seconds(files) for _ in range(3))}
    found |= {name: size / shard for name, size in peak.items()}
    print(RESULT + json.dumps(found), flush=True)


def measure(folder: Path, device: str, dtype: str) -> dict[str, float]:
    """One round."""
    command = [sys.executable, __file__, "--child", str(folder), "--device", device, "--dtype", dtype]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        raise SystemExit(done.stdout)
    result: dict[str, float] = json.loads(lines[-1].removeprefix(RESULT))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint, measure, and print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kind", choices=("llama", "qwen3_moe"), default="llama")
    parser.add_argument("--gib", type=float, default=4.0, help="of weights")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; default: a folder that is removed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        run_child(args.child, args.device, args.dtype)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            write_checkpoint(folder, args.kind, args.gib, args.shards)
        files = list(folder.glob("*.safetensors"))
        gib = sum(file.stat().st_size for file in files) / GIB
        print(f"{args.kind}, {gib:.2f} GiB in {len(files)} shards, {args.dtype} on {args.device}", flush=True)
        rounds = []
        for _ in range(args.rounds):
            done = measure(folder, args.device, args.dtype)
            rounds.append(done)
            print(
                f"loaded at {gib / done['load_seconds']:.2f} GiB/s, read at {gib / done['read_seconds']:.2f}; at most "
                f"{done['private']:.2f} shards private and {done['mapped']:.2f} mapped",
                flush=True,
            )
    medians = {name: statistics.median(done[name] for done in rounds) for name in rounds[0]}
    print(f"medians: {medians['read_seconds'] / medians['load_seconds']:.0%} of the rate of reading", flush=True)
    if args.json:
        if args.device == "cpu":
            from quire.bench.cpu import machine
        else:
            from quire.bench.gpu import machine
        settings = {"kind": args.kind, "gib": gib, "shards": len(files), "dtype": args.dtype}
        args.json.write_text(json.dumps({**machine(), **settings, "runs": rounds}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
