"""Transformers' own model classes with Quire as their attention.

A model runs on the tokens of all requests in one row, [1, tokens], since only attention mixes tokens. The attention
function registered with Transformers passes each layer's queries, keys and values to the `Step` of the forward pass,
which knows the request of each token. Linear layers that share their input are computed by one matrix product, and
decoder layers may be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.engine import experts, projections
from quire.engine.attend import NAME, Padded, Record, Step, running
from quire.engine.checkpoint import check_files, load_network, load_tokenizer, read_config
from quire.engine.generation import read_generation_config
from quire.engine.regions import Regions, compile_errors, compiling, decoder_layers, last_norms, recorded_norms
from quire.steps import Layer

_READERS = 8  # threads that copy weights to a device
# Where a library's tiles do not divide the number of rows of a product, it may compute some rows otherwise than others,
# as MKL does with 7 rows and two threads.
_TILE = 64


class Model:
    """A causal language model from a checkpoint folder.

    Args:
        folder: a Hugging Face checkpoint: config.json, *.safetensors, and the tokenizer's files for text.
        device: the device of weights and cache.
        dtype: of weights and cache; None: float32 on the CPU, the checkpoint's dtype on other devices.
        max_model_len: a context shorter than the model's own; None: the model's own.
        compile: whether torch.compile compiles the decoder layers; "auto": on a GPU. Layers that it cannot compile run
            as Transformers has them, and a RuntimeWarning says why.
        load_format: "dummy" makes random weights instead of reading them, so that the folder needs only a config.json.
        trust_remote_code: whether to run Python code that comes with the checkpoint, which may do anything. Without it,
            a checkpoint that needs such code is refused.

    Attributes:
        layers: the parameters of each layer's attention.
        context: the largest number of tokens of a request.
        default_params: the sampling parameters of generation_config.json, for requests that leave them out.
        end_ids: the tokens that end an output, from generation_config.json or else config.json.
        tokenizer: a Transformers tokenizer; None if the folder has none.
        width: the number of tokens that `logits` computes in every step; None: those that the step has.

    Raises:
        FileNotFoundError: the folder, its config.json or its weights are missing.
        ValueError: the checkpoint is broken, quantized or of an unsupported kind, or max_model_len exceeds its context.
    """

    def __init__(
        self,
        folder: str | Path,
        device: torch.device,
        dtype: torch.dtype | None,
        max_model_len: int | None = None,
        compile: bool | Literal["auto"] = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        if compile not in (True, False, "auto"):
            raise ValueError(f"compile = {compile!r}: it must be True, False or 'auto'")
        self.folder, self.device = Path(folder), device
        self.width: int | None = None
        if load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format = {load_format!r}: it must be 'auto' or 'dummy'")
        dummy = load_format == "dummy"
        check_files(self.folder, dummy)
        config = read_config(self.folder, trust_remote_code)
        network = load_network(self.folder, config, device, dtype, dummy, trust_remote_code)
        self.network = _moved(network, device).eval().requires_grad_(False)
        self.config = self.network.config.get_text_config()
        self.dtype: torch.dtype = self.network.dtype
        self.tokenizer = load_tokenizer(self.folder, trust_remote_code)
        self.context = self._find_context(max_model_len)
        self.vocab_size: int = self.config.vocab_size
        self.default_params, ends = read_generation_config(self.folder, self.network)
        ends = getattr(self.config, "eos_token_id", None) if ends is None else ends
        self.end_ids = frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
        self._merged: list[projections.Merged] = []
        self._regions = Regions([])
        self.layers: list[Layer] = []
        self._own_experts = experts.replace(self.network) if device.type == "cuda" else None
        self._probe()
        if device.type == "cuda" if compile == "auto" else compile:
            self._compile()

    @property
    def compiled(self) -> bool:
        """Whether the decoder layers run compiled."""
        return self._regions.on

    def pad_steps(self, tokens: int) -> None:
        """Pad every step from now on to `tokens` tokens, rounded up to whole tiles, so that all products have the same
        shape. Steps of more tokens are computed as they are.
        """
        self.width = -(-tokens // _TILE) * _TILE

    @torch.inference_mode()
    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, step: Step) -> Tensor:
        """The logits of the tokens at `rows`: tokens, positions int64 [n]; rows int64 [m]; returns [m, vocab_size]."""
        if self.width is None:
            return self._computed(tokens, positions, rows, step)
        given, step = len(rows), Padded(step, len(tokens))
        tokens, positions, rows = (_padded(x, self.width) for x in (tokens, positions, rows))
        return self._computed(tokens, positions, rows, step)[:given]

    def _computed(self, tokens: Tensor, positions: Tensor, rows: Tensor, step: Step) -> Tensor:
        """`logits` of a step as it is."""
        with running(step, self.layers):
            if not self.compiled:
                return self._logits(tokens, positions, rows)
            try:
                with compiling(len(tokens)):
                    return self._logits(tokens, positions, rows)
            except compile_errors() as error:
                self._regions.give_up(error)
                return self._logits(tokens, positions, rows)

    def _logits(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        result = self.network(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
        )
        logits: Tensor = result.logits[0]
        return logits if len(logits) == len(rows) else logits[rows]  # not all models support logits_to_keep

    def _find_context(self, max_model_len: int | None) -> int:
        names = ("max_position_embeddings", "max_target_positions")  # the latter for Whisper's decoder
        own: int = next(filter(None, (getattr(self.config, name, None) for name in names)), 1 << 20)
        if max_model_len is not None and max_model_len > own:
            raise ValueError(f"max_model_len = {max_model_len}: the context of {self.folder} is {own} tokens")
        return max_model_len or own

    @torch.inference_mode()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """The logits of Transformers' own code, with eager attention: tokens int64 [n, len]; returns [n, len,
        vocab_size].
        """
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with self._unchanged(), self._refusing(list(range(tokens.shape[1]))):
            try:
                self.network.set_attn_implementation("eager")
                logits: Tensor = self.network(input_ids=tokens, position_ids=positions, use_cache=False).logits
            finally:
                self.network.set_attn_implementation(NAME)
        return logits

    def check_positions(self) -> None:
        """Refuse a model whose position encoding depends on the longest request of a step.

        A few tokens are computed twice, the second time with the last one at the end of the context. The queries and
        keys of the other tokens must be equal in both passes.

        Raises:
            ValueError: they differ; the message names a max_model_len that helps.
        """
        near = [min(5 * i, self.context - 1) for i in range(4)]
        short, long = (self._record([*near[:-1], last]).rotated for last in (near[-1], self.context - 1))
        for i in range(min(8, len(short))):  # covers all kinds of layers; rounding errors grow with depth
            if (long[i] - short[i]).norm() > 0.01 * short[i].norm():
                raise ValueError(self._step_dependent())

    def _probe(self) -> None:
        """Record the parameters of each layer's attention in a forward pass of one token, and merge linear layers."""
        other = set(getattr(self.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if other:
            raise ValueError(f"{self.folder} has layers of kinds that can't be run over pages: {sorted(other)}")
        with projections.recorded(self.network) as groups:
            record = self._record([0])
        self._check_layers(record.layers)
        self.layers = [record.layers[i] for i in range(len(record.layers))]
        self._attentions = [record.modules[i] for i in range(len(record.layers))]
        self._merge(groups)

    def _merge(self, groups: list[list[torch.nn.Linear]]) -> None:
        """Merge linear layers that share their input, unless the modelling code cannot use columns of a product."""
        self._merged = projections.merge(groups)
        try:
            self._record([0, min(1, self.context - 1)])
        except ValueError:  # a view of columns, say, for which the modelling code assumes whole rows
            self._enable_merged(False)
            self._merged = []

    def _enable_merged(self, on: bool) -> None:
        for merged in self._merged:
            merged.enable(on)

    def _enable_experts(self, on: bool) -> None:
        """Let `experts_forward` compute the experts that it replaced, or Transformers' own function."""
        if self._own_experts is not None:
            self.network.set_experts_implementation(NAME if on else self._own_experts)

    def _compile(self) -> None:
        for index, module in enumerate(self._attentions):
            module.quire_index = torch.tensor(index, device="cpu")
        layers = decoder_layers(self.network, self._attentions)
        projections.replace_linears(layers)
        norms = last_norms(self.network, layers)
        with recorded_norms(layers, norms) as handed:
            self._record([0])
        self._regions = Regions(layers, norms, handed)
        self._regions.enable(True)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """A context in which the network computes as Transformers has it."""
        compiled = self.compiled
        try:
            self._enable_merged(False)
            self._regions.enable(False)
            self._enable_experts(False)
            yield
        finally:
            self._enable_merged(True)
            self._regions.enable(compiled)
            self._enable_experts(True)

    def _record(self, positions: list[int]) -> Record:
        record, on_device = Record(), torch.tensor(positions, device=self.device)
        tokens = torch.full_like(on_device, self.vocab_size // 3)  # token 0 may be padding, whose keys are 0
        with self._refusing(positions):
            self.logits(tokens, on_device, on_device[:1] * 0, record)
        return record

    @contextmanager
    def _refusing(self, positions: list[int]) -> Iterator[None]:
        """Turn exceptions of the modelling code into a ValueError that refuses the model."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except ValueError as error:
            raise ValueError(f"{self.folder} can't be run: {error}") from error
        except Exception as error:
            what = f"a forward pass of positions {positions} fails with {type(error).__name__}: {error}"
            if not self.network.is_backend_compatible():
                what = f"it does not use Transformers' attention interface, and {what}"
            raise ValueError(f"{self.folder} can't be run: {what}") from error

    def _check_layers(self, layers: dict[int, Layer]) -> None:
        """Refuse models with layers that do not call `attention`, or do not pass their sliding window to it."""
        count = getattr(self.config, "num_hidden_layers", len(layers))
        if not layers or sorted(layers) != list(range(count)):
            used = len(layers)
            raise ValueError(f"{self.folder}: {used} of {count} layers use Transformers' attention interface, all must")
        kinds = getattr(self.config, "layer_types", None) or []
        windows = [i for i, layer in layers.items() if layer.window_left >= 0]
        for i, kind in enumerate(kinds):
            if kind == "sliding_attention" and i not in windows:
                raise ValueError(f"{self.folder}: layer {i} is a sliding window, but does not say which")
        window = getattr(self.config, "sliding_window", None)
        if window and not windows and not kinds:
            raise ValueError(
                f"{self.folder} has a sliding window of {window} tokens, which does not reach its attention function"
            )

    def _step_dependent(self) -> str:
        """The message for a model whose position encoding depends on the longest request of a step."""
        name, ropes = "original_max_position_embeddings", getattr(self.config, "rope_parameters", None) or {}
        places = [self.config.to_dict(), ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
        known = [place[name] for place in places if place.get(name)]
        remedy = f"max_model_len={min(known)} runs it" if known else "a smaller max_model_len may run it"
        return (
            f"{self.folder} can't be run with a context of {self.context} tokens: its position encoding depends on the "
            f"longest request of a step, so that requests would change each other; {remedy}"
        )


def _padded(x: Tensor, width: int) -> Tensor:
    """A vector with zeros behind it, up to `width` elements."""
    return F.pad(x, (0, max(0, width - len(x))))


def _moved(network: Any, device: torch.device) -> Any:
    """The network on a device. Its weights are pages of the mapped files until they are copied there, which several
    threads do at once, since each waits for the pages that it touches.
    """

    def move(tensor: Tensor) -> None:
        tensor.data = tensor.data.to(device)

    if device.type == "cuda":
        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(move, network.parameters()))
    return network.to(device)
