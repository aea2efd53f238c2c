"""Scales of an fp8 cache: read, measured, and applied where keys and values are stored and where they are read."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.checkpoints import CONFIGS, VOCAB, enlarge, save
from helpers.engines import captured_on_the_host
from quire.definition.oracle import attend
from quire.definition.spec import attention_spec
from quire.engine import LLM, EngineConfig, SamplingParams, load
from quire.engine.calibrate import calibrate
from quire.engine.load import load_model
from quire.engine.runner import Runner
from quire.engine.scales import read_scales, write_scales
from quire.engine.selfcheck import probe_chunk

KEYS, VALUES = 4096.0, 1024.0  # keys and values of large models are beyond the largest e4m3 number, 448
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
pytestmark = pytest.mark.filterwarnings("ignore:.*has no scales for an fp8 cache:RuntimeWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints, and the same with large keys and values."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: (save(name, root / name), enlarge(root / name, root / f"large-{name}", KEYS, VALUES)) for name in CONFIGS
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The scales that make large keys and values what they were."""
    path = tmp_path_factory.mktemp("scales") / "scales.safetensors"
    write_scales(path, [(KEYS, VALUES)] * 4)
    return path


def random_prompts(rng, count=5, longest=40):
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def outcome(done):
    return [(c.token_ids, c.logprobs) for c in done]


@pytest.fixture
def unchecked(monkeypatch):
    """Loads models whatever 8 bits make of their logits, which is much where weights are random."""
    monkeypatch.setattr(load, "check_runner", lambda runner, random_weights: None)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_cache_scales_of_powers_of_two_change_no_bit(name, batch_invariant, folders, file, rng, unchecked):
    """Windows, soft caps, sinks, norms of keys, query heads that share keys, chunks and prefixes from the cache."""
    prompts, found = random_prompts(rng), []
    prompts.append([*prompts[0], 5, 6, 7])
    options = {"max_batched_tokens": 16, "max_num_seqs": 3, "page_size": 4, "batch_invariant": batch_invariant}
    for folder, scales in zip(folders[name], (None, file), strict=True):
        with LLM(folder, kv_cache_dtype="fp8", kv_cache_scales=scales, num_pages=120, **options) as llm:
            found.append(llm.generate(prompts, PARAMS))
    assert outcome(found[0]) == outcome(found[1])
    assert all(c.error is None for c in found[0])
    assert found[1][-1].num_cached_tokens > 0 or len(prompts[0]) < 4


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_cache_scales_in_replayed_steps_change_no_token(name, folders, file, rng, unchecked):
    found, prompts = [], random_prompts(rng)
    for replayed in (False, True):
        with LLM(folders[name][1], kv_cache_dtype="fp8", kv_cache_scales=file, num_pages=120, max_num_seqs=4) as llm:
            if replayed:
                captured_on_the_host(llm, 64)
            found.append(llm.generate(prompts, PARAMS))
    assert [c.token_ids for c in found[0]] == [c.token_ids for c in found[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_cache_scales_of_powers_of_two_on_a_gpu_change_no_bit(name, dtype, cuda_graphs, folders, file, rng, unchecked):
    """Without Inductor, whose tuning may choose other kernels, with other bits, when a model is loaded again."""
    prompts, found = random_prompts(rng), []
    options = {"device": "cuda", "dtype": dtype, "cuda_graphs": cuda_graphs, "num_pages": 120, "max_num_seqs": 8}
    options["compile"] = False
    for folder, scales in zip(folders[name], (None, file), strict=True):
        with LLM(folder, kv_cache_dtype="fp8", kv_cache_scales=scales, **options) as llm:
            found.append(outcome(llm.generate(prompts, PARAMS)))
    assert found[0] == found[1]


class Checked(Runner):
    """Compares the attention of one request with that of its rounded keys and values, in float64."""

    def attend(self, index, layer, q, k, v, sinks):
        out = super().attend(index, layer, q, k, v, sinks)
        self.seen = getattr(self, "seen", {})
        for x, scale, kept in zip((k, v), self.scales[index], self.seen.setdefault(index, ([], [])), strict=True):
            largest = torch.finfo(self.kv_dtype).max
            kept.append((x.float() / scale).clamp(-largest, largest).to(self.kv_dtype).double() * scale)
        keys, values = (torch.cat(kept) for kept in self.seen[index])
        spec = attention_spec(
            **asdict(layer.heads),
            q_dtype=q.dtype,
            kv_dtype=self.kv_dtype,
            sm_scale=layer.sm_scale,
            causal=True,
            window_left=layer.window_left,
            logits_soft_cap=layer.logits_soft_cap,
        )
        truth, _ = attend(q, keys, values, spec, sinks=sinks)
        bound = 1e-5 if q.dtype == torch.float32 else 2e-3
        assert (out - truth).abs().max() < bound * truth.abs().max()
        self.compared = getattr(self, "compared", 0) + 1
        return out


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "dtype"),
    [*((name, "fp8_e4m3", torch.float32) for name in sorted(CONFIGS)), ("gemma2", "fp8_e5m2", torch.float16)],
)
def test_attention_with_any_scales_is_that_of_rounded_keys_and_values(name, kv_cache_dtype, dtype, folders, rng):
    """With any scales, of which some saturate."""
    model = load_model(folders[name][0], torch.device("cpu"), EngineConfig(dtype=dtype))
    scales = [(2 ** rng.uniform(-9, 3), 2 ** rng.uniform(-9, 3)) for _ in model.layers]
    runner = Checked(model, 10, 4, kv_cache_dtype=kv_cache_dtype, kv_cache_scales=scales)
    tokens, start = [rng.randrange(VOCAB) for _ in range(23)], 0
    for end in (9, 10, 17, 18, 23):
        runner.run([probe_chunk(runner, tokens, 2, start, end)])
        start = end
    assert runner.compared == 5 * len(model.layers)


