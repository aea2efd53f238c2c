"""Models that cannot be run are refused with the reason when they are loaded; those that are accepted run."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Gemma3TextConfig, Llama4TextConfig, LlamaConfig, Phi3Config
from transformers.models.llama import modeling_llama

from helpers.checkpoints import SHAPE, save
from helpers.paths import ROOT
from quire.engine import LLM, SamplingParams
from quire.engine.hf_attention import attention

TOOL = ROOT / "tools" / "architectures.py"
ORIGINAL = 32  # the length up to which the position encodings of this file's models stay
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("architectures", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFUSED = {
    "bart": "requests of a step change each other, since it ignores position_ids",
    "diffllama": "layer 0 computes attention more than once",
    "phimoe": "sliding window of 8 tokens, which does not reach its attention function",
    "doge": "an attention mask of its own",
    "jamba": "layers of kinds that can't be run over pages: ['linear_attention']",
    "falcon": "does not use Transformers' attention interface",  # these raised KeyError and AttributeError
    "gptj": "does not use Transformers' attention interface",
    "mpt": "does not use Transformers' attention interface",
    "cpmant": "0 of 4 layers use Transformers' attention interface",
}


@pytest.mark.parametrize("name", REFUSED)
def test_llm_with_an_unsupported_architecture_says_why(tool, name, tmp_path):
    tool.save(name, tmp_path)
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])) as raised:
        LLM(tmp_path, num_pages=64)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("name", ["phi3", "whisper", "nemotron", "stablelm"])
def test_llm_with_a_supported_architecture_runs(tool, name, tmp_path):
    assert tool.attempt(name, tmp_path) == ("runs", "")


def test_attention_with_an_unknown_argument_names_it():
    module, x = torch.nn.Module(), torch.zeros(1, 2, 3, 8)
    for name in ("position_bias", "head_mask", "indices", "softcap_of_another_name"):
        with pytest.raises(ValueError, match=f"Module asks its attention function for {name}"):
            attention(module, x, x, x, None, dropout=0.0, position_ids=x, **{name: x})


def llama(folder, **changes):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | changes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llm_with_tokens_mixed_outside_attention_is_refused(tmp_path, monkeypatch, dtype):
    """A sum with the token before, standing for a convolution over tokens, is found when the model is loaded."""
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) + x.roll(1, 1))
    with pytest.raises(ValueError, match="not those of Transformers: requests of a step change each other"):
        LLM(llama(tmp_path, initializer_range=0.2), dtype=dtype, num_pages=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llm_with_attention_beyond_the_interface_is_refused(tmp_path, monkeypatch, dtype):
    eager = modeling_llama.eager_attention_forward

    def twice_as_sharp(*args, scaling, **kwargs):
        return eager(*args, scaling=2 * scaling, **kwargs)

    llama(tmp_path, initializer_range=0.2)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", twice_as_sharp)
    with pytest.raises(ValueError, match="its attention is not what it asks the attention function for"):
        LLM(tmp_path, dtype=dtype, num_pages=64)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 1), (1, 2), (1, 5), (4, 1), (4, 3), (64, 2)])
def test_llm_with_a_cache_of_any_size_passes_its_checks(tmp_path, page_size, num_pages):
    with LLM(llama(tmp_path, max_position_embeddings=6), page_size=page_size, num_pages=num_pages) as llm:
        assert llm.stats.steps == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llm_with_experts_in_any_dtype_passes_its_checks(tmp_path, dtype, rng):
    torch.manual_seed(rng.randrange(1 << 31))
    with LLM(save("gpt-oss", tmp_path), dtype=dtype, num_pages=64) as llm:
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


ROPES = {
    "longrope": lambda: Phi3Config(
        **SHAPE | {"hidden_size": 64, "pad_token_id": 0},
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=dict(LONGROPE),
    ),
    "longrope of one kind of layers": lambda: Gemma3TextConfig(
        **SHAPE,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=9,
        rope_parameters={"full_attention": dict(LONGROPE), "sliding_attention": DEFAULT},
    ),
    "dynamic": lambda: LlamaConfig(**SHAPE | {"max_position_embeddings": ORIGINAL}, rope_parameters=DYNAMIC),
}


@pytest.fixture(scope="module", params=ROPES)
def network(request, tmp_path_factory):
    """A model whose position encoding changes when a step has a request of more than ORIGINAL tokens."""
    torch.manual_seed(sum(request.param.encode()))
    network = AutoModelForCausalLM.from_config(ROPES[request.param](), dtype=torch.float32)
    for weight in network.parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2)
    network.folder = tmp_path_factory.mktemp("rope")
    network.save_pretrained(network.folder)
    return network


def test_llm_with_positions_that_depend_on_the_step_is_refused(network):
    if network.config.max_position_embeddings == ORIGINAL:
        pytest.skip("the context ends where they would begin to change")
    for most in (None, ORIGINAL + 1):
        with pytest.raises(
            ValueError, match=f"depends on the longest request of a step.*max_model_len={ORIGINAL} runs"
        ):
            LLM(network.folder, num_pages=64, max_model_len=most)


def low_frequencies():
    """longrope that changes low frequencies alone, by which few tokens hardly differ."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0] * 12 + [8.0] * 4}
    shape = SHAPE | {"head_dim": 32, "max_position_embeddings": 4 * ORIGINAL}
    return LlamaConfig(**shape, rope_parameters=LONGROPE | factors | {"rope_theta": 1e6})


