"""What grammars cost the host: compilation, masks, and requests of the engine with and without them.

    PYTHONPATH=src python tools/grammar_costs.py --vocab 151936 --json costs.json

Masks are those of the bundled model and, with `--vocab`, of a byte-level BPE of that size, trained on Python
files of this environment. Times of masks are medians of the wall clock. Those of the engine are CPU time of one thread,
so that they hold on a busy machine, too; requests are free or constrained, in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import llguidance
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire import __version__
from quire.engine import LLM, SamplingParams, shipped_model
from quire.engine.grammar import Grammars

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["old", "new", "used"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
TEXT = json.dumps(
    {
        "name": "Grace Hopper",
        "age": 85,
        "tags": ["old", "used"],
        "address": {"street": "17 Harbour Street, second floor", "city": "New York"},
    },
    indent=2,
)
SCHEMAS: dict[str, dict[str, Any]] = {"any object": {"type": "object"}, "a record": ITEM}
PROMPTS = ["import json\n", "class Stack:\n", "def add(a, b):\n", "for line in"]


def texts(most: int) -> Iterator[str]:
    """Python files of this environment, of `most` bytes together."""
    for path in Path(sysconfig.get_paths()["purelib"]).rglob("*.py"):
        if most <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="ignore")
        most -= len(text)
        yield text


def trained(vocab: int) -> Any:
    """A tokenizer with `vocab` tokens."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(texts(80_000_000), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e6, result


def masks(tokenizer: Any) -> dict[str, Any]:
    """Times of one tokenizer, in microseconds but for its own preparation."""
    grammars = Grammars(SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer), folder="here"))  # type: ignore[arg-type]
    first, _ = timed(lambda: grammars.prepare(SamplingParams(regex="a+")))
    found: dict[str, Any] = {"vocab": len(tokenizer), "tokenizer_s": first / 1e6}
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for name, schema in SCHEMAS.items():
        params = SamplingParams(json_schema=schema)
        compiled, grammar = timed(lambda params=params: grammars.prepare(params))  # type: ignore[misc]
        alone, pushed = [], []
        together = []
        for again in range(4):  # the first time, the lexer finds its states
            matcher = grammar.matcher(frozenset([0]))
            beside = [grammar.matcher(frozenset([0])) for _ in range(32)]
            for token in tokens:
                alone.append(timed(lambda one=matcher: grammars.masks([one]))[0])  # type: ignore[misc]
                if again:
                    together.append(timed(lambda all=beside: grammars.masks(all))[0])  # type: ignore[misc]
                pushed.append(timed(lambda one=matcher, token=token: one.push(token))[0])  # type: ignore[misc]
                for other in beside:
                    other.push(token)
        found[name] = {
            "compile": compiled,
            "mask": median(alone),
            "mask_most": max(alone),
            "push": median(pushed),
            "masks_of_32": median(together),
        }
    return found


def engine(rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time of a step of 32 requests, each kind of requests the median of rounds."""
    torch.set_num_threads(1)
    long = {"type": "array", "items": {"type": "object"}, "minItems": 100}
    free = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    bound = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, json_schema=long)
    kinds = {"free": [free] * 32, "constrained": [bound] * 32, "one constrained": [bound] + [free] * 31}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with LLM(device="cpu", num_pages=400) as llm:
        for turn in range(rounds + 1):
            for name, params in kinds.items():
                steps, start = llm.stats.steps, time.process_time()
                done = llm.generate((PROMPTS * 8)[: len(params)], params)
                assert all(len(c.token_ids) == 64 for c in done)
                if turn:
                    times[name].append((time.process_time() - start) * 1e3 / (llm.stats.steps - steps))
    return {name: median(each) for name, each in times.items()}


def main() -> None:
    """Measure, print, and perhaps write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocab", type=int, help="also measure masks of a vocabulary of this size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default=platform.processor() or platform.machine(), help="its name in the file")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    tokenizers = [AutoTokenizer.from_pretrained(shipped_model())] + ([trained(args.vocab)] if args.vocab else [])
    versions = {"quire": __version__, "torch": torch.__version__, "llguidance": llguidance.__version__}
    result = {
        "device": args.device,
        "date": date.today().isoformat(),
        **versions,
        "runs": {"masks_us": [masks(own) for own in tokenizers], "step_cpu_ms": engine(args.rounds)},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
