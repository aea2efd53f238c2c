"""What Gluon names differently in the releases of Triton that have been tested."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

# A barrier of the threads of a program, or of a partition of its warps. Triton 3.7 calls it `barrier`.
thread_barrier: Any = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
