"""The workflows of continuous integration name what pyproject.toml and constraints.txt name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.paths import ROOT

tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [ROOT / ".pre-commit-config.yaml", *sorted((ROOT / ".github").rglob("*.yml"))]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def matrix(job: str) -> dict[str, list[str]]:
    return read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"][job]["strategy"]["matrix"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_yaml_files_of_the_repository_are_mappings(path):
    assert isinstance(read(path), dict)


def test_ci_tests_each_python_that_the_package_names():
    versions = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert matrix("test")["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_ci_checks_each_extra():
    assert matrix("extras")["extra"] == ["none", *PROJECT["optional-dependencies"]]


def test_pre_commit_runs_the_ruff_of_the_constraints():
    (version,) = [repo["rev"] for repo in read(FILES[0])["repos"] if repo["repo"].endswith("/ruff-pre-commit")]
    assert f"ruff=={version.removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()
