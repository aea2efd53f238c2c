"""The seed of a run: a commit's run repeats, and the environment chooses other seeds."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.paths import ROOT
from helpers.seeds import SEED, choose
from quire import __version__


def commit(root, message):
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    command = ["git", *author, "commit", "--quiet", "--allow-empty", "--no-gpg-sign", "-m", message]
    subprocess.run(command, cwd=root, check=True)


def test_choose_in_a_repository_returns_the_seed_of_its_commit(tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    assert choose(None, tmp_path)[1] == f"version {__version__}", "there is no commit yet"
    found = []
    for message in ("one", "two"):
        commit(tmp_path, message)
        found.append(choose(None, tmp_path))
        assert choose("", tmp_path) == found[-1]
    assert len({seed for seed, _ in found}) == 2
    assert all(0 <= seed < 1 << 31 and origin.startswith("commit ") for seed, origin in found)


def test_choose_without_a_repository_or_git_returns_the_seed_of_the_version(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    commit(tmp_path, "of a repository that has the unpacked package in a folder")
    (tmp_path / "package").mkdir()
    seed, origin = choose(None, tmp_path / "package")
    assert (origin, 0 <= seed < 1 << 31) == (f"version {__version__}", True)
    monkeypatch.setenv("PATH", "")
    assert choose(None, tmp_path) == (seed, origin)


def test_choose_with_a_seed_in_the_environment_returns_that(tmp_path):
    assert choose("12", tmp_path) == (12, "given")
    assert len({choose("random", tmp_path) for _ in range(3)}) > 1
    for wrong in ("-1", "1.5", "seed"):
        with pytest.raises(ValueError, match=f"QUIRE_TEST_SEED = {wrong}: it must be a number"):
            choose(wrong, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "77"])
def test_header_of_a_run_has_its_seed(given):
    variables = {name: value for name, value in os.environ.items() if name != "QUIRE_TEST_SEED"}
    variables |= {} if given is None else {"QUIRE_TEST_SEED": given}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/test_seed.py"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    seed, origin = choose(given, ROOT)
    assert f"quire: random inputs from QUIRE_TEST_SEED={seed} ({origin})" in done.stdout


def test_rng_of_a_test_starts_the_global_generators_from_the_seed(rng, request):
    again = random.Random(f"{SEED} {request.node.nodeid}")
    ours = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(again.randrange(1 << 31))
    assert torch.rand(()) == ours[0]
    assert np.random.RandomState(again.randrange(1 << 31)).rand() == ours[1]
    assert random.Random(again.randrange(1 << 31)).random() == ours[2]
    assert rng.random() == again.random()
