"""Rules of style that linters do not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.paths import ROOT

SOURCE = ROOT / "src" / "quire"
FILES = sorted(SOURCE.rglob("*.py"))
# Arguments that may stand by position in one call. A reader cannot count more.
MAX_POSITIONAL = 8


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """The calls in a file, each with the name of what is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func).split(".")[-1]


def is_record(name: str) -> bool:
    return re.match(r"_?[A-Z][a-z]", name) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_call_of_a_record_names_its_arguments(path):
    """Kernels build their aggregates by position, as Triton has no keywords for them."""
    if "kernels" in path.parts:
        return
    for node, name in calls(path):
        if is_record(name) or name == "__init__":
            assert len(node.args) <= MAX_POSITIONAL, f"line {node.lineno}: {name}"
