"""The releases of torch and Triton with which Quire was tested, and a warning about others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# From the first release to the last, both tested: torch 2.11 with Triton 3.6 on GPUs, and torch 2.13 with Triton 3.6
# and with its own Triton 3.7 on CPUs, where all kernels are compiled and those of the Triton family are interpreted.
TESTED = {"torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 7))}


def untested(installed: Mapping[str, str]) -> list[str]:
    """A phrase for each package whose version is outside of the tested releases. installed: versions by name."""
    found = []
    for name, text in installed.items():
        first, last = TESTED[name]
        release = tuple(int(x) for x in re.findall(r"\d+", text)[:2])
        if not first <= release <= last:
            low, high = (".".join(map(str, x)) for x in (first, last))
            found.append(f"{name} {text} (tested: {low if low == high else f'{low} to {high}'})")
    return found


def installed_versions() -> dict[str, str]:
    """The versions of those packages of `TESTED` that are installed."""
    found = {}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def warn_of_untested() -> None:
    """Warn once, in one message, of packages that were not tested."""
    if found := untested(installed_versions()):
        warnings.warn(f"Quire was not tested with {', '.join(found)}", stacklevel=2)
