"""What engines are timed on: requests of random or given lengths, and models of a shape without a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_LLAMA_70B = _LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "tie_word_embeddings": False,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "gpt-oss-20b": _GPT_OSS_20B,
    "half-llama-3.1-8b": _LLAMA_8B | {"num_hidden_layers": 16},
}
# Formats of the weights of a shape, as config.json has them; bf16 is none.
WEIGHTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "mxfp4": {"quant_method": "mxfp4"},
}
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """A request: the tokens of its prompt, the number of tokens to generate, whatever these are, and the name of its
    adapter, if it has one.
    """

    prompt: list[int]
    max_tokens: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class LatencyCell:
    """Requests that run together, or that come one by one into an engine in which others decode.

        64x1k+128        64 requests of 1,024 tokens generate 128 each
        1k into 64x512   prompts of 1,024 tokens come, one after the other, while 64 of 512 decode

    Attributes:
        batch, input, output: requests, and tokens of each one's prompt and output.
        arriving: tokens of the prompts that come into the busy engine; 0: the requests of the batch are timed.
    """

    batch: int
    input: int
    output: int
    arriving: int = 0

    @classmethod
    def parse(cls, text: str) -> LatencyCell:
        """The cell that a name describes; ValueError if it describes none."""
        size = r"([1-9]\d*k?)"
        if found := re.fullmatch(rf"{size}x{size}\+{size}", text):
            return cls(*map(_size, found.groups()))
        if found := re.fullmatch(rf"{size} into {size}x{size}", text):
            arriving, batch, length = map(_size, found.groups())
            return cls(batch, length, 0, arriving)
        raise ValueError(f"cell {text!r}: it must be like 64x1k+128 or like '1k into 64x512'")


def _size(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def as_range(text: str, name: str) -> Range:
    """The range of lengths that "100:1024", or "512" alone, denotes.

    Raises:
        ValueError: it denotes none; the message has `name`.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"{name} {text}: it must be a length, or two like 100:1024, the shorter one first")
    return low, high


def random_work(count: int, inputs: Range, outputs: Range, vocab_size: int, seed: int) -> list[Work]:
    """Requests of random tokens, with lengths of prompts and outputs drawn evenly from ranges, ends included."""
    random = Random(seed)
    # Special tokens have the lowest or the highest ids.
    first = min(1000, vocab_size // 2)
    last = vocab_size - first // 4
    lengths = [(random.randint(*inputs), random.randint(*outputs)) for _ in range(count)]
    return [Work([random.randrange(first, last) for _ in range(prompt)], output) for prompt, output in lengths]


def zipf(names: Sequence[str], count: int, seed: int) -> list[str]:
    """So many of the names, drawn by Zipf's law: the first is twice as likely as the second, thrice as the third."""
    return Random(seed).choices(names, [1 / rank for rank in range(1, len(names) + 1)], k=count)


def read_prompts(file: Path) -> Iterator[tuple[str, str | list[int], int]]:
    """Place ("file:line"), prompt and tokens to generate of JSON lines with "prompt", a string or a list of token ids,
    and "max_tokens" (128).

    Raises:
        ValueError: a line is not such an object, or there is none.
    """
    found = False
    # `splitlines` would also split at line separators of Unicode, which JSON may have within a string.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            prompt, max_tokens = given["prompt"], given.get("max_tokens", 128)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f'{file}:{number}: it must be a JSON object with "prompt"') from None
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)) or type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"{file}:{number}: prompt must be a string or token ids, and max_tokens positive")
        yield f"{file}:{number}", prompt, max_tokens
        found = True
    if not found:
        raise ValueError(f"{file} has no requests")


def read_work(file: Path, tokenizer: Any) -> list[Work]:
    """Requests of a file that `read_prompts` can read.

    Raises:
        ValueError: as `read_prompts`, or a prompt is a string and there is no tokenizer.
    """
    work = []
    for place, prompt, max_tokens in read_prompts(file):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(f"{place}: the prompt is a string, but the model has no tokenizer")
            prompt = tokenizer(prompt)["input_ids"]
        if not prompt:
            raise ValueError(f"{place}: the prompt has no tokens")
        work.append(Work(prompt, max_tokens))
    return work


def write_shape(name: str, folder: Path, weights: str = "bf16", context: int = 0) -> Path:
    """Write the config.json of a shape of `SHAPES`, which engines give random weights, into a folder.

    Args:
        name: of the shape.
        folder: that exists.
        weights: the format of the weights, of `WEIGHTS`.
        context: the number of tokens that requests may have, if it is more than the shape has.

    Raises:
        ValueError: there is no such shape or format, or the shape has no weights that the format is for.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape {name}: it must be one of {', '.join(SHAPES)}")
    if weights not in WEIGHTS:
        raise ValueError(f"--weights {weights}: it must be of {', '.join(WEIGHTS)}")
    shape = SHAPES[name] | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], context)
    if weights == "mxfp4" and not any("experts" in key for key in shape):
        raise ValueError(f"--weights mxfp4: it is a format of experts, which {name} does not have")
    settings = WEIGHTS[weights]
    (folder / "config.json").write_text(json.dumps(shape | ({"quantization_config": settings} if settings else {})))
    return folder
