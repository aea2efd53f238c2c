"""Transformers' own model classes with Quire as their attention: the forward pass of a step.

A model runs on the tokens of all requests in one row, [1, tokens], since only attention mixes tokens. The attention
function registered with Transformers passes each layer's queries, keys and values to the `StepAttention` of the forward
pass, which knows the request of each token. `quire.engine.load` makes models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.engine.adapters.step import AdapterStep
from quire.engine.compiled_layers import CompiledLayers
from quire.engine.generation import read_generation_config
from quire.engine.headless import is_headless
from quire.engine.hf_attention import NAME, PaddedAttention, StepAttention, running
from quire.engine.multimodal import media_tokens
from quire.engine.parallel.errors import RankError
from quire.engine.weights.modules import move
from quire.steps import Layer

# Where a library's tiles do not divide the number of rows of a product, it may compute some rows otherwise than others,
# as MKL does with 7 rows and two threads.
_TILE = 64


class Replacement(Protocol):
    """What computes a part of a network in another way than Transformers, and can be taken out again."""

    on: bool

    def enable(self, on: bool) -> None:
        """Compute the part by the replacement, or as Transformers has it."""


class HiddenStates:
    """What a network returns without its language-model head: the states of tokens after the last norm.

    Args:
        network: Transformers' model.

    Attributes:
        last: the states of the last forward pass of one row of tokens, [n, size]; None if it has not returned them.
        size: the number of elements of a state; None if no pass has returned one.
    """

    def __init__(self, network: Any) -> None:
        self.last: Tensor | None = None
        self.size: int | None = None
        network.base_model.register_forward_hook(self._keep)

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if isinstance(states, Tensor) and states.ndim == 3 and len(states) == 1:
            self.last, self.size = states[0], states.shape[2]


class Model:
    """A causal language model.

    Args:
        folder: the checkpoint that it is from.
        network: Transformers' model on its device, with Quire's attention function.
        tokenizer: its Transformers tokenizer; None if it has none.
        max_model_len: a context shorter than the model's own; None: the model's own.

    Attributes:
        config: the configuration of the language model.
        device, dtype: of the weights.
        layers: the parameters of each layer's attention, which `quire.engine.load` finds.
        context: the largest number of tokens of a request.
        default_params: the sampling parameters of generation_config.json, for requests that leave them out.
        media_tokens: the tokens that stand for something else than text, and what that is: {151655: "image"}.
        end_ids: the tokens that end an output, from generation_config.json or else config.json.
        replacements: what computes parts of the network in place of Transformers.
        compiled_layers: the compiled decoder layers, of which there may be none; one of the replacements.
        hidden_states: of the tokens of the last `logits`.
        is_headless: whether the checkpoint has no language-model head, so that only embeddings can be computed.
        pooling: `EngineConfig.pooling`.
        chooses_rows: whether the network computes only the logits that are needed; True until a pass shows otherwise.
        width: the number of tokens that `logits` computes in every step; None: those that the step has.

    Raises:
        ValueError: max_model_len exceeds the model's context.
    """

    def __init__(self, folder: Path, network: Any, tokenizer: Any, max_model_len: int | None = None) -> None:
        self.folder, self.network = folder, network
        self.tokenizer = tokenizer
        self.config = network.config.get_text_config()
        self.device: torch.device = next(network.parameters()).device
        # Parameters of 8 bits are codes of quantized weights.
        params = network.parameters()
        self.dtype: torch.dtype = next(p.dtype for p in params if p.is_floating_point() and p.itemsize > 1)
        self.context = self._find_context(max_model_len)
        self.vocab_size: int = self.config.vocab_size
        self.default_params, end_ids = read_generation_config(folder, network)
        end_ids = getattr(self.config, "eos_token_id", None) if end_ids is None else end_ids
        self.media_tokens = media_tokens(network.config)
        self.end_ids = frozenset() if end_ids is None else frozenset([end_ids] if isinstance(end_ids, int) else end_ids)
        self.layers: list[Layer] = []
        self.replacements: list[Replacement] = []
        self.compiled_layers = CompiledLayers([])
        self.width: int | None = None
        self.chooses_rows = True
        self.is_headless, self.pooling = is_headless(network), "auto"
        self.hidden_states = HiddenStates(network)

    def _find_context(self, max_model_len: int | None) -> int:
        # Whisper's decoder has the second name.
        names = ("max_position_embeddings", "max_target_positions")
        longest: int = next(filter(None, (getattr(self.config, name, None) for name in names)), 1 << 20)
        if max_model_len is not None and max_model_len > longest:
            raise ValueError(f"max_model_len = {max_model_len}: the context of {self.folder} is {longest} tokens")
        return max_model_len or longest

    def move(self, device: torch.device) -> None:
        """Move the weights to a device, where the model computes from then on."""
        move(self.network, device)
        self.device = device

    @property
    def compiled(self) -> bool:
        """Whether the decoder layers run compiled."""
        return self.compiled_layers.on

    def pad_steps(self, tokens: int) -> None:
        """Pad every step from now on to `tokens` tokens, rounded up to whole tiles, so that all products have the same
        shape. Steps of more tokens are computed as they are.
        """
        self.width = -(-tokens // _TILE) * _TILE

    @torch.inference_mode()
    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        step: StepAttention,
        adapters: AdapterStep | None = None,
    ) -> Tensor:
        """The logits of the tokens at `rows`.

        Args:
            tokens, positions: int64 [n].
            rows: int64 [m].
            step: computes attention.
            adapters: those of the tokens, of a step that is padded to `width`; None: no token has one.

        Returns:
            [m, vocab_size].
        """
        if adapters is None:
            return self._padded(tokens, positions, rows, step)
        with adapters.running():
            self.compiled_layers.with_adapters = True
            try:
                return self._padded(tokens, positions, rows, step)
            finally:
                self.compiled_layers.with_adapters = False

    def _padded(self, tokens: Tensor, positions: Tensor, rows: Tensor, step: StepAttention) -> Tensor:
        """`logits` of a step that is padded to `width`."""
        # The states of the last step would take memory during this one.
        self.hidden_states.last = None
        if self.width is None:
            return self._computed(tokens, positions, rows, step)
        num_tokens, num_rows = len(tokens), len(rows)
        tokens, positions, rows = (_padded(x, self.width) for x in (tokens, positions, rows))
        logits = self._computed(tokens, positions, rows, PaddedAttention(step, num_tokens))
        if self.hidden_states.last is not None:
            self.hidden_states.last = self.hidden_states.last[:num_tokens]
        return logits[:num_rows]

    def _computed(self, tokens: Tensor, positions: Tensor, rows: Tensor, step: StepAttention) -> Tensor:
        """`logits` of a step as it is."""
        with running(step, self.layers):
            if not self.compiled:
                return self._logits(tokens, positions, rows)
            # Importing Inductor takes long, and is only necessary for compiled layers.
            from quire.engine.inductor_passes import COMPILE_ERRORS, compiling

            try:
                with compiling(len(tokens) <= self.compiled_layers.max_few_tokens):
                    return self._logits(tokens, positions, rows)
            except COMPILE_ERRORS as error:
                self.compiled_layers.give_up(error)
                return self._logits(tokens, positions, rows)

    def _logits(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        result = self.network(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
        )
        logits: Tensor = result.logits[0]
        # A model that does not support logits_to_keep returns the logits of all tokens, which the first pass of two
        # tokens shows.
        self.chooses_rows = self.chooses_rows and len(logits) == len(rows)
        return logits if self.chooses_rows else logits[rows]

    @torch.inference_mode()
    def transformers_logits(self, tokens: Tensor) -> Tensor:
        """The logits of Transformers' own code, with eager attention: tokens int64 [n, len]; returns [n, len,
        vocab_size].
        """
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with self.unchanged(), self.refusing(list(range(tokens.shape[1]))):
            try:
                self._set_attention("eager")
                logits: Tensor = self.network(input_ids=tokens, position_ids=positions, use_cache=False).logits
            finally:
                self._set_attention(NAME)
        return logits

    def _set_attention(self, name: str) -> None:
        """Have the language model call another attention function."""
        config = self.network.config
        of_text = [key for key in config.sub_configs if getattr(config, key) is self.config]
        # Transformers warns of parts that have been removed, such as that for images, if theirs is set, too.
        self.network.set_attn_implementation({"": name, **dict.fromkeys(of_text, name)} if of_text else name)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context in which the network computes as Transformers has it, and steps are not padded."""
        replaced, width = [part for part in self.replacements if part.on], self.width
        try:
            self.width = None
            for part in replaced:
                part.enable(False)
            yield
        finally:
            self.width = width
            for part in replaced:
                part.enable(True)

    @contextmanager
    def refusing(self, positions: list[int]) -> Iterator[None]:
        """Turn exceptions of the modelling code into a ValueError that refuses the model."""
        try:
            yield
        except (torch.OutOfMemoryError, RankError):
            raise
        except ValueError as error:
            raise ValueError(f"{self.folder} can't be run: {error}") from error
        except Exception as error:
            what = f"a forward pass of positions {positions} fails with {type(error).__name__}: {error}"
            if not self.network.is_backend_compatible():
                what = f"it does not use Transformers' attention interface, and {what}"
            raise ValueError(f"{self.folder} can't be run: {what}") from error


def _padded(x: Tensor, width: int) -> Tensor:
    """A vector with zeros behind it, up to `width` elements."""
    return F.pad(x, (0, max(0, width - len(x))))
