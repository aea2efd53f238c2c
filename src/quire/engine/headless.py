"""Checkpoints of language models without their heads, as those of embedding models often are."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

_MARK = "quire_is_headless"


def replace_head(network: Any, folder: Path, missing: Collection[str]) -> bool:
    """Let a network whose head is missing in its checkpoint compute with the weights of its embeddings in its place,
    which takes no memory.

    Args:
        network: Transformers' model.
        folder: its checkpoint. The head may be missing if that was saved by a class without one, or has the file
            modules.json of sentence-transformers.
        missing: the names of the parameters that the checkpoint does not have.

    Returns:
        whether the head has been replaced. The logits are then not those of a language model, but the hidden states are
        right.
    """
    head, embeddings = network.get_output_embeddings(), network.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embeddings, nn.Embedding):
        return False
    of_head = {name for name, parameter in network.named_parameters() if parameter is head.weight}
    saved_by = str(next(iter(network.config.architectures or ()), ""))
    is_saved_so = re.search("(?<!Head)Model$", saved_by) is not None or (folder / "modules.json").is_file()
    if set(missing) != of_head or not is_saved_so or head.weight.shape != embeddings.weight.shape:
        return False
    head.weight = embeddings.weight
    setattr(network, _MARK, True)
    return True


def is_headless(network: Any) -> bool:
    """Whether `replace_head` has replaced the head of a network."""
    return getattr(network, _MARK, False)