def logits_of(folder, tokens, **options):
    model = load_model(folder, torch.device("cpu"))
    runner = Runner(model, 20, 4, **options)
    return torch.cat([runner.run([probe_chunk(runner, tokens, 0, 0, end)]) for end in range(8, len(tokens), 4)])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_calibrated_scales_of_large_keys_reduce_the_error(name, folders, rng, tmp_path):
    folder, texts = folders[name][1], random_prompts(rng, 8)
    tokens = [rng.randrange(VOCAB) for _ in range(40)]
    scales = calibrate(folder, texts, tmp_path / "s")
    exact = logits_of(folder, tokens)
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    errors = [
        (logits_of(folder, tokens, kv_cache_dtype="fp8", kv_cache_scales=s) - exact).norm() / spread
        for s in (scales, None)
    ]
    assert errors[0] < 0.2  # 8 bits make 0.05 to 0.09 of it
    assert errors[1] > 0.8


def test_llm_whose_keys_saturate_is_refused_and_names_calibrate(folders, file):
    with pytest.raises(ValueError, match=r"do not fit an fp8 cache with these scales \(`quire calibrate`\)"):
        LLM(folders["llama"][1], kv_cache_dtype="fp8", num_pages=20)
    LLM(folders["llama"][1], kv_cache_dtype="fp8", kv_cache_scales=file, num_pages=20).close()


def test_llm_with_scales_in_checkpoint_and_file_takes_those_of_the_file(folders, file, tmp_path, rng, unchecked):
    prompts = random_prompts(rng)
    folder = shutil.copytree(folders["qwen3"][1], tmp_path / "m")
    shutil.copy(file, folder / "scales.safetensors")
    other = tmp_path / "other.safetensors"
    write_scales(other, [(KEYS / 3, VALUES / 3)] * 4)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for options in ({}, {"kv_cache_scales": file}, {"kv_cache_scales": other}):
            with LLM(folder, kv_cache_dtype="fp8", num_pages=120, **options) as llm:
                found.append(outcome(llm.generate(prompts, PARAMS)))
    assert found[0] == found[1] != found[2]
    exact = []
    for path in (folder, folders["qwen3"][1]):  # a cache of other elements has no use for them
        with LLM(path, num_pages=120) as llm:
            exact.append(outcome(llm.generate(prompts, PARAMS)))
    assert exact[0] == exact[1] != found[0]


def test_llm_with_an_fp8_cache_without_scales_warns(folders, unchecked):
    with pytest.warns(RuntimeWarning, match="has no scales for an fp8 cache: keys and values beyond 448 become 448"):
        LLM(folders["llama"][0], kv_cache_dtype="fp8", num_pages=20).close()


NAMES = {
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "vLLM": "model.layers.{}.self_attn.attn.{}_scale",
    "ModelOpt": "model.language_model.layers.{}.self_attn.{}_proj.{}_scale",
    "fused": "model.layers.{}.self_attn.qkv_proj.{}_scale",
    "Quark": "model.layers.{}.self_attn.{}_proj.output_scale",
    "GPT-NeoX": "gpt_neox.layers.{}.attention.{}_scale",
    "GPT-2": "transformer.h.{}.attn.{}_scale",
}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("pattern", NAMES.values(), ids=NAMES)
def test_read_scales_with_any_known_names_returns_them(pattern, shape, tmp_path, rng):
    numbers = [(rng.uniform(0.001, 9), rng.uniform(0.001, 9)) for _ in range(12)]
    tensors = {
        pattern.format(i, kind, kind): torch.tensor(x).reshape(shape)
        for i, pair in enumerate(numbers)
        for kind, x in zip("kv", pair, strict=True)
    }
    others = (
        "0.self_attn.k_proj.weight_scale",
        "0.self_attn.q_scale",
        "0.self_attn.q_proj.output_scale",
        "0.v_scale.x",
    )
    both = list(tensors.items())
    save_file(dict(both[:7]), tmp_path / "a.safetensors")
    save_file(dict(both[7:]) | {f"model.layers.{x}": torch.ones(3) for x in others}, tmp_path / "b.safetensors")
    for ours, theirs in zip(read_scales(tmp_path, 12), numbers, strict=True):
        assert ours == pytest.approx(theirs)


