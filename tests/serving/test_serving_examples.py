"""The drivers of examples/serving complete prompts as the engine does: in chunks, over cached prefixes, after
preemptions and, on a GPU, by captured graphs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import product

import pytest

pytest.importorskip("transformers")

from helpers.paths import ROOT
from quire.serving import vllm

FOLDER = ROOT / "examples" / "serving"
LAYOUTS = {"lorax": ["NHD"], "pymllm": ["NHD"], "sglang": ["NHD"], "vllm": ["NHD", "HND"]}  # by driver


def load(name):
    """A driver's module, by its path; the folder does not stay where imports look, since one is called vllm."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def cases():
    """Each driver with both page sizes on the CPU, and with everything on a GPU."""
    for name, layouts in LAYOUTS.items():
        yield "cpu", name, layouts[0], 1, 20, "float32"
        yield "cpu", name, layouts[-1], 16, -1, "bfloat16"
        for rest in product(layouts, (1, 16), (-1, 20), ("float32", "bfloat16")):
            yield pytest.param("cuda", name, *rest, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "name", "layout", "page_size", "window", "dtype"), list(cases()))
def test_same_tokens_as_the_engine(device, name, layout, page_size, window, dtype, monkeypatch, capsys):
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", layout)  # the driver sets it, and here it is undone
    options = {"--layout": layout, "--page-size": page_size, "--window": window, "--dtype": dtype, "--device": device}
    code = load(name).main([f"{key}={value}" for key, value in options.items()])
    report = capsys.readouterr().out
    assert code == 0, report
    reused, preemptions = (int(x) for x in re.search(r"(\d+) tokens of prompts reused, (\d+) pre", report).groups())
    assert reused > 0
    assert preemptions > 0
