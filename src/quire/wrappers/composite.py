"""The base of wrappers that use other wrappers: cascades, shared prefixes, POD, mixed batches, block-sparse masks."""

from __future__ import annotations

from collections.abc import Sequence

from quire.wrappers.base import AttentionWrapper


class CompositeWrapper:
    """A wrapper whose plans are those of other wrappers."""

    _wrappers: Sequence[AttentionWrapper]

    def forget_cuda_graph(self) -> None:
        """Allow plans again after runs were captured in a CUDA graph without `use_cuda_graph`. The graph must not be
        replayed any more, since the next plan may free the tables that the graph reads.
        """
        for wrapper in self._wrappers:
            wrapper.forget_cuda_graph()

    def end_forward(self) -> None:
        """Kept for code that calls it; there is nothing to end."""
