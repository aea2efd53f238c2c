"""Compare the outputs of two versions of Quire bit for bit, on one machine.

    PYTHONPATH=old/src python tools/bits.py save /tmp/old.pt
    PYTHONPATH=new/src python tools/bits.py compare /tmp/old.pt

`save` computes the calls of `bits_calls.py` on random inputs. It stores the outputs of each, and the exception that
ended it, if one did. `compare` computes the same calls from the stored seed, and exits with 1 where a bit or an
exception differs. TRITON_INTERPRET=1 selects interpreted kernels and smaller batches. Processes may each take a part:

    for i in 0 1 2 3; do python tools/bits.py save /tmp/old.$i --seed 7 --part $i/4 & done; wait

A sanitizer finds what kernels do to memory: PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
python tools/bits.py save /tmp/any.pt --families triton,hopper --part 0/4
"""

from __future__ import annotations

import os

os.environ.update(NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="1")  # CPU sums depend on it

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from bits_calls import DEVICE, INTERPRETED, Inputs, cases
from torch import Tensor

import quire

Outcome = tuple[list[Tensor], str]  # the outputs of a call, and the exception that ended it or ""
FAMILIES = "triton,hopper,auto" if DEVICE == "cuda" else "triton" if INTERPRETED else "cpu,reference"


def tensors(x: Any) -> list[Tensor]:
    """All tensors in nested sequences, as they are now."""
    return [x.cpu().clone()] if isinstance(x, Tensor) else [t for y in x for t in tensors(y)]


def outcome(call: Iterator[Any]) -> Outcome:
    outputs = []
    try:
        for output in call:
            outputs += tensors(output)
    except Exception as error:  # Both versions must raise the same.
        return outputs, f"{type(error).__name__}: {error}"
    return outputs, ""


def compute(seed: int, families: str, part: str) -> dict[str, Outcome]:
    """The outcome of each case by its name, for each family where the case has a choice."""
    index, parts = map(int, part.split("/"))
    outcomes, shuffled = {}, list(cases())
    random.Random(0).shuffle(shuffled)  # Neighbouring cases are alike, and each part needs all sorts.
    for function, options in shuffled[index::parts]:
        name = f"{function.__name__} {options}".replace("torch.", "")
        if "backend" in function.__annotations__:
            for family in families.split(","):
                outcomes[f"{family}: {name}"] = outcome(function(Inputs(name, seed), family, **options))
        else:
            outcomes[name] = outcome(function(Inputs(name, seed), **options))
    return outcomes


def differences(old: Outcome, new: Outcome) -> Iterator[str]:
    if old[1] != new[1] or len(old[0]) != len(new[0]):
        yield f"{len(old[0])} outputs {old[1]!r}, and now {len(new[0])} outputs {new[1]!r}"
    for i, (x, y) in enumerate(zip(old[0], new[0], strict=False)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"output {i}: {x.dtype} {list(x.shape)}, and now {y.dtype} {list(y.shape)}"
            continue
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
        differ = x.view(bits) != y.view(bits)  # As numbers, NaNs differ and zeros of either sign agree.
        if differ.any():
            largest = (x.double() - y.double())[differ].abs().nan_to_num(torch.inf).max().item()
            yield f"output {i}: {int(differ.sum())} of {x.numel()} elements differ, by {largest:.3g} at most"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("save", "compare"))
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=torch.seed() % (1 << 31), help="of save's inputs, else random")
    parser.add_argument("--families", default=FAMILIES, help="kernel families that save computes with, by commas")
    parser.add_argument("--part", default="0/1", help="0/4: save the first of four parts of the cases")
    arguments, start = parser.parse_args(), time.perf_counter()
    stored = torch.load(arguments.file) if arguments.command == "compare" else {}
    settings = stored.get("settings", (arguments.seed, arguments.families, arguments.part))
    outcomes = compute(*settings)
    raised = sum(bool(error) for _, error in outcomes.values())
    seconds = time.perf_counter() - start
    print(f"{quire.__file__}: {len(outcomes)} calls, of which {raised} raise; seed {settings[0]}; {seconds:.0f} s")
    if arguments.command == "save":
        torch.save({"settings": settings, "outcomes": outcomes}, arguments.file)
        return 0
    old = stored["outcomes"]
    lines = [f"{name}: only one version has this call" for name in old.keys() ^ outcomes.keys()]
    both = old.keys() & outcomes.keys()
    lines += [f"{name}: {line}" for name in both for line in differences(old[name], outcomes[name])]
    print("\n".join(sorted(lines)) or "all outputs are equal bit for bit")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
