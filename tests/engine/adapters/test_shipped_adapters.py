"""The adapters of the bundled model that ship with Quire, the example that serves them, and the tool that made them."""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.adapters import CONFIG, WEIGHTS, merged
from helpers.paths import ROOT
from quire.engine import LLM, SamplingParams, shipped_model
from quire.engine.adapters.peft import read_adapter
from quire.engine.adapters.targets import adapter_targets

sys.path.append(str(ROOT / "tools"))
import train_adapters

EXAMPLES = ROOT / "examples"
NAMES = ["typed", "tests"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32)


@pytest.mark.slow
def test_example_prints_three_completions_of_each_prompt_in_their_styles():
    command = [sys.executable, str(EXAMPLES / "adapters.py"), "class Cache", "def parse_date("]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^--- (.*)\n(class Cache|def parse_date\()([\s\S]*?)\n\n(?=---|\Z)", done.stdout, re.MULTILINE)
    assert [(name, prompt) for name, prompt, _ in found] == [
        (name, prompt)
        for prompt in ("class Cache", "def parse_date(")
        for name in ("the model alone", "typed", "tests")
    ]
    texts = [text for *_, text in found]
    assert len(set(texts)) == 6
    assert ["TestCase" in text or "self.assert" in text for text in texts] == [False, False, True] * 2
    # Types of a function, and the docstrings of both.
    assert ["->" in text for text in texts[3:]] == [False, True, False]
    assert all('"""' in text for text in (texts[1], texts[4]))


def test_llm_with_the_shipped_adapters_has_the_tokens_of_merged_weights(model):
    prompts = ["class Cache", "def parse_date(", "import os\n"]
    with LLM(adapters={name: EXAMPLES / "adapters" / name for name in NAMES}, max_adapters=2) as llm:
        tokens = [llm.model.tokenizer.encode(prompt) for prompt in prompts]
        requests = [(prompt, name) for prompt in tokens for name in (None, *NAMES)]
        done = llm.generate([prompt for prompt, _ in requests], GREEDY, adapter=[name for _, name in requests])
    found = {(tuple(prompt), name): each.token_ids for (prompt, name), each in zip(requests, done, strict=True)}
    options = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for name in (None, *NAMES):
        base = copy.deepcopy(model)
        network = base if name is None else merged(base, EXAMPLES / "adapters" / name)
        for prompt in tokens:
            own = network.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
            assert found[tuple(prompt), name] == own


@pytest.mark.parametrize("name", NAMES)
def test_shipped_adapter_is_small_and_as_its_report_says(name, model):
    folder = EXAMPLES / "adapters" / name
    tensors = load_file(folder / WEIGHTS)
    assert (folder / WEIGHTS).stat().st_size < 300_000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    adapter = read_adapter(folder, adapter_targets(model))
    assert adapter.base_model_name == shipped_model().name
    report = json.loads((folder / "training.json").read_text())
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert report["held_out_bits_per_byte"] < report["held_out_bits_per_byte_without_adapter"]
    settings = json.loads((folder / CONFIG).read_text())
    assert adapter.rank == settings["r"]

    table = (ROOT / "docs" / "adapters.md").read_text()
    column = NAMES.index(name)
    rows = dict(re.findall(r"^\| ([^|]+) \| ((?:[^|\n]+\| )*[^|\n]+) \|$", table, re.MULTILINE))
    cells = {head: cell.split(" | ")[column] for head, cell in rows.items() if cell.count(" | ") == 1}
    assert cells["parameters"] == f"{report['parameters']:,}"
    pair = (report["held_out_bits_per_byte_without_adapter"], report["held_out_bits_per_byte"])
    assert cells["bits per byte of held-out text, without and with it"] == "{:.2f}, {:.2f}".format(*pair)
    assert all(
        source.split()[0] in cells["of"].replace("Python's standard library", "Python") for source in report["sources"]
    )
    assert all(license in cells["of"] for license in report["sources"].values())


SOURCE = '''
def bare(x):
    """Has no types."""

def typed(x: int, *, y: str = "") -> int:
    """Has all."""

def silent(x: int) -> int:
    return x

class Typed:
    """Has all."""

    def __init__(self, x: int) -> None:
        self.x = x

class Partly:
    """Has a function without types."""

    def __init__(self, x):
        self.x = x

class Cases(unittest.TestCase):
    def test_it(self):
        pass

class Fixture(unittest.TestCase):
    def setUp(self):
        pass
'''


def test_definitions_that_an_adapter_learns_are_those_of_its_style():
    nodes = ast.parse(SOURCE).body
    assert [node.name for node in nodes if train_adapters.is_typed(node)] == ["typed", "Typed"]
    assert [node.name for node in nodes if train_adapters.is_test(node)] == ["Cases"]
    method = ast.parse(SOURCE).body[3].body[1]
    assert train_adapters.source_of(SOURCE, method) == "def __init__(self, x: int) -> None:\n    self.x = x\n"


def test_split_holds_out_whole_files():
    texts = [(f"file{i % 40}.py", f"{i % 40} " * 50) for i in range(400)]
    train, held_out = train_adapters.split(iter(texts))
    assert len(train) + len(held_out) == 400
    assert held_out
    assert not set(train) & set(held_out)


def test_make_twice_writes_the_same_adapter_that_predicts_better(model, tmp_path):
    """A text that the model does not know, so that a few steps suffice."""
    text = "def one_two(three: four) -> five:\n    return six\n" * 3
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["up_proj", "q_proj"]}
    task = train_adapters.Task(texts=([text] * 20, [text]), sources={"this": "Apache-2.0"}, settings=settings)
    for folder in (tmp_path / "one", tmp_path / "two"):
        args = argparse.Namespace(out=folder, steps=6, batch=2, context=24, rate=1e-2, seed=1)
        train_adapters.make("small", task, args)
    for name in (WEIGHTS, CONFIG, "training.json"):
        assert (tmp_path / "one/small" / name).read_bytes() == (tmp_path / "two/small" / name).read_bytes()
    adapter = read_adapter(tmp_path / "one/small", adapter_targets(model))
    assert len(adapter.factors) == 12
    report = json.loads((tmp_path / "one/small/training.json").read_text())
    assert report["held_out_bits_per_byte"] < 0.9 * report["held_out_bits_per_byte_without_adapter"]
