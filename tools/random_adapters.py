"""Writes random adapters for a server under test, and prints the flags of `quire serve` that load them.

quire serve MODEL --max-adapters 32 $(python tools/random_adapters.py MODEL FOLDER --count 200 --rank 16)
quire bench serve --adapters 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.bench.random_adapters import write_adapters
from quire.engine.checkpoint import read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the model's folder, of which config.json is read")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = read_config(args.model, False).get_text_config()
    folders = write_adapters(config, args.folder, args.count, args.rank, args.seed)
    print(" ".join(f"--adapter {name}={folder}" for name, folder in folders.items()))


if __name__ == "__main__":
    main()
