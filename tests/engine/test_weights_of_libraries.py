"""Quantized checkpoints that the libraries of their formats write, beside those of `helpers.quantized`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from helpers.checkpoints import save
from helpers.paths import TESTS
from helpers.quantize_by_library import FORMATS, MODEL_OPT, is_installed
from quire.bench.batches import relative_error
from quire.engine import LLM, SamplingParams
from quire.engine.load import load_model

# One block of 128 x 128 is the whole weight of v_proj, and two that of down_proj.
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*dequantized:RuntimeWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_load_model_reads_what_the_library_of_a_format_writes(name, tmp_path):
    """ModelOpt's weights are compared with those that it quantized, others with those that the library reads."""
    if not is_installed(name):
        pytest.skip("the library of the format is not installed")
    source, env = save("llama", tmp_path / "source", **SHAPE), os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "helpers.quantize_by_library", str(source), str(tmp_path), name]
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, dense = tmp_path / "quantized", load_file(tmp_path / "dense.safetensors")
    found = load_model(folder, torch.device("cpu")).network.state_dict()
    assert dense.keys() <= found.keys()
    for key, weight in dense.items():
        if name in MODEL_OPT:
            assert relative_error(found[key], weight) < 0.04, key
        else:
            assert torch.allclose(found[key], weight, rtol=1e-6, atol=0), key
    with LLM(folder, num_pages=32, device="cpu") as llm:
        (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(done.token_ids) == 3
