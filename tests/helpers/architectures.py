"""The GPUs for which tests compile Triton's kernels."""

from __future__ import annotations

import pytest

# AMD's code takes longest to compile.
_SLOW = ["sm_89", "sm_100", "sm_120", "gfx942"]
# All, but most of them only by `make test-all`, since a kernel takes seconds to compile.
every_architecture = pytest.mark.parametrize(
    "target", ["sm_80", "sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)]
)
