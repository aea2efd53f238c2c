"""The wheel that users install: its files, its metadata, and an import from it without the repository."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from helpers.paths import ROOT
from quire import __version__
from quire.distribution import DISTRIBUTION

tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INFO = f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from the working tree, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, f"building needs hatchling, which quire-attention[dev] has:\n{done.stderr}"
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's files, like site-packages after an installation."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(installed) -> Message:
    return message_from_string((installed / INFO / "METADATA").read_text())


def run_from(installed: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that ignores PYTHONPATH and finds the wheel's files first."""
    code = f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=installed.parent)


def test_wheel_contents_are_the_package_and_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in (source / "quire").rglob("*") if path.is_file()}
    package = {name for name in files if "__pycache__" not in name}
    info = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert sorted(names) == sorted(package | info)
    assert "quire/py.typed" in package


def test_wheel_model_is_packed_once_and_below_its_bound(wheel):
    with zipfile.ZipFile(wheel) as archive:
        large = {entry.filename: entry.file_size for entry in archive.infolist() if entry.file_size > 1_000_000}
    assert list(large) == ["quire/models/tiny-python/model.safetensors"]
    assert wheel.stat().st_size < 12_000_000


def test_wheel_metadata_is_that_of_the_project(metadata):
    assert metadata["Name"] == DISTRIBUTION
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata["Author"] == PROJECT["authors"][0]["name"]
    assert metadata.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert dict(line.split(", ") for line in metadata.get_all("Project-URL")) == PROJECT["urls"]
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_wheel_requirements_outside_extras_are_the_dependencies(metadata):
    required = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert {line.split(">=")[0] for line in required} == {line.split(">=")[0] for line in PROJECT["dependencies"]}


def test_wheel_import_in_a_fresh_interpreter_computes(installed):
    done = run_from(
        installed,
        "import quire, torch\nprint(quire.__file__)\nprint(quire.packbits(torch.ones(9, dtype=torch.bool)).tolist())",
    )
    assert done.stdout.splitlines() == [str(installed / "quire" / "__init__.py"), "[255, 128]"], done.stderr


def test_wheel_entry_point_runs_the_command_line(installed):
    done = run_from(
        installed,
        "from importlib.metadata import distribution\n"
        f"points = {{x.group: x for x in distribution({DISTRIBUTION!r}).entry_points}}\n"
        "assert points.keys() == {'console_scripts', 'vllm.general_plugins', 'sglang.srt.plugins'}, points\n"
        "assert {x.name for x in points.values()} == {'quire'}, points\n"
        "assert callable(points['vllm.general_plugins'].load())\n"
        "assert callable(points['sglang.srt.plugins'].load())\n"
        "points['console_scripts'].load()(['--version'])",
    )
    assert __version__ in done.stdout, done.stderr


def test_check_extras_has_a_promise_for_each_extra():
    promises = runpy.run_path(str(ROOT / "tools" / "check_extras.py"))["PROMISES"]
    assert promises.keys() == {"none", *PROJECT["optional-dependencies"]}


def test_extras_in_texts_are_those_of_the_distribution():
    """`pip install 'quire[...]'` would install another project."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    wrong = [file for file in files if re.search(r"(?<![\w-])quire\[[a-z]", file.read_text())]
    assert not wrong
    named = {name for file in files for name in re.findall(rf"{DISTRIBUTION}\[(\w+)\]", file.read_text())}
    assert named <= PROJECT["optional-dependencies"].keys()
