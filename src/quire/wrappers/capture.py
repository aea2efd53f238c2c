"""What wrappers know about CUDA graphs that captured their runs."""

from __future__ import annotations

import torch


class CaptureGuard:
    """Refuses a plan that a captured graph would not see.

    A graph reads the tables of the plan that it was captured with. Where these are in buffers that the wrapper keeps
    (`fixed`), later plans write to the buffers, and the graph sees them. Otherwise the next plan would let go of tables
    that the graph still reads.
    """

    def __init__(self, device: torch.device, fixed: bool) -> None:
        self.fixed, self._gpu = fixed, device.type == "cuda"
        self.captured = False

    def note(self) -> None:
        """A run is launched now: remember if a graph captures it."""
        if self._gpu and not (self.fixed or self.captured):
            self.captured = torch.cuda.is_current_stream_capturing()

    def begin_plan(self, wrapper: str) -> None:
        """Start a plan.

        Raises:
            RuntimeError: a graph has captured a run of the last plan, and reads tables that this plan would replace.
        """
        if self.captured and not torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{wrapper}: a run of the plan before this one was captured in a CUDA graph, which reads "
                "that plan's tables. Make the wrapper with use_cuda_graph=True, whose graphs see later plans, or call "
                "forget_cuda_graph() if no such graph will be replayed any more, or you keep the tables that it reads"
            )
        self.captured = False
