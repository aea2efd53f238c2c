"""Test which architectures of causal language models run in Transformers with attn_implementation="quire".

    PYTHONPATH=src python tools/transformers_architectures.py            # all of them, about 20 minutes on one core
    PYTHONPATH=src python tools/transformers_architectures.py --only llama phimoe

A tiny model of each, as tools/architectures.py makes it, completes three prompts that are padded on the left, with a
dynamic and with a static cache. "Runs" means that the tokens are those of "eager", or else of "sdpa", which like Quire
gives 0 to rows of padding: recurrent layers hand these on to other tokens. "Refused" means that an error says why not,
a ValueError, or Transformers' KeyError for models without attention functions; "untried", that "eager" fails, too. All
else is "wrong".
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from architectures import VOCAB, architectures, save
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import quire.integrations.transformers  # noqa: F401  (which registers "quire")


def load(folder: Path, name: str) -> Any:
    """The model of a folder in float32, with an attention implementation."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name).eval()


def generate(model: Any, cache: str) -> Tensor:
    """Greedy tokens of a padded batch, the same in each call."""
    torch.manual_seed(1)
    tokens = torch.randint(10, VOCAB, (3, 21))
    mask = torch.ones_like(tokens)
    mask[1, :9] = mask[2, :20] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        found: Tensor = model.generate(tokens, attention_mask=mask, cache_implementation=cache, **options)
    return found


def attempt(name: str, folder: Path, windows: bool) -> tuple[str, str]:
    """An architecture's result and its reason; `windows` adds sliding windows to configurations without them."""
    try:
        save(name, folder, windows)
        model = load(folder, "eager")
        expected = {cache: generate(model, cache) for cache in ("dynamic", "static")}
    except Exception as error:
        return "untried", f"{type(error).__name__}: {error}"
    try:
        model = load(folder, "quire")
        differ = [cache for cache, tokens in expected.items() if not torch.equal(tokens, generate(model, cache))]
        if differ:
            other = load(folder, "sdpa")
            differ = [cache for cache in differ if not torch.equal(generate(model, cache), generate(other, cache))]
    except (ValueError, KeyError) as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return ("wrong", f"other tokens with a cache that is {differ}") if differ else ("runs", "")


def main() -> int:
    """Print a line for each architecture, and how many there are of each result; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, as in config.json")
    names = parser.parse_args().only or list(architectures())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    for name in names:
        torch.manual_seed(sum(name.encode()))
        with tempfile.TemporaryDirectory() as folder:
            what, why = attempt(name, Path(folder) / "windows", True)
            if what == "untried":
                what, why = attempt(name, Path(folder) / "full", False)
        counts[what] += 1
        print(f"{name}: {what} {' '.join(why.split())[:200]}", flush=True)
    print(dict(counts))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
