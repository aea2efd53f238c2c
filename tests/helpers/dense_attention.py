"""Attention of dense batches as Transformers' models call it, and by the oracle; small models with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from helpers.checkpoints import CONFIGS, SHAPE
from quire.definition import AttentionSpec
from quire.definition.oracle import attend

# Values have other heads than queries and keys.
_LATENT = {key: value for key, value in SHAPE.items() if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "head_dim": 8,  # the part of queries and keys that is rotated
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, Any] = {**CONFIGS, "deepseek-v3": lambda: DeepseekV3Config(**_LATENT)}


def network(name: str | Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of this name in MODELS, or of a config, with weights so large that its next token depends on all that it
    sees, of a few layers and with Transformers' own attention, "eager".
    """
    config = MODELS[name]() if isinstance(name, str) else name
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for key, weight in model.named_parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2)
        elif "sinks" in key:
            torch.nn.init.normal_(weight)
    model.generation_config.pad_token_id = 0
    return model.to(device, dtype).eval()


def padded(batch: int, length: int, side: str, device: str = "cpu") -> Tensor:
    """A mask of ones, int64 [batch, length], but up to 5 tokens of padding per row on one side, or none on side ""."""
    mask = torch.ones(batch, length, dtype=torch.int64, device=device)
    for row, count in zip(mask, [0, *torch.randint(1, 6, (batch - 1,)).tolist()], strict=True):
        if side:
            row[slice(None, count) if side == "left" else slice(length - count, None)] = 0
    return mask


def seen_by(mask_function: Any, batch: int, q_len: int, kv_len: int, padding: Tensor | None = None) -> Tensor:
    """bool [batch, q_len, kv_len]: what query tokens, the last ones, see according to Transformers."""
    return sdpa_mask(
        batch_size=batch,
        q_length=q_len,
        kv_length=kv_len,
        q_offset=kv_len - q_len,
        mask_function=mask_function,
        attention_mask=padding,
        allow_is_causal_skip=False,
    )[:, 0]


def expected(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The oracle's output, float64 [batch, q_len, heads, head_dim_vo], where bool `seen` [batch, q_len, kv_len] alone
    says what is seen. q, k, v: [batch, heads, length, head_dim].
    """
    spec = AttentionSpec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[3],
        head_dim_vo=v.shape[3],
        q_dtype=q.dtype,
        causal=False,
        sm_scale=scale,
        logits_soft_cap=softcap,
        custom_mask=True,
        sinks=sinks is not None,
    )
    rows = zip(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen, strict=True)
    return torch.stack([attend(*row, spec, mask=mask, sinks=sinks)[0] for *row, mask in rows])
