"""Compiled decoder layers: the tokens of eager ones, few compilations, and eager code where there is no other way."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from transformers.models.llama import modeling_llama

from helpers.checkpoints import save
from quire.engine import LLM, SamplingParams, load
from quire.engine.compiled_layers import CompiledLayers
from quire.engine.model import Model


@pytest.fixture
def traced(monkeypatch):
    """Compile without Inductor, which takes long."""
    monkeypatch.setattr(load, "CompiledLayers", partial(CompiledLayers, backend="aot_eager"))


def complete(folder, rng_prompts, **options):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, page_size=4, num_pages=200, **options) as llm:
        done = llm.generate(rng_prompts, params)
        return llm.model.compiled, [c.token_ids for c in done]


def prompts(rng):
    return [[rng.randrange(1, 97) for _ in range(n)] for n in (3, 17, 1, 30)]


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "gpt-oss"))]
)
def test_compiled_layers_give_the_tokens_of_eager_ones_and_share_code(traced, tmp_path, rng, name):
    torch.manual_seed(rng.randrange(1 << 31))
    save(name, tmp_path)
    asked = prompts(rng)
    expected = complete(tmp_path, asked, compile=False)
    counters.clear()
    for _ in range(2):  # models of one class do not use up each other's recompilations
        assert complete(tmp_path, asked, compile=True) == (True, expected[1])
    assert expected[0] is False
    # Of each model one for a single token, and one for more: of layers, which differ in index and window and share
    # them, and of the last norm.
    assert counters["stats"]["unique_graphs"] == 2 * 2 * 2
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_compiled_layers_compute_the_norm_of_the_next_layer(traced, tmp_path, monkeypatch, name):
    """Only the first norm of a step is computed by itself. OLMo 2 has none at the start of its layers."""
    calls, run = [], CompiledLayers._run_norm

    def counted(compiled, norm, x):
        calls.append(compiled._normed is None or x is not compiled._output)
        return run(compiled, norm, x)

    monkeypatch.setattr(CompiledLayers, "_run_norm", counted)
    save(name, tmp_path)
    with LLM(tmp_path, page_size=4, num_pages=64, compile=True) as llm:
        compiled, layers = llm.model.compiled_layers, len(llm.model.compiled_layers.layers)
        calls.clear()
        llm.generate([5, 6, 7], SamplingParams(max_tokens=1))
        assert compiled._normed is compiled._output is None
    assert calls == ([True] if name == "olmo2" else [True] + [False] * layers)


def test_llm_on_a_cpu_without_compile_runs_eagerly(tmp_path):
    save("llama", tmp_path)
    with pytest.raises(ValueError, match="compile = 'yes': it must be True, False or 'auto'"):
        LLM(tmp_path, compile="yes")
    with LLM(tmp_path, num_pages=64) as llm:
        assert not llm.model.compiled


def test_compiled_layers_that_cannot_be_compiled_run_eagerly_and_warn_once(traced, tmp_path, rng, monkeypatch):
    forward = modeling_llama.LlamaMLP.forward

    def broken(self, x):
        torch._dynamo.graph_break()
        return forward(self, x)

    save("llama", tmp_path)
    asked = prompts(rng)
    _, expected = complete(tmp_path, asked, compile=False)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", broken)
    with pytest.warns(
        RuntimeWarning, match="LlamaDecoderLayer, LlamaRMSNorm can't be compiled and run eagerly"
    ) as warned:
        assert complete(tmp_path, asked, compile=True) == (False, expected)
    assert len([w for w in warned if "can't be compiled" in str(w.message)]) == 1


def test_compiled_layers_after_an_error_of_a_step_stay_compiled(traced, tmp_path, monkeypatch):
    save("llama", tmp_path)
    with LLM(tmp_path, num_pages=64, compile=True) as llm:
        monkeypatch.setattr(llm._engine.runner, "attend", lambda *args: 1 / 0)
        (done,) = llm.generate([1, 2, 3])
        assert done.error == "ZeroDivisionError: division by zero"
        assert llm.model.compiled


def test_llm_with_dummy_weights_needs_only_a_configuration(tmp_path):
    for file in save("llama", tmp_path).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="the weights are missing"):
        LLM(tmp_path)
    with pytest.raises(ValueError, match="load_format = 'none'"):
        LLM(tmp_path, load_format="none")
    with LLM(tmp_path, num_pages=64, load_format="dummy") as llm:
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_llm_with_other_logits_than_transformers_is_accepted_for_16_bit_random_weights_alone(tmp_path, monkeypatch):
    save("llama", tmp_path)
    expected = Model.transformers_logits
    monkeypatch.setattr(Model, "transformers_logits", lambda model, tokens: expected(model, tokens).flip(-1))
    with pytest.warns(RuntimeWarning, match="random weights, which may amplify rounding: its logits are not those"):
        LLM(tmp_path, num_pages=64, load_format="dummy", dtype="bfloat16").close()
    for options in ({"load_format": "dummy", "dtype": "float32"}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="can't be run: its logits are not those of Transformers"):
            LLM(tmp_path, num_pages=64, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "gpt-oss"])
def test_compiled_layers_on_a_gpu_give_the_tokens_of_eager_ones(tmp_path, rng, name):
    torch.manual_seed(rng.randrange(1 << 31))
    save(name, tmp_path)
    asked = prompts(rng)
    options = {"device": "cuda", "dtype": "float32", "backend": "triton"}
    _, expected = complete(tmp_path, asked, compile=False, **options)
    compiled, tokens = complete(tmp_path, asked, **options)
    assert compiled
    assert sum(a == b for a, b in zip(tokens, expected, strict=True)) >= len(tokens) - 1  # ties of rounding
