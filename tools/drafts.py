"""What drafts of next tokens save and cost: the bundled model, on text that repeats itself and that does not.

    PYTHONPATH=src python tools/drafts.py --json benchmarks/results/<device>-drafts.json

All numbers of drafts are timed in alternation in one process with one thread; of each, the smallest CPU time of all
rounds counts. Outputs are compared with those without drafts.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

import argparse
import inspect
import json
import time
from json import decoder
from pathlib import Path

import torch

from quire.bench.cpu import machine
from quire.engine import LLM, SamplingParams

FIELDS = "".join(f"    self.field_{i} = field_{i}\n    self.other_{i} = other_{i}\n" for i in range(6))
FUNCTION = "def f(x):\n    return [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n\n\n"
SOURCE = inspect.getsource(decoder)[3000:3900]
TEXTS = {
    "repeats itself": ([f"class A:\n{FIELDS}", f"{FUNCTION}def f(x):\n    return [1, 2, 3,"], 0.0),
    "copies its prompt": ([f"# Once:\n{SOURCE}\n\n# Again:\n{SOURCE[:250]}"], 0.0),
    "code, greedy": (["import os\n\n\ndef walk(top):\n", "class Parser:\n    def feed(self, data):\n"], 0.0),
    "code, temperature 1": (["import os\n\n\ndef walk(top):\n", "class Parser:\n    def feed(self, data):\n"], 1.0),
}


def main() -> None:
    """Time all texts with all numbers of drafts, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 2, 4, 8], help="0, which is the baseline, first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    llms = {most: LLM(device="cpu", speculative_tokens=most) for most in args.drafts}
    cells: dict[tuple[str, int], dict[str, object]] = {}
    outputs: dict[tuple[str, int], list[list[int]]] = {}
    best: dict[tuple[str, int], float] = {}
    for _ in range(args.rounds):
        for text, (prompts, temperature) in TEXTS.items():
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=args.tokens, ignore_eos=True)
            for most, llm in llms.items():
                llm._engine.scheduler.tree.clear()
                before, start = llm.stats, time.process_time()
                done = llm.generate(prompts, params)
                seconds, after = time.process_time() - start, llm.stats
                key = (text, most)
                best[key] = min(seconds, best.get(key, seconds))
                outputs[key] = [c.token_ids for c in done]
                counts = {
                    n: getattr(after, n) - getattr(before, n) for n in ("steps", "drafted_tokens", "accepted_tokens")
                }
                cells[key] = {"text": text, "speculative_tokens": most, "requests": len(prompts), **counts}
    for (text, most), cell in cells.items():
        assert outputs[text, most] == outputs[text, args.drafts[0]], "drafts changed the output"
        cell["cpu_s"] = best[text, most]
        cell["tokens_per_step"] = args.tokens / cell["steps"]
        cell["speedup"] = best[text, args.drafts[0]] / best[text, most]
        print(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in cell.items()))
    if args.json is not None:
        about = {**machine(), "model": "tiny-python", "dtype": "float32", "tokens": args.tokens}
        args.json.write_text(json.dumps({**about, "runs": list(cells.values())}, indent=2) + "\n")
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
