"""The paths of `flashinfer.jit.env`, into which FlashInfer builds kernels. Quire neither creates nor reads them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "CUTLASS_INCLUDE_DIRS",
    "FLASHINFER_AOT_DIR",
    "FLASHINFER_BASE_DIR",
    "FLASHINFER_CACHE_DIR",
    "FLASHINFER_CSRC_DIR",
    "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_DATA",
    "FLASHINFER_GEN_SRC_DIR",
    "FLASHINFER_INCLUDE_DIR",
    "FLASHINFER_JIT_DIR",
    "FLASHINFER_WORKSPACE_DIR",
    "SPDLOG_INCLUDE_DIR",
    "has_flashinfer_cubin",
    "has_flashinfer_jit_cache",
]

FLASHINFER_BASE_DIR = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
FLASHINFER_CACHE_DIR = FLASHINFER_BASE_DIR / ".cache" / "flashinfer"
FLASHINFER_CUBIN_DIR = Path(os.environ.get("FLASHINFER_CUBIN_DIR") or FLASHINFER_CACHE_DIR / "cubins")
FLASHINFER_WORKSPACE_DIR = FLASHINFER_CACHE_DIR / "quire"
FLASHINFER_JIT_DIR = FLASHINFER_WORKSPACE_DIR / "cached_ops"
FLASHINFER_GEN_SRC_DIR = FLASHINFER_WORKSPACE_DIR / "generated"
FLASHINFER_DATA = FLASHINFER_WORKSPACE_DIR / "data"
FLASHINFER_AOT_DIR = FLASHINFER_DATA / "aot"
FLASHINFER_INCLUDE_DIR = FLASHINFER_DATA / "include"
FLASHINFER_CSRC_DIR = FLASHINFER_DATA / "csrc"
CUTLASS_INCLUDE_DIRS = [FLASHINFER_DATA / "cutlass" / "include"]
SPDLOG_INCLUDE_DIR = FLASHINFER_DATA / "spdlog" / "include"


def has_flashinfer_cubin() -> bool:
    """True: no operation needs a build before it is called."""
    return True


has_flashinfer_jit_cache = has_flashinfer_cubin
