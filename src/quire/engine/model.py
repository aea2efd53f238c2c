"""Transformers' own model classes with Quire as their attention.

A model is run on the tokens of all requests in one row, [1, tokens]: everything but attention treats tokens one by one.
The function that is registered with Transformers hands each layer's queries, keys and values to the `Step` that travels
with the call, and the step knows which tokens belong to which request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.serving.base import Heads, Layer

NAME = "quire"


class Step(Protocol):
    """One forward pass: computes a layer's attention."""

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Q [tokens, num_qo_heads, head_dim_qk], k and v [tokens, num_kv_heads, ...] of the new tokens; returns
        [tokens, num_qo_heads, head_dim_vo].
        """


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    quire_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, num_qo_heads, tokens, head_dim], key and value alike; returns
    [1, tokens, num_qo_heads, head_dim].
    """
    name = type(module).__name__
    if quire_step is None:
        raise ValueError(f"{name} does not pass keyword arguments on to its attention function")
    if attention_mask is not None:
        raise ValueError(f"{name} computes an attention mask of its own")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError(f"{name} is not causal")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = Layer(
        Heads(q.shape[1], k.shape[1], q.shape[2], v.shape[2]),
        sm_scale=float(scaling) if scaling is not None else q.shape[2] ** -0.5,
        window_left=sliding_window - 1 if sliding_window else -1,  # Transformers counts the token itself
        logits_soft_cap=float(softcap) if softcap else 0.0,
    )
    return quire_step.attend(module.layer_idx, layer, q, k, v, s_aux)[None], None


class _Probe:
    """A step that writes down what each layer asks for."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        self.layers[index] = layer
        return q.new_zeros(len(q), layer.heads.num_qo_heads, layer.heads.head_dim_vo)


class Model:
    """A causal language model from a checkpoint folder.

    Args:
        folder: a Hugging Face checkpoint: config.json, *.safetensors, and the tokenizer's files if text is wanted.
        device: where to compute.
        dtype: of weights and cache; None: float32 on the CPU, the checkpoint's own elsewhere.

    Attributes:
        layers: what each layer asks of attention.
        context: tokens that a request may have, at most.
        end_ids: the tokens that end an output.
        tokenizer: a Transformers tokenizer; None if the folder has none.

    Raises:
        FileNotFoundError: the folder, its config.json or its weights are missing.
        ValueError: the checkpoint is broken, or of a kind that can't be run.
    """

    def __init__(self, folder: str | Path, device: torch.device, dtype: torch.dtype | None) -> None:
        self.folder, self.device = Path(folder), device
        self._check_files()
        self.network = self._load(dtype)
        self.config = self.network.config.get_text_config()
        self.dtype: torch.dtype = self.network.dtype
        self.tokenizer = self._load_tokenizer()
        self.context: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.vocab_size: int = self.config.vocab_size
        self.end_ids = self._find_end_ids()
        self.layers = self._probe()

    @torch.inference_mode()
    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, step: Step) -> Tensor:
        """Logits after some of the tokens: tokens, positions int64 [n]; rows int64 [m]; returns [m, vocabulary]."""
        result = self.network(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, quire_step=step
        )
        return result.logits[0]

    def _check_files(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no model folder {self.folder}")
        if not (self.folder / "config.json").is_file():
            raise FileNotFoundError(f"{self.folder} has no config.json: it is not a Hugging Face checkpoint")
        if not any(self.folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{self.folder} has no *.safetensors file: the weights are missing")

    def _load(self, dtype: torch.dtype | None) -> Any:
        try:
            from transformers import AttentionInterface, AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ImportError(f"running models needs Transformers: pip install 'quire[engine]' ({error})") from error

        AttentionInterface.register(NAME, attention)
        if dtype is None and self.device.type == "cpu":
            dtype = torch.float32
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            network, report = AutoModelForCausalLM.from_pretrained(
                self.folder,
                dtype=dtype or "auto",
                attn_implementation=NAME,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # Transformers, safetensors and json raise what they like
            raise ValueError(f"{self.folder} could not be loaded: {type(error).__name__}: {error}") from error
        finally:
            if bars:
                logging.enable_progress_bar()
        for kind in ("missing_keys", "mismatched_keys"):
            if report.get(kind):
                names = sorted(str(key) for key in report[kind])
                raise ValueError(
                    f"{self.folder} has broken weights: {len(names)} {kind.replace('_', ' ')}, {names[0]} first"
                )
        return network.to(self.device).eval()

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if not any(
            (self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        ):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"the tokenizer of {self.folder} could not be loaded: {error}") from error

    def _find_end_ids(self) -> frozenset[int]:
        """The end tokens of generation_config.json, or else of the model's config."""
        path = self.folder / "generation_config.json"
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found = self.config.eos_token_id if found is None else found
        return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)

    def _probe(self) -> list[Layer]:
        """Run one token, and see what each layer asks for."""
        kinds = set(getattr(self.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ValueError(f"{self.folder} has layers of kinds that can't be run over pages: {sorted(kinds)}")
        probe, zero = _Probe(), torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            self.logits(zero, zero, zero, probe)
        except ValueError as error:
            raise ValueError(f"{self.folder} can't be run: {error}") from error
        count = self.config.num_hidden_layers
        if sorted(probe.layers) != list(range(count)):
            seen = len(probe.layers)
            raise ValueError(f"{self.folder}: {seen} of {count} layers use Transformers' attention interface, all must")
        layers = [probe.layers[i] for i in range(count)]
        for i, kind in enumerate(getattr(self.config, "layer_types", None) or []):
            if kind == "sliding_attention" and layers[i].window_left < 0:
                raise ValueError(f"{self.folder}: layer {i} is a sliding window, but does not say which")
        return layers