def late_layer():
    """longrope in one of the last layers alone."""
    kinds = ["sliding_attention"] * 9 + ["full_attention"] + ["sliding_attention"]
    ropes = {"full_attention": dict(LONGROPE), "sliding_attention": DEFAULT}
    shape = SHAPE | {"num_hidden_layers": len(kinds)}
    return Gemma3TextConfig(**shape, layer_types=kinds, sliding_window=9, rope_parameters=ropes)


@pytest.mark.parametrize("make", [low_frequencies, late_layer])
def test_llm_with_rotary_embeddings_that_depend_on_the_step_is_refused(make, tmp_path):
    AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"depends on the longest request of a step.*max_model_len={ORIGINAL} runs"):
        LLM(tmp_path, num_pages=64)
    with LLM(tmp_path, num_pages=64, max_model_len=ORIGINAL) as llm:
        assert llm.max_len == ORIGINAL


def test_llm_of_llama_4_that_scales_queries_by_their_place_in_a_step_is_refused(tmp_path):
    config = Llama4TextConfig(
        **SHAPE, num_local_experts=2, layer_types=["full_attention"] * 4, no_rope_layers=[1, 0, 1, 0],
        attn_temperature_tuning=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="depends on the place of a token in a step"):
        LLM(tmp_path, num_pages=64)


@pytest.mark.parametrize("budget", [5, 2048])
def test_llm_with_max_model_len_before_positions_change_has_the_tokens_of_generate(network, budget, rng, tool):
    start = [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(12)]
    prompts = [start[:3], [*start, 5, 6], start[2:] * 2, start[::-1], [7]]
    with LLM(network.folder, page_size=4, num_pages=128, max_model_len=ORIGINAL, max_batched_tokens=budget) as llm:
        for _ in range(2):  # the second time over prefixes in the cache
            tool.check(network, llm, prompts, [tool.own_tokens(network, prompt) for prompt in prompts])
        (done,) = llm.generate(prompts[2], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(prompts[2]) + len(done.token_ids) == ORIGINAL


def test_llm_with_max_model_len_bounds_requests(tmp_path):
    with LLM(llama(tmp_path), num_pages=64, max_model_len=20) as llm:
        (done,) = llm.generate([1] * 15, SamplingParams(max_tokens=None, ignore_eos=True))
        assert (len(done.token_ids), done.finish_reason) == (5, "length")
        with pytest.raises(ValueError, match="prompt 0 has 20 tokens: the model's context of 20"):
            llm.generate([1] * 20)
    for bad, message in (
        (0, "max_model_len = 0: it must be a pos"),
        (257, "max_model_len = 257: the context of .* is 256"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, max_model_len=bad)
