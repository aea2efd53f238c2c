"""Put the tables of benchmarks/results/*.json into README.md, between the marks that name the files.

python tools/readme_tables.py            write them
python tools/readme_tables.py --check    exit with 1 if README.md shows something else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from quire.bench import cpu, gpu

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- (benchmarks/results/\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(name: str) -> str:
    """A file's table, and what it was measured on."""
    result = json.loads((ROOT / name).read_text())
    on_gpu = "triton" in result
    compiler = "triton" if on_gpu else "numba"
    parts = (
        result["device"] if on_gpu else f"{result['device']}, {result['threads']} threads",
        f"Python {result['python']}, torch {result['torch']}, {compiler} {result[compiler]}",
        *([f"FlashInfer {result['flashinfer']}"] if "flashinfer" in result else []),
        result["date"],
    )
    return f"{', '.join(parts)}:\n\n{(gpu if on_gpu else cpu).table(result)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = BLOCK.sub(lambda found: f"{found[1]}{rendered(found[2])}{found[3]}", old)
    if args.check:
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
