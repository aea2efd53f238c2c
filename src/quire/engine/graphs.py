"""CUDA graphs of steps: captured before the first request, replayed in place of thousands of launches.

There are graphs for steps of decodes, with one token per request, and for small steps that mix decodes and prompts. A
step is padded to the next larger shape. Where requests may have adapters, each shape has two graphs, one with the
products of adapters and one without. All graphs share one memory pool, since one runs at a time, and the tables of one
plan, since each graph contains the `plan` that fills them.

A graph of decodes also samples as if all requests were plain, so that the GPU does not wait for further launches where
all are. For other batches, `Sampler.launch` replaces these tokens. Graphs of mixed steps don't sample: most of their
rows of logits can be padding, and reading it may take longer than the launches.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.engine.batch import ForwardOutput, StepBatch
from quire.engine.graph_inputs import CapturedInputs, GraphInputs, HostInputs, StepShape

# The largest steps that have graphs. With a small model, the host takes as long to launch such a step as the GPU to
# compute it.
MAX_ROWS, MAX_TOKENS = 512, 8192


class StepGraphs:
    """Captured steps.

    Args:
        compute: computes the logits of a step, [shape.rows, vocab_size], from its inputs, and the hidden states of its
            tokens, [shape.tokens, hidden_size], or None.
        sample_greedy: samples a token for each row of the logits of decodes (`Sampler.sample_greedy`). Both are
            captured. None: another process samples.
        inputs: the inputs of all shapes.
        max_num_seqs, max_tokens: the most rows, and the most tokens of a mixed step that has a graph.
        variants: whether there are graphs with adapters and without, in the order in which they are captured.
        announce: called with the inputs of each step before it is replayed, so that other ranks replay it, too; None:
            there are none.
    """

    def __init__(
        self,
        compute: Callable[[CapturedInputs, StepShape], tuple[Tensor, Tensor | None]],
        sample_greedy: Callable[[Tensor], None] | None,
        inputs: GraphInputs,
        max_num_seqs: int,
        max_tokens: int,
        variants: Sequence[bool] = (False,),
        announce: Callable[[HostInputs], None] | None = None,
    ) -> None:
        self._announce = announce
        self._forward, self._sample_greedy = compute, sample_greedy
        self._inputs = inputs
        self._decodes = decode_sizes(max_num_seqs)
        self._mixed = [n for n in mixed_sizes(max_tokens) if n > max_num_seqs]
        self._max_rows, self._variants = self._decodes[-1], variants
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        # The logits and the hidden states that each graph writes.
        self._outputs: dict[StepShape, tuple[Tensor, Tensor | None]] = {}

    @property
    def shapes(self) -> list[StepShape]:
        """The shapes of all graphs, of each variant the largest first."""
        sizes = [(self._max_rows, tokens) for tokens in reversed(self._mixed)]
        sizes += [(rows, rows) for rows in reversed(self._decodes)]
        return [StepShape(rows, tokens, adapters) for adapters in self._variants for rows, tokens in sizes]

    def shape(self, batch: StepBatch, adapters: bool = False) -> StepShape | None:
        """The smallest shape that a step, with adapters or without, fits; None if it is too large."""
        tokens = batch.num_tokens
        if tokens == len(batch) <= self._max_rows:
            rows = self._decodes[bisect_left(self._decodes, tokens)]
            return StepShape(rows, rows, adapters)
        if len(batch) > self._max_rows or not self._mixed or tokens > self._mixed[-1]:
            return None
        return StepShape(self._max_rows, self._mixed[bisect_left(self._mixed, tokens)], adapters)

    def run(self, batch: StepBatch, adapters: bool = False) -> ForwardOutput | None:
        """Replay the graph of a step, with adapters or without; None if there is no graph for it."""
        shape = self.shape(batch, adapters)
        if shape is None or shape not in self._graphs:
            return None
        if shape.max_row_tokens > 1 and batch.num_rows > shape.rows:
            return None
        try:
            batch, inputs = self._inputs.prepare(batch, shape)
            if self._announce is not None:
                self._announce(inputs)
            self.replay(inputs)
        except BaseException:
            self._inputs.invalidate()
            raise
        logits, hidden = self._outputs[shape]
        return ForwardOutput(batch, logits[: batch.num_rows], shape.max_row_tokens == 1, hidden)

    def replay(self, inputs: HostInputs) -> None:
        """Replay the graph of a step with these inputs."""
        self._inputs.copy(inputs)
        self._graphs[inputs.shape].replay()

    def _compute(self, inputs: CapturedInputs, shape: StepShape) -> tuple[Tensor, Tensor | None]:
        inputs.write_pages()
        logits, hidden = self._forward(inputs, shape)
        logits = logits.contiguous()
        if shape.max_row_tokens == 1 and self._sample_greedy is not None:
            self._sample_greedy(logits)
        return logits, None if hidden is None else hidden.contiguous()

    def capture(self, progress: Callable[[list[StepShape]], Iterable[StepShape]] = iter) -> bool:
        """Capture all graphs, the largest first, so that the others find its memory in the pool.

        Args:
            progress: wraps the shapes in a progress bar.

        Returns:
            False, after a warning that says why, if the model cannot be captured; steps then run without graphs.
        """
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(self._inputs.device):
                for shape in progress(self.shapes):
                    self._graphs[shape], self._outputs[shape] = self._capture(shape, pool)
        except Exception as error:
            self._graphs.clear()
            self._outputs.clear()
            torch.cuda.synchronize(self._inputs.device)
            self._end_capture()
            message = (
                f"steps run without CUDA graphs, since the model cannot be captured: {type(error).__name__}: {error}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return False
        return True

    @torch.inference_mode()
    def _capture(self, shape: StepShape, pool: Any) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor | None]]:
        """Capture the step of a shape, after a run of padding that compiles its kernels; return the graph, and its
        logits and hidden states, whose memory the graphs that are captured later use, too.
        """
        self._inputs.fill_padding(shape)
        inputs = self._inputs.views(shape)
        side = torch.cuda.Stream(self._inputs.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(inputs, shape)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits, hidden = self._compute(inputs, shape)
        return graph, (_unowned(logits), None if hidden is None else _unowned(hidden))

    def _end_capture(self) -> None:
        """Capture a launch. A capture that fails leaves torch's random numbers in the state of a capture, in which no
        others can be drawn; one that succeeds ends that state.
        """
        with torch.cuda.device(self._inputs.device), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self._inputs.device)


def _unowned(x: Tensor) -> Tensor:
    """A contiguous tensor on a GPU as a view that does not own its memory, so that graphs captured later may use it,
    too.
    """
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype).view(x.shape)


class _Memory:
    """The memory of a contiguous tensor on a GPU, for tensors that do not keep it from being used for others."""

    def __init__(self, x: Tensor) -> None:
        shape, place = (x.numel() * x.element_size(),), (x.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": place, "version": 3}


def decode_sizes(max_rows: int) -> list[int]:
    """The numbers of rows that decodes are padded to: 1, 2, 4, then multiples of 8, beyond 256 of 32; and max_rows."""
    sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(288, max_rows, 32)) if n < max_rows]
    return [*sizes, max_rows]


def mixed_sizes(max_tokens: int) -> list[int]:
    """The numbers of tokens that mixed steps are padded to: from 32 on, powers of two and the middles between them, and
    from 256 on eight sizes between powers of two, since there the time of a step grows with its tokens.
    """
    powers = range(5, max_tokens.bit_length())
    sizes = [n for k in powers for n in range(1 << k, 2 << k, 1 << (k - (1 if k < 8 else 3)))]
    return [n for n in sizes if n < max_tokens] + ([max_tokens] if max_tokens >= 32 else [])
