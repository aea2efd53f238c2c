"""The seed of a test run: that of the commit, so that a run repeats, unless QUIRE_TEST_SEED chooses another."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import zlib
from pathlib import Path

from helpers.paths import ROOT
from quire import __version__


def choose(given: str | None, root: Path) -> tuple[int, str]:
    """A seed below 2**31, and where it is from: the number that is given, a new one if "random" is given, and else the
    commit that is checked out in `root` or, without a repository or git, the version.

    Raises:
        ValueError: what is given is neither a number nor "random".
    """
    if given == "random":
        return random.SystemRandom().randrange(1 << 31), "random"
    if given:
        if not given.isdecimal():
            raise ValueError(f'QUIRE_TEST_SEED = {given}: it must be a number of at least 0, or "random"')
        return int(given), "given"
    commit = _commit(root)
    if commit:
        return int(commit[:8], 16) >> 1, f"commit {commit[:8]}"
    return zlib.crc32(__version__.encode()) >> 1, f"version {__version__}"


def _commit(root: Path) -> str:
    """The commit that is checked out in the repository `root`; "" if it is none, or a folder in another one."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


SEED, ORIGIN = choose(os.environ.get("QUIRE_TEST_SEED"), ROOT)
os.environ["QUIRE_TEST_SEED"] = str(SEED)  # of the workers of pytest-xdist, too
