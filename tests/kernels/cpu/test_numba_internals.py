"""What `kernels/cpu/numba_internals.py` knows of Numba, tried with the installed version."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numba

from quire.kernels.cpu import numba_internals
from quire.kernels.cpu.numba_internals import KNOWN_VERSIONS, on_compile, set_source_stamp

CODE = "import numba\n\n\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n"


def test_known_version_is_installed():
    """On another version, compare numba_internals.py with the code of Numba, and then change KNOWN_VERSIONS."""
    assert numba.__version__.startswith(tuple(f"{version}." for version in KNOWN_VERSIONS))


def test_function_on_disk_is_compiled_again_if_its_stamp_has_changed(tmp_path):
    file = tmp_path / "function_of_a_test.py"
    compiled = []

    def call(stamp: str) -> bool:
        """Load the module, and call the function; whether it was compiled."""
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        set_source_stamp(module.double, stamp)
        compiled.clear()
        with on_compile(module.double, lambda: compiled.append(True)):
            assert module.double(4) == 8
        assert bool(compiled) != bool(module.double.stats.cache_hits)
        return bool(compiled)

    file.write_text(CODE)
    assert call("first")
    # The time and the size of the file have no effect.
    file.write_text(f"{CODE}\n# A comment.\n")
    assert not call("first")
    assert call("second")


def test_on_compile_of_another_function_is_not_called():
    one, other = (numba.njit(lambda x: x + 1) for _ in range(2))
    compiled = []
    with on_compile(one, lambda: compiled.append(True)):
        other(1)
        assert not compiled
        one(1)
    assert compiled


def test_internals_of_numba_are_read_by_no_other_file():
    pattern = re.compile(r"numba\.(core|np|misc)\b|\._cache\b|numba\._[a-z]")
    root = Path(numba_internals.__file__).parents[2]
    texts = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    found = {path for path, text in texts.items() if "numba" in text and pattern.search(text)}
    assert found == {"kernels/cpu/numba_internals.py"}
