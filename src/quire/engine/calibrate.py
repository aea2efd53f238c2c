"""Measuring the scales of an fp8 cache over texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.engine.arguments import Prompt
from quire.engine.config import EngineConfig
from quire.engine.llm import LLM
from quire.engine.params import SamplingParams
from quire.engine.runner import Runner
from quire.engine.scales import Scales, write_scales
from quire.steps import Layer

# What the largest value that was measured becomes: half of the largest e4m3 number, 448, since other texts may have
# larger ones. Floating-point numbers keep their relative precision if the upper half of the range is left free.
_LARGEST = 224.0


class _Measuring(Runner):
    """A runner that keeps the largest absolute value of each layer's keys and values, [layers, 2]."""

    supports_overlap = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.largest = torch.zeros(len(self.model.layers), 2, device=self.model.device)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        new = torch.stack([k.abs().amax(), v.abs().amax()])
        torch.maximum(self.largest[index], new.float(), out=self.largest[index])
        return super().attend(index, layer, q, k, v, sinks)


def calibrate(
    model: str | Path | None,
    texts: Sequence[Prompt],
    file: str | Path,
    config: EngineConfig | None = None,
    **options: Any,
) -> Scales:
    """Measure the scales of an fp8 cache over texts, and write them to a file for `LLM(kv_cache_scales=...)`.

    The texts are computed with a cache of the model's dtype. The largest absolute key, or value, of a layer divided by
    its scale is 224, half of the largest e4m3 number. The same texts give the same scales, up to rounding.

    Args:
        model: as for `LLM`; None: the bundled model.
        texts: strings, or lists of token ids. Those that are longer than the model's context are cut into pieces.
        file: the safetensors file to write.
        config, options: as for `LLM`: device, dtype, max_model_len, ...; the cache has the model's dtype.

    Returns:
        the scales of the keys and of the values of each layer.

    Raises:
        OSError, ValueError: as for `LLM`; there are no texts; keys or values are not finite.
        RuntimeError: a text could not be computed.
    """
    config = replace(config or EngineConfig(), **options)
    if config.kv_cache_dtype != "auto":
        raise ValueError(f"kv_cache_dtype = {config.kv_cache_dtype!r}: scales are measured with the model's own dtype")
    with LLM(model, config, runner=_Measuring) as llm:
        listed = [llm.encode(text, f"text {i}") for i, text in enumerate(texts)]
        # A request generates a token.
        max_prompt = llm.max_len - 1
        pieces = [tokens[i : i + max_prompt] for tokens in listed for i in range(0, len(tokens), max_prompt)]
        if not pieces:
            raise ValueError("there are no texts to measure")
        runner = llm._engine.runner
        assert isinstance(runner, _Measuring)
        # Forget the tokens that were computed to check the model.
        runner.largest.zero_()
        for done in llm.generate(pieces, SamplingParams(temperature=0, max_tokens=1)):
            if done.finish_reason == "error":
                raise RuntimeError(f"a text could not be computed: {done.error}")
        largest = runner.largest.tolist()
    for i, pair in enumerate(largest):
        if not all(x < float("inf") for x in pair):
            raise ValueError(f"layer {i} has keys or values that are not finite")
    scales = [(k / _LARGEST or 1.0, v / _LARGEST or 1.0) for k, v in largest]
    write_scales(Path(file), scales)
    return scales