def test_read_scales_with_one_for_keys_and_values_returns_it_twice(tmp_path):
    tensors = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(i + 0.5) for i in range(3)}
    tensors["mtp.layers.0.self_attn.kv_scale"] = torch.tensor(9.0)  # of a draft head, which is not run
    save_file(tensors, tmp_path / "a.safetensors")
    assert read_scales(tmp_path / "a.safetensors", 3) == [(0.5, 0.5), (1.5, 1.5), (2.5, 2.5)]


def test_read_scales_without_any_returns_none(folders):
    assert read_scales(folders["llama"][0], 4) is None


LAYER = "model.layers.{}.self_attn.{}_scale"
GOOD = {LAYER.format(i, kind): torch.tensor(0.5) for i in range(2) for kind in "kv"}
K, V = LAYER.format(1, "k"), LAYER.format(1, "v")
WRONG = {
    "heads": ({K: torch.ones(2)}, rf"a.safetensors: {K} has shape \[2\]: .* one number per layer"),
    "zero": ({K: torch.zeros(1)}, f"{K} is 0.0: it must be a positive number"),
    "negative": ({V: torch.tensor(-1.0)}, f"{V} is -1.0: it must be"),
    "nan": ({V: torch.tensor(torch.nan)}, f"{V} is nan: it must be"),
    "infinite": ({V: torch.tensor(torch.inf)}, f"{V} is inf: it must be"),
    "two": (
        {LAYER.format(1, "kv"): torch.tensor(2.0)},
        "kv_scale is 2.0, and the same scale is 0.5 under another name",
    ),
    "several": (
        {f"draft.{name}": x.clone() for name, x in GOOD.items()},
        "for several models: draft.model.layers., model.layers.",
    ),
    "layer": ({V: None}, "no v_scale of layer 1"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_read_scales_with_invalid_ones_names_them(case, tmp_path):
    changes, message = case
    tensors = {name: x for name, x in (GOOD | changes).items() if x is not None}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        read_scales(tmp_path, 2)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "for a cache of 4 bits"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "for a cache of NVFP4"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}, None),
        ("config.json", {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, None),
    ],
)
def test_read_scales_of_another_cache_is_refused(file, content, message, tmp_path):
    save_file(GOOD, tmp_path / "a.safetensors")
    (tmp_path / file).write_text(json.dumps(content))
    if message is None:
        assert read_scales(tmp_path, 2) == [(0.5, 0.5)] * 2
        return
    with pytest.raises(ValueError, match=message):
        read_scales(tmp_path, 2)


def test_llm_with_a_broken_scales_file_names_it(folders, file, tmp_path):
    folder = folders["llama"][0]
    empty, broken = tmp_path / "empty.safetensors", tmp_path / "broken.safetensors"
    save_file({"x": torch.ones(1)}, empty)
    broken.write_bytes(b"scales")
    with pytest.raises(ValueError, match=r"broken\.safetensors could not be read"):
        LLM(folder, kv_cache_dtype="fp8", kv_cache_scales=broken, num_pages=20)
    with pytest.raises(ValueError, match=r"kv_cache_scales = '.*empty.safetensors': the file has no scales"):
        LLM(folder, kv_cache_dtype="fp8", kv_cache_scales=empty, num_pages=20)
    with pytest.raises(FileNotFoundError, match="kv_cache_scales = '/nowhere': there is no such file"):
        LLM("/nowhere", kv_cache_dtype="fp8", kv_cache_scales="/nowhere")
    with pytest.raises(ValueError, match=r"kv_cache_scales = .*: only an fp8 cache \(kv_cache_dtype\) has scales"):
        LLM("/nowhere", kv_cache_scales=file)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_calibrate_gives_the_scales_of_transformers_keys(name, folders, rng, tmp_path):
    folder, texts = folders[name][0], random_prompts(rng, 3)
    network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    largest = torch.zeros(4, 2)
    for text in texts:
        with torch.no_grad():
            layers = network(torch.tensor([text]), use_cache=True).past_key_values.layers
        now = torch.tensor([[x.abs().max() for x in (layer.keys, layer.values)] for layer in layers])
        largest = largest.maximum(now)
    scales = calibrate(folder, texts, tmp_path / "a", num_pages=120)
    torch.testing.assert_close(torch.tensor(scales) * 224, largest, rtol=1e-5, atol=0)
    assert torch.equal(torch.tensor(read_scales(tmp_path / "a", 4)), torch.tensor(scales))
    assert calibrate(folder, texts, tmp_path / "b", num_pages=120) == scales
    assert load_file(tmp_path / "a").keys() == {LAYER.format(i, kind) for i in range(4) for kind in "kv"}


def test_calibrate_with_long_texts_cuts_them(folders, rng, tmp_path):
    folder, text = folders["llama"][0], [rng.randrange(VOCAB) for _ in range(600)]
    pieces = [text[i : i + 255] for i in range(0, 600, 255)]  # of a context of 256 tokens
    whole, cut = (torch.tensor(calibrate(folder, x, tmp_path / "a", num_pages=40)) for x in ([text], pieces))
    torch.testing.assert_close(whole, cut, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="there are no texts to measure"):
        calibrate(folder, [], tmp_path / "c")
