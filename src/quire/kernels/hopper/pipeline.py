"""Pipelines of stages in shared memory, with CUTLASS's names.

A producer acquires a stage once its consumers have released it, fills it and commits it; a consumer waits for it, uses
it and releases it. Each of them keeps a PipelineState of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.gpu.triton_internals import aggregate


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A program's pipeline of blocks of keys and values.

    Attributes:
        stages: blocks in the pipeline.
        consumers: warp groups that use each block.
        load_warps: warps of the producer.
    """

    stages: int
    consumers: int
    load_warps: int


@aggregate
class PipelineState:
    """The position of a producer or a consumer in a pipeline of `stages` stages: `count` uses of stages so far."""

    count: gl.tensor
    stages: gl.constexpr

    @gluon.jit
    def stage(self):
        """The index of the stage."""
        return self.count % self.stages

    @gluon.jit
    def phase(self):
        """The parity of the phase of the stage's mbarrier `full` that a consumer waits for."""
        return self.count // self.stages & 1

    @gluon.jit
    def advance(self, uses):
        """The state after `uses` more uses of stages."""
        return PipelineState(self.count + uses, self.stages)


@aggregate
class Pipeline:
    """Two mbarriers of each stage: the producer arrives at `full`, consumers at `empty`."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def producer_acquire(self, state):
        """Wait until consumers have released the stage."""
        mbarrier.wait(self.empty.index(state.stage()), state.phase() ^ 1)

    @gluon.jit
    def producer_commit(self, state):
        """Commit the stage: each thread arrives when its asynchronous copies have."""
        async_copy.mbarrier_arrive(self.full.index(state.stage()), increment_count=False)

    @gluon.jit
    def producer_commit_once(self, state):
        """Commit the stage once all warps have come here: one thread arrives for all."""
        mbarrier.arrive(self.full.index(state.stage()), count=1)

    @gluon.jit
    def consumer_wait(self, state):
        """Wait until the stage is committed."""
        mbarrier.wait(self.full.index(state.stage()), state.phase())

    @gluon.jit
    def consumer_release(self, state):
        """Release the stage, whose products this warp has waited for: each thread arrives, once its asynchronous copies
        have, so that no warp waits for another one.
        """
        async_copy.mbarrier_arrive(self.empty.index(state.stage()), increment_count=False)

    @gluon.jit
    def consumer_release_once(self, state, arrivals: gl.constexpr = 1, pred=True):
        """Release the stage, if `pred`, once all warps have come here: one thread arrives, as many times as the
        mbarrier counts for this consumer. It does not wait for asynchronous copies.
        """
        mbarrier.arrive(self.empty.index(state.stage()), count=arrivals, pred=pred)


@gluon.jit
def allocate_mbarriers(stages: gl.constexpr, arrivals: gl.constexpr):
    """An mbarrier for each stage, which completes a phase after `arrivals` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(bars.index(s), count=arrivals)
    return bars


@gluon.jit
def allocate_pipeline(stages: gl.constexpr, producers: gl.constexpr, consumers: gl.constexpr):
    """A pipeline of empty stages: `producers` arrivals commit a stage, and `consumers` arrivals release it."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    # Triton puts no barrier of all threads between mbarriers of different arrays.
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=producers)
        mbarrier.init(empty.index(s), count=consumers)
    return Pipeline(full, empty)
