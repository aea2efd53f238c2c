"""Tiny random checkpoints of several architectures, written with Transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from quire.engine import shipped_model

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=9),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, sliding_window=7, attn_logit_softcapping=5.0, final_logit_softcapping=30.0, query_pre_attn_scalar=16
    ),
    "gpt-oss": lambda: GptOssConfig(**SHAPE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
}
FURTHER_CONFIGS: dict[str, Any] = {  # which fewer tests run
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, sliding_window=7, query_pre_attn_scalar=16, sliding_window_pattern=2),
    "phi3": lambda: Phi3Config(**SHAPE),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}


def save(name: str, folder: Path, vocab_size: int = VOCAB, **changes: Any) -> Path:
    """A checkpoint with weights so large that its next token depends on all that it sees.

    Args:
        changes: attributes of the configuration.
    """
    config = (CONFIGS | FURTHER_CONFIGS)[name]()
    for attribute, value in {"vocab_size": vocab_size, **changes}.items():
        setattr(config, attribute, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, weight in model.named_parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2)
        elif "sinks" in key:
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


def save_with_tokenizer(name: str, folder: Path, columns: int = 11) -> Path:
    """A checkpoint with the tokenizer of `save_tokenizer`, whose logits have this number of columns without a token."""
    return save(name, folder, vocab_size=save_tokenizer(folder) + columns)


def save_tokenizer(folder: Path, *special: str, end: str = "<|end|>") -> int:
    """Save a byte-level BPE of this module's text, whose first tokens are the end token and these special ones, and
    return the number of its tokens.
    """
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[end, *special], initial_alphabet=alphabet, show_progress=False
    )
    own.train([__file__], trainer)
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token=end).save_pretrained(folder)
    return own.get_vocab_size()


def change_config(folder: Path, **changes: Any) -> Path:
    """The checkpoint, with other values in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The checkpoint, with weights that `change` has altered in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def enlarge(folder: Path, target: Path, keys: float, values: float) -> Path:
    """A checkpoint that computes the same, by keys and values that are larger by powers of two, whose factors are
    divided out of queries and outputs.
    """
    weights = load_file(shutil.copytree(folder, target) / "model.safetensors")
    key = "k_norm" if any("k_norm" in name for name in weights) else "k_proj"  # a norm undoes what precedes it
    factors = {key: keys, key.replace("k", "q", 1): 1 / keys, "v_proj": values, "o_proj.weight": 1 / values}
    for name in weights:
        weights[name] *= next((factor for part, factor in factors.items() if f".{part}" in name), 1.0)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def with_chat_template(folder: Path, template: str) -> Path:
    """A checkpoint of the bundled model, with a chat template, which it does not have."""
    folder.mkdir()
    for file in shipped_model().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return folder
