"""Put the tables of benchmarks/results/*.json into docs/benchmarks.md, between the markers that name the files.

python tools/benchmark_tables.py            write them
python tools/benchmark_tables.py --check    exit with 1 if docs/benchmarks.md shows something else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from quire.bench import cpu, gpu, layers_table, peers, serving

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- (benchmarks/results/\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(name: str) -> str:
    """A line that names the machine, versions and date of a result file, and its table."""
    result = json.loads((ROOT / name).read_text())
    on_gpu = "triton" in result
    compiler = "triton" if on_gpu else "numba"
    machine = (
        result["device"] if on_gpu else f"{result['device']}, {result['threads']} threads",
        f"Python {result['python']}, torch {result['torch']}, {compiler} {result[compiler]}",
        *(f"{title} {result[name]}" for name, title in peers.TITLES.items() if name in result),
        *dict.fromkeys(f"{row['engine']} {row['version']}" for row in result["cells"] if "version" in row),
        result["date"],
    )
    module: Any = gpu if on_gpu else cpu
    if "operation" in result:
        module = serving
    elif "copy_gb_s" in result["ceilings"]:
        module = layers_table
    return f"{', '.join(machine)}:\n\n{module.table(result)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = ROOT / "docs" / "benchmarks.md"
    old = page.read_text()
    new = BLOCK.sub(lambda found: f"{found[1]}{rendered(found[2])}{found[3]}", old)
    if args.check:
        return int(new != old)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
