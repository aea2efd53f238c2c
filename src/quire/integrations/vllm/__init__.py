"""Quire as an attention backend of vLLM.

    pip install 'quire-attention[vllm]'
    vllm serve <model> --attention-backend CUSTOM

vLLM calls `register` in each of its processes, by the entry point `quire` of the group `vllm.general_plugins`.
docs/vllm.md has what is computed and refused.
"""

from __future__ import annotations

from quire.distribution import pip_install

__all__ = ["BACKEND", "register"]

BACKEND = "quire.integrations.vllm.backend.VllmAttentionBackend"


def register() -> None:
    """Make `CUSTOM`, vLLM's name for a backend of another package, mean Quire's. Further calls have no effect.

    Raises:
        ImportError: vLLM is not installed, or has another interface.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(f"this needs vLLM, 0.26 to 0.33: {pip_install('vllm')} ({error})") from error
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
