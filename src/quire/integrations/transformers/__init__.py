"""Quire as an attention function of Hugging Face Transformers.

    import quire.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="quire")

The import registers the attention function and the mask function "quire", and lets `generate_batch` (continuous
batching) take a model that has this attention implementation. `docs/transformers.md` has what is computed and refused.
"""

from quire.distribution import pip_install

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(f"this needs Transformers: {pip_install('engine')} ({error})") from error

from quire.integrations.transformers.attend import attention
from quire.integrations.transformers.continuous import NAME, admit
from quire.integrations.transformers.masks import mask

__all__ = ["NAME", "attention", "mask"]

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
admit()
