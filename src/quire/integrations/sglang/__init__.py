"""Quire as an attention backend of SGLang.

    pip install 'quire-attention[sglang]'
    python -m sglang.launch_server --model-path <model> --attention-backend quire

SGLang loads the plug-in, `register`, by the entry point "sglang.srt.plugins" in each of its processes.
`docs/sglang.md` has what is computed and refused.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "quire"


def register() -> None:
    """Add "quire" to the attention backends that SGLang offers; a second call changes nothing."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
    )

    if NAME in ATTENTION_BACKEND_CHOICES:
        return
    register_attention_backend(NAME)(_backend)
    add_attention_backend_choices([NAME])
    add_deterministic_attention_backend_choices([NAME])


def _backend(runner: Any) -> Any:
    """The backend of a model runner, whose module imports SGLang's attention layers, which take seconds."""
    from quire.integrations.sglang.backend import SGLangAttentionBackend

    return SGLangAttentionBackend(runner)
