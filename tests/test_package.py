"""The house rules: what an import costs and needs, which room may use which, and that documents name what exists."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from helpers.paths import ROOT, TESTS

SOURCE = ROOT / "src" / "quire"
FILES = sorted(path for path in SOURCE.rglob("*.py"))
ROOMS = {  # what each may import, besides itself; files of the package that are no room of their own are the face
    "definition": set(),
    "kernels": {"definition"},
    "wrappers": {"definition", "kernels"},
    "face": {"definition", "kernels", "wrappers"},
    "cache": {"definition", "kernels", "face"},
    "core": {"definition", "kernels", "wrappers", "face", "cache"},
    "steps": {"definition", "kernels", "face"},
    "backends": {"definition", "face", "cache", "steps"},
    "engine": {"definition", "face", "cache", "steps"},
    "bench": {"definition", "kernels", "face", "engine"},
    "server": {"face", "engine"},
    "integrations": {"definition", "kernels", "face", "steps", "engine", "server"},
    "cli": {"definition", "kernels", "face", "engine", "bench", "server"},
}


def python(code: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


def module_of(path: Path) -> str:
    return ".".join(("quire", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[tuple[str, str]]:
    """The modules of ours that a file imports, anywhere in it and for type checkers too, and a name of each or ""."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add((whole, "") if whole in MODULES else (node.module, alias.name))
    return {(module, name) for module, name in found if module in MODULES}


def room(module: str) -> str:
    return next((part for part in module.split(".")[1:2] if part in ROOMS), "face")


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"quire", "quire.__main__"}))
def test_modules_import_lower_rooms_alone(module):
    """Rooms import what ROOMS says, and no private module or name of another room."""
    own = room(module)
    for other, name in imports(MODULES[module]):
        assert room(other) in {own} | ROOMS[own], f"{own} must not import {room(other)}: {module} imports {other}"
        private = [x for x in (*other.split("."), name) if x.startswith("_") and not x.startswith("__")]
        assert not private or room(other) == own, f"{module} imports {private[0]} of {other}"


def test_modules_import_each_other_without_circles():
    left = {module: {other for other, _ in imports(path)} for module, path in MODULES.items()}
    while done := [module for module, others in left.items() if not others & left.keys()]:
        for module in done:
            del left[module]
    assert not left, f"of a circle, or above one: {sorted(left)}"


@pytest.mark.parametrize("path", [*FILES, *sorted(TESTS.rglob("*.py"))], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_have_at_most_450_lines(path):
    assert len(path.read_text().splitlines()) <= 450, "a file longer than 450 lines has to be split"


def test_test_modules_import_no_other_test_module():
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[-1].startswith("test_") for name in names), path


def test_import_of_quire_loads_no_other_module():
    """Neither torch nor a room of ours is imported before a public name is used, which makes an import quick."""
    code = "import sys; before = set(sys.modules); import quire; print(*(set(sys.modules) - before))"
    loaded = {name for name in python(code).stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"quire"}


def test_face_without_triton_and_transformers_computes():
    code = """
import sys
for name in ("triton", "transformers", "safetensors", "tokenizers", "tqdm"):
    sys.modules[name] = None
import quire, torch
for name in quire.__all__:
    getattr(quire, name)
q, k = torch.randn(4, 64), torch.randn(9, 2, 64)
print(tuple(quire.single_decode_with_kv_cache(q, k, k).shape))
"""
    done = python(code)
    assert done.stdout.strip() == "(4, 64)", done.stderr


def test_engine_without_transformers_names_the_extra():
    code = "import sys; sys.modules['transformers'] = None\nfrom quire.engine import LLM\nLLM()"
    assert "quire-attention[engine]" in python(code).stderr.splitlines()[-1]


def test_public_names_exist_with_docstrings():
    assert len(quire.__all__) > 15
    for name in quire.__all__:
        assert getattr(quire, name).__doc__, name
    with pytest.raises(AttributeError, match="nothing_like_that"):
        quire.nothing_like_that  # noqa: B018


def test_documents_show_the_measured_tables():
    done = subprocess.run([sys.executable, "tools/benchmark_tables.py", "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, "run tools/benchmark_tables.py"


def test_documents_report_the_training_of_the_bundled_model():
    report = json.loads((SOURCE / "models" / "tiny-python" / "training.json").read_text())
    page = " ".join((ROOT / "docs" / "engine.md").read_text().split())
    ours, xz = report["held_out_bits_per_byte"], report["xz_9_bits_per_byte"]
    assert f"needs {ours:.3f} bits per byte, where `xz -9` needs {xz:.3f}" in page


def test_results_have_device_and_date():
    files = list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert {"device", "date", "quire", "torch"} <= set(result), file
        assert {"seed", "ceilings", "cells"} <= set(result) or "runs" in result, file


def test_paths_that_documents_name_exist():
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = file.read_text()
        for word in text.replace("(", " ").replace(")", " ").replace("`", " ").split():
            if word.startswith(("src/", "tests/", "tools/", "docs/", "examples/", "benchmarks/")):
                assert any(ROOT.glob(word.rstrip(".,:;/"))), f"{file.name} names {word}"


def test_modules_that_documents_name_exist():
    known = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py")]
    # The name of a module that users write.
    known.append("sitecustomize.py")
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for name in re.findall(r"`([\w/]+\.py)`", file.read_text()):
            assert any(f"/{path}".endswith(f"/{name}") for path in known), f"{file.name} names {name}"
