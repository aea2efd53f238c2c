"""quire env: versions, devices, and which kernel families are available."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from quire import __version__
from quire.definition.spec import attention_spec
from quire.kernels import registry

_PACKAGES = ("torch", "numpy", "numba", "triton", "transformers", "tokenizers", "safetensors", "flashinfer-python")


def run(args: argparse.Namespace) -> int:
    found: dict[str, str | None] = {
        "quire": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    found |= {name: _version(name) for name in _PACKAGES}
    devices = {"cpu": f"{os.cpu_count()} processors, torch uses {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"
    families = {device: {name: _reason(name, device) for name in registry.FAMILIES} for device in devices}
    if args.json:
        print(json.dumps({"versions": found, "devices": devices, "families": families}, indent=2))
        return 0
    for name, value in found.items():
        print(f"{name:18} {value or 'not installed'}")
    for device, text in devices.items():
        print(f"\n{device:18} {text}")
        for name, reason in families[device].items():
            print(f"  {name:16} {reason or 'available'}")
    return 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _reason(family: str, device: str) -> str | None:
    """Why a family cannot decode a common layer on a device; None if it can."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    spec = attention_spec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, q_dtype=dtype)
    return registry.why_not(family, spec, torch.device(device), max_q_len=1)
