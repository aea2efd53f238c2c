"""Train the two adapters of the bundled model that ship with Quire, by PEFT. Two cores need some ten minutes.

    python tools/train_adapters.py --out examples/adapters

`typed` learns functions and classes with types and docstrings, of packages with permissive licences that Quire's extras
install, and `tests` the classes of tests of the standard library. Each folder that comes out is an adapter in PEFT's
format, with a `training.json` that records how it was made, and how well it predicts held-out text, in bits per byte,
beside the model without it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny import END, encode, rate
from transformers import AutoModelForCausalLM

from quire.engine import shipped_model

# Packages whose functions have annotations and docstrings, with their licences.
PACKAGES = {
    "anyio": "MIT",
    "huggingface_hub": "Apache-2.0",
    "httpx": "BSD-3-Clause",
    "prompt_toolkit": "BSD-3-Clause",
    "pydantic": "MIT",
    "rich": "MIT",
    "typer": "MIT",
}
LICENSE_OF_PYTHON = "PSF-2.0"
# Bytes of a text: shorter ones are stubs, and of longer ones the beginning says what there is to learn.
SHORTEST, LONGEST = 80, 4000
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Task:
    """What an adapter learns.

    Attributes:
        texts: to train on, and held out.
        sources: whose texts they are, with their licences.
        settings: of PEFT's LoraConfig.
    """

    texts: tuple[list[str], list[str]]
    sources: dict[str, str]
    settings: dict[str, Any]


def parsed(folder: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """The Python files under a folder that can be parsed: path, text and tree."""
    for path in sorted(folder.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield path.relative_to(folder).as_posix(), text, ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            # Files of tests that are invalid on purpose.
            continue


def source_of(text: str, node: ast.stmt) -> str:
    """The source of a definition, without its decorators and its indentation."""
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"


def is_typed(node: ast.AST) -> bool:
    """Whether a definition has a docstring and all types: of a function's arguments and result, or of those of all
    functions of a class.
    """
    if isinstance(node, ast.ClassDef):
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        return bool(functions) and ast.get_docstring(node) is not None and all(map(has_types, functions))
    return isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None and has_types(node)


def has_types(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    typed = all(each.annotation is not None or each.arg in ("self", "cls") for each in arguments)
    return typed and function.returns is not None


def is_test(node: ast.AST) -> bool:
    """Whether a definition is a class of tests."""
    if not isinstance(node, ast.ClassDef) or not any("TestCase" in ast.unparse(base) for base in node.bases):
        return False
    return any(isinstance(each, ast.FunctionDef) and each.name.startswith("test") for each in node.body)


def split(found: Iterator[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Texts to train on and held-out ones, of files that were held out when the bundled model was trained."""
    train: list[str] = []
    held_out: list[str] = []
    for path, text in found:
        if len(text) >= SHORTEST:
            bucket = hashlib.sha256(path.encode()).digest()[0]
            (held_out if bucket < 10 else train).append(text[:LONGEST])
    return train, held_out


def typed_definitions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        spec = util.find_spec(package)
        assert spec is not None, f"{package} is not installed"
        assert spec.origin is not None
        for path, text, tree in parsed(Path(spec.origin).parent):
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt) and is_typed(node):
                    yield f"{package}/{path}", source_of(text, node)


def test_classes() -> Iterator[tuple[str, str]]:
    for path, text, tree in parsed(Path(sysconfig.get_paths()["stdlib"]) / "test"):
        for node in tree.body:
            if is_test(node):
                yield f"test/{path}", source_of(text, node)


def tasks() -> dict[str, Task]:
    return {
        "typed": Task(
            texts=split(typed_definitions()),
            sources={f"{name} {metadata.version(name)}": license for name, license in PACKAGES.items()},
            settings={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
        ),
        "tests": Task(
            texts=split(test_classes()),
            sources={f"Python {sysconfig.get_python_version()}": LICENSE_OF_PYTHON},
            settings={"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": LINEAR},
        ),
    }


def next_token_nats(model: Any, ids: Tensor) -> Tensor:
    """The mean of -ln p(token) over `ids` [batch, length] but the first of each row."""
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Tokenizer, texts: list[str], context: int) -> float:
    """The bits that the beginnings of texts need, for each byte of them, the first tokens left out."""
    nats, num_bytes = 0.0, 0
    model.eval()
    for text in texts:
        ids = tokenizer.encode(text).ids[:context]
        nats += next_token_nats(model, torch.tensor([ids])).item() * (len(ids) - 1)
        num_bytes += len(tokenizer.decode(ids[1:]).encode())
    model.train()
    return nats / math.log(2) / num_bytes


def rows_of(ids: Tensor, end: int, batch: int, context: int) -> Tensor:
    """Rows [batch, context + 1] of a long row of tokens, which begin where a text does."""
    starts = (ids == end).nonzero().flatten() + 1
    starts = starts[starts < len(ids) - context - 1]
    chosen = starts[torch.randint(len(starts), (batch,))]
    return ids[chosen[:, None] + torch.arange(context + 1)]


def train(model: Any, ids: Tensor, end: int, args: argparse.Namespace) -> None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    begin = time.time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        loss = next_token_nats(model, rows_of(ids, end, args.batch, args.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, args.steps // 10) == 0:
            print(f"  step {step + 1:4d}  loss {loss.item():.3f}  {time.time() - begin:.0f} s", flush=True)


def save(model: Any, folder: Path, report: dict[str, Any]) -> None:
    """Save an adapter in PEFT's format, with the same bytes whenever it is the same."""
    model.save_pretrained(folder)
    # A card of the model without any content.
    (folder / "README.md").unlink()
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["target_modules"] = sorted(config["target_modules"], key=LINEAR.index)
    config["base_model_name_or_path"] = "tiny-python"
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def make(name: str, task: Task, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    base = shipped_model()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    train_texts, held_out = task.texts
    held_out = held_out[:: max(1, len(held_out) // 100)]
    ids = encode(tokenizer, train_texts)
    print(f"{name}: {len(train_texts)} texts, {len(ids):,} tokens", flush=True)
    without = bits_per_byte(network, tokenizer, held_out, args.context)
    model = get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **task.settings))
    (end,) = tokenizer.encode(END).ids
    train(model, ids, end, args)
    for weight in model.parameters():
        if weight.requires_grad:
            # What ships is measured.
            weight.data = weight.data.bfloat16().float()
    report = {
        "sources": task.sources,
        "parameters": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "texts": len(train_texts),
        "training_tokens": args.steps * args.batch * args.context,
        "held_out_texts": len(held_out),
        "held_out_bits_per_byte": round(bits_per_byte(model, tokenizer, held_out, args.context), 4),
        "held_out_bits_per_byte_without_adapter": round(without, 4),
        "steps": args.steps,
        "batch": args.batch,
        "context": args.context,
        "rate": args.rate,
        "seed": args.seed,
        "torch": torch.__version__,
        "peft": metadata.version("peft"),
    }
    print(json.dumps(report, indent=2), flush=True)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    save(model, args.out / name, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="the adapter to train, if not both")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--context", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, task in tasks().items():
        if args.only in (None, name):
            make(name, task, args)


if __name__ == "__main__":
    main()
