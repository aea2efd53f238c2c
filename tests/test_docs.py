"""The site of the documents: its pages and links, and the parameters that docstrings name."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import quire
from helpers.paths import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.md"
# MkDocs has tags for Python objects in its settings, which the tests do not need.
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def nav_pages(entry: Any) -> Iterator[str]:
    """The pages of an entry of the navigation: a name, a mapping from a title to an entry, or a list of entries."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from nav_pages(part)


def public_callables() -> Iterator[tuple[str, Any]]:
    """Functions and classes of Quire's public names, with the public methods of the classes."""
    for name in quire.__all__:
        value = getattr(quire, name)
        if inspect.ismodule(value) or not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isfunction)
            yield from ((f"{name}.{method}", one) for method, one in methods if not method.startswith("_"))


def described_parameters(docstring: str) -> list[str]:
    """The names that the section Args of a docstring describes; one line may describe several."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", docstring, re.MULTILINE)
    lines = section[1].splitlines() if section else []
    heads = [line.partition(":")[0] for line in lines if re.match(r"    \S", line)]
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


def test_nav_has_each_page_once():
    pages = list(nav_pages(CONFIG["nav"]))
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_reference_has_each_public_module():
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    modules = {f"quire.{name}" for name in quire.__all__ if inspect.ismodule(getattr(quire, name))}
    assert modules - {"quire.backends"} <= shown


@pytest.mark.parametrize(("name", "value"), [pytest.param(*one, id=one[0]) for one in public_callables()])
def test_docstring_args_are_parameters_of_the_signature(name, value):
    known = {parameter.lstrip("*") for parameter in inspect.signature(value).parameters}
    unknown = [one for one in described_parameters(inspect.getdoc(value) or "") if one not in known]
    assert not unknown, f"{name} describes parameters that it does not have: {unknown}"


@pytest.mark.slow
def test_site_builds_in_strict_mode(tmp_path):
    """A link that does not resolve, an anchor that does not exist, or an error in a docstring fails here."""
    pytest.importorskip("mkdocs", reason="building the site needs quire-attention[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_is_read_in_five_minutes():
    assert len(README.read_text().splitlines()) <= 100


def test_readme_links_are_absolute_and_lead_to_pages_and_files():
    """The package index shows README without the repository, so that a relative address leads nowhere there."""
    site, files = CONFIG["site_url"], ("/quire-attention/quire/main/", "/quire-attention/quire/blob/main/")
    for address in re.findall(r"\]\(([^)]*)\)", README.read_text()):
        assert address.startswith("https://"), address
        if address.startswith(site):
            page = address.removeprefix(site).rstrip("/")
            assert (DOCS / f"{page}.md").is_file(), address
        for part in files:
            if part in address:
                assert (ROOT / address.partition(part)[2]).is_file(), address


def test_flashinfer_page_has_each_public_operation():
    """All names but those of the caches, which FlashInfer does not have."""
    page = (DOCS / "flashinfer.md").read_text()
    modules = {f"quire.{name}" for name in ("core", "cache")}
    missing = [
        name
        for name, value in public_callables()
        if "." not in name and value.__module__ not in modules and f"`{name}`" not in page
    ]
    assert not missing
