"""Tiny random checkpoints of models that also see images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

from helpers.checkpoints import SHAPE

IMAGE, VIDEO = 95, 94
TEXT = {key: value for key, value in SHAPE.items() if key != "num_hidden_layers"} | {"num_hidden_layers": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8, "num_channels": 3}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8}
IMAGE_ID, IMAGE_INDEX = {"image_token_id": IMAGE}, {"image_token_index": IMAGE}
QWEN_IDS = {**IMAGE_ID, "video_token_id": VIDEO, "vision_start_token_id": 93, "vision_end_token_id": 92}
CLIP = {**VISION, "model_type": "clip_vision_model"}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def qwen(sections: list[int], vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {"text_config": {**TEXT, "rope_parameters": rope, **text}, "vision_config": vision, **QWEN_IDS}


# The class of the configuration of each family, and what it is made of.
FAMILIES: dict[str, Any] = {
    "Llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, **IMAGE_INDEX},
    "LlavaNext": {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": CLIP, **IMAGE_INDEX},
    "LlavaOnevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": SIGLIP,
        **IMAGE_INDEX,
        "video_token_index": VIDEO,
    },
    "Mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 7},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        **IMAGE_INDEX,
    },
    "Gemma3": {
        "text_config": {**TEXT, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        **IMAGE_INDEX,
    },
    "Qwen2VL": qwen(
        [2, 1, 1], {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8}, head_dim=8
    ),
    "Qwen2_5_VL": qwen([2, 1, 1], {**QWEN_VISION, "out_hidden_size": 32, "fullatt_block_indexes": [0]}, head_dim=8),
    "Qwen3VL": qwen([2, 3, 3], {**QWEN_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}),
    "Qwen3VLMoe": qwen([2, 3, 3], {**QWEN_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}, **EXPERTS),
    "InternVL": {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
        **IMAGE_ID,
    },
    "Idefics3": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, **IMAGE_ID},
}


def save(family: str, folder: Path) -> Path:
    """A checkpoint with weights so large that its next token depends on all that it sees."""
    torch.manual_seed(0)
    return save_random(getattr(transformers, f"{family}Config")(**FAMILIES[family]), folder)


def save_random(config: Any, folder: Path) -> Path:
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return folder
