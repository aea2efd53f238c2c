"""Recording a model's attention in a forward pass of a few tokens, and refusing models that would run wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.hf_attention import AttentionRecorder
from quire.engine.model import Model
from quire.steps import Layer


def record(model: Model, positions: list[int]) -> AttentionRecorder:
    """What the attention function is called with in a forward pass of one request with these positions."""
    found, on_device = AttentionRecorder(), torch.tensor(positions, device=model.device)
    # Token 0 may be padding, whose keys are 0.
    tokens = torch.full_like(on_device, model.vocab_size // 3)
    with model.refusing(positions):
        model.logits(tokens, on_device, on_device[:1] * 0, found)
    return found


def check_kinds(model: Model) -> None:
    """Refuse a model with layers that do not attend to a cache of keys and values.

    Raises:
        ValueError: it has some, as of linear attention.
    """
    other = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"{model.folder} has layers of kinds that can't be run over pages: {sorted(other)}")
    # Llama 4 scales queries of layers without rotary embedding by the place of their token in a step.
    has_nope = not all(getattr(model.config, "no_rope_layers", None) or [1])
    if has_nope and getattr(model.config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{model.folder}: its attention depends on the place of a token in a step (attn_temperature_tuning)"
        )


def check_layers(model: Model, layers: dict[int, Layer]) -> None:
    """Refuse a model with layers that do not call the attention function, or do not pass their sliding window to it.

    Raises:
        ValueError: it has some.
    """
    count = getattr(model.config, "num_hidden_layers", len(layers))
    if not layers or sorted(layers) != list(range(count)):
        used = len(layers)
        raise ValueError(f"{model.folder}: {used} of {count} layers use Transformers' attention interface, all must")
    kinds = getattr(model.config, "layer_types", None) or []
    windows = [i for i, layer in layers.items() if layer.window_left >= 0]
    for i, kind in enumerate(kinds):
        if kind == "sliding_attention" and i not in windows:
            raise ValueError(f"{model.folder}: layer {i} is a sliding window, but does not say which")
    window = getattr(model.config, "sliding_window", None)
    if window and not windows and not kinds:
        raise ValueError(
            f"{model.folder} has a sliding window of {window} tokens, which does not reach its attention function"
        )


def check_positions(model: Model) -> None:
    """Refuse a model whose position encoding depends on the longest request of a step.

    A few tokens are computed twice, the second time with the last one at the end of the context. The rotary embeddings,
    the queries and the keys of the other tokens must be equal in both passes.

    Raises:
        ValueError: they differ; the message names a max_model_len that helps.
    """
    near = [min(5 * i, model.context - 1) for i in range(4)]
    # Steps may be padded, so that the last token is not the last row.
    with _embeddings(model, len(near) - 1) as near_embeddings:
        short = record(model, near).rotated
    with _embeddings(model, len(near) - 1) as far_embeddings:
        long = record(model, [*near[:-1], model.context - 1]).rotated
    if not all(torch.equal(a, b) for a, b in zip(near_embeddings, far_embeddings, strict=False)):
        raise ValueError(_step_dependent(model))
    # The first layers are of all kinds, and rounding errors grow with depth.
    for i in range(min(8, len(short))):
        if (long[i] - short[i]).norm() > 0.01 * short[i].norm():
            raise ValueError(_step_dependent(model))


@contextmanager
def _embeddings(model: Model, count: int) -> Iterator[list[Tensor]]:
    """A list of what Transformers' modules for rotary embedding return in the block for the first `count` tokens."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        found.extend(part[..., :count, :].clone() for part in parts if isinstance(part, Tensor) and part.ndim > 1)

    modules = [module for module in model.network.modules() if "RotaryEmbedding" in type(module).__name__]
    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _step_dependent(model: Model) -> str:
    """The message for a model whose position encoding depends on the longest request of a step."""
    name, ropes = "original_max_position_embeddings", getattr(model.config, "rope_parameters", None) or {}
    places = [model.config.to_dict(), ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    known = [place[name] for place in places if place.get(name)]
    remedy = f"max_model_len={min(known)} runs it" if known else "a smaller max_model_len may run it"
    return (
        f"{model.folder} can't be run with a context of {model.context} tokens: its position encoding depends on the "
        f"longest request of a step, so that requests would change each other; {remedy}"
    )
