"""A tiny model and adapters of it, by names, in float32; each is compared with the weights that PEFT merges."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM

from helpers.adapters import merged, save_adapter
from helpers.checkpoints import save

# Of each adapter: attention alone, all layers of two rank pages, ranks and scales of their own, and another rank page.
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 20, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "o_proj", "down_proj", "up_proj"],
        "rank_pattern": {"down_proj": 3, "layers.1.self_attn.o_proj": 33},
        "alpha_pattern": {"down_proj": 16},
    },
}


def save_merged(model_folder, adapter, folder):
    """A checkpoint with an adapter in its weights."""
    merged(AutoModelForCausalLM.from_pretrained(model_folder), adapter).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapted(tmp_path_factory):
    """A folder with the checkpoint "base", the adapters, and for each the checkpoint "<name>-merged"."""
    root = tmp_path_factory.mktemp("adapters")
    save("llama", root / "base")
    model = AutoModelForCausalLM.from_pretrained(root / "base")
    for name, settings in ADAPTERS.items():
        save_adapter(model, root / name, **settings)
        save_merged(root / "base", root / name, root / f"{name}-merged")
    return root
