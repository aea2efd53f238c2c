"""Parameters that a request leaves out come from generation_config.json, as in Transformers' `generate`."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GenerationConfig

from helpers.checkpoints import VOCAB, save
from quire.engine import LLM, SamplingParams, generation
from quire.engine.transformers_internals import generation_defaults


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(11)
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def network(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture
def write(folder):
    """Writes a generation_config.json, which is as it was afterwards."""
    file = folder / "generation_config.json"
    before = file.read_text()
    yield lambda **settings: file.write_text(json.dumps(settings))
    file.write_text(before)


def read(folder, network):
    network.generation_config = GenerationConfig.from_pretrained(folder)
    return generation.read_generation_config(folder, network)


@pytest.mark.parametrize(
    ("penalty", "sampling"), [(0.6, {}), (1.7, {"do_sample": False, "temperature": 0.3, "top_p": 0.9})]
)
def test_default_params_give_the_tokens_of_generate(folder, network, write, rng, penalty, sampling):
    write(eos_token_id=[0, 5], repetition_penalty=penalty, max_new_tokens=15, **sampling)
    network.generation_config = GenerationConfig.from_pretrained(folder)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    with LLM(folder, page_size=4) as llm:
        done = llm.generate(prompts)
        unpenalized = llm.generate(prompts, SamplingParams(repetition_penalty=1.0))
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        theirs = network.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0)[0, len(prompt) :].tolist()
        assert completion.token_ids == theirs
    assert [c.token_ids for c in unpenalized] != [c.token_ids for c in done]


def test_default_params_with_do_sample_give_the_distribution_of_generate(folder, network, write):
    """With do_sample, 4,000 first tokens are distributed as the logits that `generate` would sample from."""
    write(eos_token_id=0, do_sample=True, temperature=0.7, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.4)
    network.generation_config = GenerationConfig.from_pretrained(folder)
    prompt, count = [3, 9, 27, 81, 50], 4000
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    scores = network.generate(ids, attention_mask=torch.ones_like(ids), **options).scores[0][0]
    expected = torch.softmax(scores.double(), -1) * count
    with LLM(folder) as llm:
        done = llm.generate([prompt] * count, [SamplingParams(max_tokens=1, seed=i) for i in range(count)])
    seen = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=VOCAB)
    assert set(seen.nonzero()[:, 0].tolist()) <= set(expected.nonzero()[:, 0].tolist())
    common = expected >= 5
    assert common.sum() > 2
    chi2, freedom = ((seen - expected) ** 2 / expected)[common].sum(), int(common.sum())
    assert chi2 < freedom + 6 * (2 * freedom) ** 0.5 + 10


def test_default_params_of_any_file_are_those_of_transformers(folder, network, write, rng):
    values = {
        "do_sample": [None, False, True],
        "temperature": [None, 0.3, 1, 2.0],
        "top_k": [None, 0, 7],
        "top_p": [None, 0.5, 1.0],
        "min_p": [None, 0.1],
        "repetition_penalty": [None, 1.2],
        "max_new_tokens": [None, 9],
        "stop_strings": [None, "a", ["b", "c"]],
        "eos_token_id": [None, 3, [4, 5]],
    }
    for _ in range(40):
        said = {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.7}
        write(**said)
        ours, ends = read(folder, network)
        theirs = network._prepare_generation_config(None)[0]
        assert ends == said.get("eos_token_id")
        assert ours.repetition_penalty == theirs.repetition_penalty
        assert ours.max_tokens == (theirs.max_new_tokens or 128)
        stops = theirs.stop_strings or ()
        assert ours.stop == ((stops,) if isinstance(stops, str) else tuple(stops))
        if theirs.do_sample:
            assert (ours.temperature, ours.top_k, ours.top_p) == (theirs.temperature, theirs.top_k, theirs.top_p)
            assert ours.min_p == (theirs.min_p or 0)
        else:  # what a request that samples takes: what the file says, but not Transformers' own top_k of 50
            assert ours.temperature == 0
            assert ours.top_k == (said.get("top_k") or 0)
            assert ours.top_p == (said.get("top_p") or 1)


def test_request_params_replace_default_params_field_by_field(folder, write):
    write(do_sample=True, temperature=0.6, max_new_tokens=4, eos_token_id=0)
    with LLM(folder) as llm:
        usual = llm.default_params
        assert (usual.temperature, usual.top_k, usual.top_p, usual.max_tokens) == (0.6, 50, 1.0, 4)
        assert len(llm.generate([[1, 2]], SamplingParams(ignore_eos=True))[0].token_ids) == 4
        long = SamplingParams(ignore_eos=True, max_tokens=6, temperature=0)
        greedy = llm.generate([[1, 2]], long)[0].token_ids
        assert len(greedy) == 6
        assert llm.generate([[1, 2]], SamplingParams(ignore_eos=True, max_tokens=6, top_k=1))[0].token_ids == greedy
        assert llm._engine.request([1], SamplingParams(), lambda update: None).params == usual


def test_default_params_without_a_file_are_greedy(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    with LLM(copy) as llm:
        assert llm.default_params.temperature == 0
        assert llm.model.end_ids == {0}


OTHERS = {"no_repeat_ngram_size": 3, "suppress_tokens": [4], "num_beams": 4, "min_new_tokens": 1, "typical_p": 0.9}


def test_unsupported_settings_that_change_tokens_warn_once(folder, network, write):
    write(**OTHERS, do_sample=True, bad_words_ids=[[1, 2]], eos_token_id=0)
    with pytest.warns(UserWarning, match="settings that Quire does not have") as warned:
        read(folder, network)
    assert len(warned) == 1
    for name, value in {**OTHERS, "bad_words_ids": [[1, 2]]}.items():
        assert f"{name} = {value!r}" in str(warned[0].message)


def test_unsupported_settings_that_change_nothing_do_not_warn(folder, network, write):
    usual = generation_defaults()
    write(**usual)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(folder, network)
        write(
            use_cache=False, cache_implementation="dynamic", max_length=99, pad_token_id=3, chat_format="raw", seed=[1]
        )
        read(folder, network)


def test_renamed_settings_have_names_of_transformers():
    """What it renames would be neither taken nor reported."""
    assert set(generation._OURS) <= set(GenerationConfig().to_dict())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "could not be loaded"),
        ("[1]", "could not be loaded"),
        ('{"top_p": 7.0}', "top_p = 7.0: it must be above 0"),
        ('{"do_sample": true, "temperature": "hot"}', "temperature"),
    ],
)
def test_llm_with_a_broken_generation_config_names_the_folder(folder, write, text, message):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        LLM(folder)
    assert str(folder) in str(raised.value)
