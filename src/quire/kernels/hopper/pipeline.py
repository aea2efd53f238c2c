"""What consumers of all pipelines share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def release(bar):
    """Release a stage whose products this warp has waited for. Each thread arrives for itself: Triton puts a barrier of
    all warps before the usual arrival, which one thread makes. An arrival waits for the thread's asynchronous copies.
    """
    async_copy.mbarrier_arrive(bar, increment_count=False)
