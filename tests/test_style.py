"""Rules of style that linters do not have."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.paths import ROOT

SOURCE = ROOT / "src" / "quire"
FILES = [*sorted(SOURCE.rglob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
# A comment behind code that begins with one of these words continues the code, and cannot be understood alone.
FRAGMENT = re.compile(r"#\s*(of|which|as|not|what|whose|otherwise|where|so|but|and)\b")
# Targets of one assignment that are not computed from each other.
MAX_TARGETS = 2
# Kernels assign the parts of a state together.
MAX_TARGETS_IN_KERNELS = 3
# Engines look up these names in modules, which each of them has.
PRESCRIBED_CLASSES = {"FlashInferAttnBackend"}
# Arguments that may stand by position in one call. A reader cannot count more.
MAX_POSITIONAL = 8


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """The calls in a file, each with the name of what is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func).split(".")[-1]


def is_record(name: str) -> bool:
    return re.match(r"_?[A-Z][a-z]", name) is not None


@EACH_FILE
def test_call_of_a_record_names_its_arguments(path):
    """Kernels build their aggregates by position, as Triton has no keywords for them."""
    if "kernels" in path.parts:
        return
    for node, name in calls(path):
        if is_record(name) or name == "__init__":
            assert len(node.args) <= MAX_POSITIONAL, f"line {node.lineno}: {name}"


@EACH_FILE
def test_comment_behind_code_is_no_fragment(path):
    lines = path.read_text().splitlines()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            row, column = token.start
            behind = token.type == tokenize.COMMENT and lines[row - 1][:column].strip()
            assert not (behind and FRAGMENT.match(token.string)), f"line {row}: {token.string}"


def class_names(path: Path) -> Iterator[str]:
    """The names of classes and of named tuples that a file defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("namedtuple("):
            yield ast.unparse(node.targets[0])


def test_class_name_stands_once():
    counts = Counter(name for path in SOURCE.rglob("*.py") for name in class_names(path))
    assert {name for name, count in counts.items() if count > 1} == PRESCRIBED_CLASSES


def independent_targets(node: ast.Assign) -> int:
    """The number of targets of an assignment of as many values, 0 where values are computed from targets."""
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)) or len(target.elts) != len(value.elts):
        return 0
    read = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)}
    return 0 if read & {ast.unparse(each) for each in target.elts} else len(target.elts)


@EACH_FILE
def test_assignment_has_few_targets(path):
    most = MAX_TARGETS_IN_KERNELS if "kernels" in path.parts else MAX_TARGETS
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            assert independent_targets(node) <= most, f"line {node.lineno}: {ast.unparse(node)}"
