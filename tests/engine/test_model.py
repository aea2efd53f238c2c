"""The model that ships: small, better than a compressor, and readable."""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from helpers.paths import ROOT
from quire.engine import LLM, SamplingParams, shipped_model

TRAINER = ROOT / "tools" / "train_tiny.py"


@pytest.fixture(scope="module")
def trainer():
    spec = importlib.util.spec_from_file_location("train_tiny", TRAINER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def corpus(trainer):
    """Training and held-out files of this machine's standard library."""
    return trainer.read_corpus(Path(sysconfig.get_paths()["stdlib"]))


def test_bundled_model_folder_is_small():
    assert sum(f.stat().st_size for f in shipped_model().iterdir()) < 12e6


def test_bundled_model_report_beats_xz():
    report = json.loads((shipped_model() / "training.json").read_text())
    assert report["held_out_bits_per_byte"] < 0.75 * report["xz_9_bits_per_byte"]


@pytest.mark.slow
def test_bundled_model_on_held_out_text_needs_fewer_bits_than_xz(trainer, corpus):
    """Held out by the same rule, whatever Python's version here; a few files, to be quick."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = sorted(corpus[1], key=len)[len(corpus[1]) // 2 :][:8]
    data = "".join(texts).encode()
    tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    ids = trainer.encode(tokenizer.backend_tokenizer, texts)
    network = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32)
    bits = trainer.bits_per_byte(network, ids, len(data), "cpu")
    xz = 8 * len(lzma.compress(data, preset=9)) / len(data)
    assert 0.3 < bits < 0.75 * xz


def test_bundled_tokenizer_of_any_text_gives_it_back():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    for text in ("def f(x):\n\treturn x\n\n\n", "  two  spaces ", "naïve 漢字 🙂", "0123 0x7f 1e-9", "\r\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_bundled_model_completions_have_words_of_python(corpus, rng):
    """Nearly all words of its completions are words of the standard library: text, not noise.

    Of 100 times 24 completions, the worst had 0.926, and of 200,000 draws of 24 out of them none had less than 0.9; of
    20,000 times 2,400 tokens that were drawn one by one from the library's text, none had more than 0.74. A name that
    the model makes up it likes to repeat: six completions are too few.
    """
    known = set(re.findall(r"[A-Za-z]+", "\n".join(corpus[0])))
    prompts = ["import ", "def read(", "class Test", "    return self.", "for line in ", "# The "] * 4
    params = [
        SamplingParams(temperature=0.7, max_tokens=100, ignore_eos=True, seed=rng.randrange(1 << 31)) for _ in prompts
    ]
    with LLM() as llm:
        done = llm.generate(prompts, params)
    words = [w for c in done for w in re.findall(r"[A-Za-z]+", c.text)]
    assert len(words) > 400
    assert sum(w in known for w in words) > 0.9 * len(words)
    assert any("\n" in c.text for c in done)
