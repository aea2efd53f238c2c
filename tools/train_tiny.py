"""Train the small language model that ships with Quire.

A Llama-architecture model of 5.5 million parameters with a byte-pair vocabulary of 4,096, trained on the Python
sources of a standard library: text that every machine with Python has. One H100 needs about five minutes.

    python tools/train_tiny.py --out src/quire/models/tiny-python

The folder that comes out is an ordinary Hugging Face checkpoint. `training.json` in it records how it was made and
how well it predicts held-out files, in bits per byte, beside what `xz -9` needs for the same text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCAB = 4096
CONTEXT = 2048
# Words, single digits, operators, and a newline with the indentation that follows it.
PRETOKEN = r" ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\r?\n *|\s+"


def read_corpus(folder: Path, max_file: int = 800_000) -> tuple[list[str], list[str]]:
    """Python files under `folder`, split into training and held-out texts by a hash of the path (4% held out)."""
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if "site-packages" in name or "dist-packages" in name or name.startswith("encodings/"):
            continue  # encodings/ is tables of numbers
        if not 200 < path.stat().st_size < max_file:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # test files that are invalid on purpose
        bucket = hashlib.sha256(name.encode()).digest()[0]
        (held_out if bucket < 10 else train).append(text)
    if len(train) < 100:
        sys.exit(f"train_tiny: {folder} holds only {len(train)} usable Python files; name a standard library")
    return train, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one row of token ids, each text closed by the end token."""
    end = tokenizer.token_to_id(END)
    ids = [np.array([*e.ids, end], dtype=np.int32) for e in tokenizer.encode_batch(texts)]
    return torch.from_numpy(np.concatenate(ids)).long()


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Dropout on what each block adds to the residual stream: the corpus is small, and is read some thirty times."""

    def drop(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, p, training=module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 2% of the steps, then a cosine down to zero."""
    warm = max(1, steps // 50)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def next_token_nats(model: LlamaForCausalLM, ids: torch.Tensor, skip: int = 0) -> torch.Tensor:
    """Sum of -ln p(token) over `ids` [batch, length], the first `skip` predictions of each row left out."""
    logits = model(input_ids=ids[:, :-1]).logits.float()
    targets = ids[:, 1:].clone()
    targets[:, :skip] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, ids: torch.Tensor, num_bytes: int, device: str) -> float:
    """Windows of a whole context that advance by half of it, so that each token but the first has a long past."""
    model.eval()
    half, nats = CONTEXT // 2, 0.0
    start = 0
    while start == 0 or start + half < len(ids):
        window = ids[start : start + CONTEXT + 1].to(device)[None]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            nats += next_token_nats(model, window, skip=0 if start == 0 else half).item()
        start += half
    model.train()
    return nats / math.log(2) / num_bytes


def optimizer_for(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=torch.cuda.is_available())


def train(
    model: LlamaForCausalLM, ids: torch.Tensor, valid: torch.Tensor, valid_bytes: int, args: argparse.Namespace
) -> None:
    torch.set_float32_matmul_precision("high")
    cuda = args.device == "cuda"
    forward = torch.compile(model) if cuda else model
    optimizer = optimizer_for(model, args.rate)
    ids = ids.to(args.device)
    offsets = torch.arange(CONTEXT + 1, device=args.device)
    start = time.time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        starts = torch.randint(len(ids) - CONTEXT - 1, (args.batch, 1), device=args.device)
        batch = ids[starts + offsets]
        with torch.autocast(args.device, torch.bfloat16, enabled=cuda):
            loss = next_token_nats(forward, batch) / (args.batch * CONTEXT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, args.steps // 20) == 0:
            bpb = bits_per_byte(model, valid[: 64 * CONTEXT], int(valid_bytes * 64 * CONTEXT / len(valid)), args.device)
            tokens = (step + 1) * args.batch * CONTEXT
            speed = tokens / (time.time() - start)
            print(
                f"step {step + 1:6d}  loss {loss.item():.3f}  held out {bpb:.3f} bit/byte  {speed:,.0f} tokens/s",
                flush=True,
            )


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, device: str, tokens: int = 60) -> str:
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    return tokenizer.decode(model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch", type=int, default=32, help=f"rows of {CONTEXT} tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    train_texts, held_out = read_corpus(args.corpus)
    tokenizer = train_tokenizer(train_texts)
    ids, valid = encode(tokenizer, train_texts), encode(tokenizer, held_out)
    text = "".join(held_out).encode()
    print(
        f"{len(train_texts)} files, {len(ids):,} tokens to train on; "
        f"{len(held_out)} files, {len(text):,} bytes held out"
    )

    model = new_model().to(args.device)
    add_dropout(model, args.dropout)
    train(model, ids, valid, len(text), args)

    model = model.to(torch.bfloat16)  # measure what ships
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": args.steps * args.batch * CONTEXT,
        "corpus_tokens": len(ids),
        "held_out_bytes": len(text),
        "held_out_bits_per_byte": round(bits_per_byte(model, valid, len(text), args.device), 4),
        "xz_9_bits_per_byte": round(8 * len(lzma.compress(text, preset=9)) / len(text), 4),
        "steps": args.steps,
        "batch": args.batch,
        "rate": args.rate,
        "dropout": args.dropout,
        "seed": args.seed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    }
    print(json.dumps(report, indent=2))
    model.eval()
    for prompt in ("def fibonacci(n):\n", "import os\n\ndef walk_files(path):\n    ", "class Stack:\n"):
        print("-" * 80 + "\n" + sample(model, tokenizer, prompt, args.device))

    model.save_pretrained(args.out)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, model_max_length=CONTEXT)
    fast.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
