"""The GPUs for which tests compile Triton's kernels."""

from __future__ import annotations

import pytest

_MAIN = ["sm_80", "sm_90", "gfx942"]
_SLOW = ["sm_89", "sm_100", "sm_120"]
every_architecture = pytest.mark.parametrize("target", [*_MAIN, *_SLOW])
# For kernels that take seconds to compile: all, but some of them only by `make test-all`.
main_architectures = pytest.mark.parametrize(
    "target", [*_MAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)]
)
