"""Checkpoints that would run as other models than they are, or not at all, are refused by name when they are loaded."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from helpers.checkpoints import SHAPE, VOCAB, change_config, change_weights, save
from quire.cli import main
from quire.engine import LLM, EmbeddingParams, SamplingParams, load
from quire.engine.scales import write_scales

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DOWN = "model.layers.2.mlp.down_proj"
EXPERT = "model.layers.2.block_sparse_moe.experts.3.w2"
UNQUANTIZED = "such weights can be run only in formats that config.json names in quantization_config"
FORMATS = "only formats of fp8, compressed-tensors, modelopt, awq, gptq, mxfp4 can be run"
CAUSAL = "only causal language models of text can be run"


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def source(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("dense"))


@pytest.fixture
def llama(dense, tmp_path):
    return shutil.copytree(dense, tmp_path / "copy")


def refusal(folder, **options):
    """The message that refuses a checkpoint, without its folder, which it must name."""
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        LLM(folder, num_pages=64, **options)
    message = str(raised.value)
    assert str(folder) in message
    return message.replace(str(folder), "FOLDER")


def tokens(folder, **options):
    with LLM(folder, num_pages=64, **options) as llm:
        return llm.generate([[1, 2, 3], [7] * 20], GREEDY)[1].token_ids


def rounded(x, dtype):
    """A weight as elements of 8 bits, and the scale of each row."""
    scale = x.abs().amax(1, keepdim=True) / (127 if dtype == torch.int8 else torch.finfo(dtype).max)
    weight = (x / scale).round().to(dtype) if dtype == torch.int8 else (x / scale).to(dtype)
    return {"weight": weight, "weight_scale": scale}


def packed(x):
    return torch.zeros(x.shape[0], x.shape[1] // 8, dtype=torch.int32)


# The tensors that stand in a checkpoint for one weight, by the ends of their names, and what the message says of one.
LAYOUTS = {
    "fp8 with a scale per row": (lambda x: rounded(x, torch.float8_e4m3fn), "weight is F8_E4M3"),
    "fp8 of e5m2": (lambda x: rounded(x, torch.float8_e5m2), "weight is F8_E5M2"),
    "int8": (lambda x: rounded(x, torch.int8), "weight is I8"),
    "fp8 blocks": (
        lambda x: {"weight": x.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
        "weight is F8_E4M3",
    ),
    "fp8 without scales": (lambda x: {"weight": x.to(torch.float8_e4m3fn)}, "weight is F8_E4M3"),
    "int8 with zero points": (
        lambda x: {"weight": x.to(torch.int8), "weight_scale": torch.ones(1), "weight_zero_point": torch.zeros(1)},
        "weight is I8",
    ),
    "NVFP4": (
        lambda x: {"weight": torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8), "weight_scale": x[:, :1]},
        "weight is U8",
    ),
    "integers of 32 bits": (lambda x: {"weight": x.to(torch.int32)}, "weight is I32"),
    "a scale of float weights": (lambda x: {"weight": x, "weight_scale": torch.ones(1)}, "weight_scale"),
    "an input scale": (lambda x: {"weight": x, "input_scale": torch.ones(1)}, "input_scale"),
    "a zero point": (lambda x: {"weight": x, "weight_zero_point": torch.ones(1)}, "weight_zero_point"),
    "packed": (lambda x: {"weight_packed": packed(x), "weight_scale": x[:, :1]}, "weight_packed"),
    "AWQ": (lambda x: {"qweight": packed(x), "qzeros": packed(x), "scales": x[:1]}, "qweight"),
    "GPTQ": (lambda x: {"qweight": packed(x), "scales": x[:1], "g_idx": torch.zeros(x.shape[1]).int()}, "g_idx"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_llm_with_one_quantized_weight_names_it(layout, folder):
    """One of a linear layer, or of an expert, which Transformers joins with others."""
    tensors, named = LAYOUTS[layout]

    def quantize(weights):
        name = DOWN if f"{DOWN}.weight" in weights else EXPERT
        weights.update({f"{name}.{end}": x for end, x in tensors(weights.pop(f"{name}.weight")).items()})

    message = refusal(change_weights(folder, quantize))
    assert UNQUANTIZED in message
    assert re.search(rf"\.2\..*\.{named}", message), message


def test_llm_with_mxfp4_experts_and_no_configuration_names_them(tmp_path):
    def quantize(weights):
        weights["model.layers.0.mlp.experts.gate_up_proj_blocks"] = torch.zeros(4, 96, 1, 16, dtype=torch.uint8)

    message = refusal(change_weights(save("gpt-oss", tmp_path), quantize))
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks is U8" in message


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("settings", [{"quant_method": "of_next_year"}, {"quant_method": "bitsandbytes"}, {"bits": 8}])
def test_llm_with_a_quantization_config_of_another_format_names_it(settings, load_format, llama):
    message = refusal(change_config(llama, quantization_config=settings), load_format=load_format)
    what = f"quantization_config.quant_method = {settings.get('quant_method')!r}"
    assert message == f"FOLDER is quantized (config.json: {what}): {FORMATS}"


def test_llm_with_a_quantized_language_model_within_another_names_its_method(tmp_path):
    folder = save_gemma3(tmp_path)
    assert len(tokens(folder)) == 8
    text = json.loads((folder / "config.json").read_text())["text_config"]
    message = refusal(change_config(folder, text_config={**text, "quantization_config": {"quant_method": "hqq"}}))
    assert "quantization_config.quant_method = 'hqq'" in message


def test_llm_with_hf_quant_config_of_another_algorithm_names_it(llama):
    (llama / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert refusal(llama) == (
        "FOLDER is quantized (hf_quant_config.json: quant_algo = 'NVFP4'): quant_algo = 'NVFP4' is not supported: FP8, "
        "FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO are"
    )


CACHES = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8}},
    "hf_quant_config.json": None,
}


@pytest.mark.parametrize("kind", CACHES)
def test_llm_with_scales_of_the_cache_alone_runs_with_them(kind, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "check_runner", lambda runner, random_weights: None)
    write_scales(tmp_path / "scales.safetensors", [(0.5, 2.0)] * 4)
    expected = tokens(llama, kv_cache_dtype="fp8", kv_cache_scales=tmp_path / "scales.safetensors")
    names = [f"model.layers.{i}.self_attn.{part}_proj.{part}_scale" for i in range(4) for part in "kv"]
    scales = {name: torch.tensor(0.5 if ".k_" in name else 2.0) for name in names}
    change_weights(llama, lambda weights: weights.update(scales))
    if CACHES[kind] is None:
        content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
        (llama / "hf_quant_config.json").write_text(json.dumps(content))
    else:
        change_config(llama, quantization_config=CACHES[kind])
    assert tokens(llama, kv_cache_dtype="fp8") == expected


HARMLESS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    "model.rotary_emb.original_inv_freq": torch.ones(8),
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(9, 16),
    "model.layers.1.self_attn.masked_bias": torch.tensor(-1e4),
    "model.layers.1.attn.bias": torch.ones(1, 1, 9, 9, dtype=torch.uint8),
    "model.position_ids": torch.arange(9)[None],
    "model.layers.1.self_attn.q_scale": torch.tensor(0.5),
    "model.layers.1.self_attn.k_scale": torch.tensor(0.5),
    "model.layers.1.self_attn.v_proj.output_scale": torch.tensor(0.5),
    "mtp.layers.0.mlp.up_proj.weight": torch.ones(48, 32).to(torch.float8_e4m3fn),
    "model.mtp_layers.0.weight_scale": torch.ones(1),
    "model.layers.4.mlp.up_proj.weight": torch.ones(48, 32),
}


def test_llm_with_harmless_tensors_computes_the_same(llama, capfd):
    expected = tokens(llama)
    change_weights(llama, lambda weights: weights.update(HARMLESS))
    change_config(llama, num_nextn_predict_layers=1)
    assert tokens(llama) == expected
    assert "REPORT" not in "".join(capfd.readouterr())


UNKNOWN = {
    "score.weight": torch.ones(3, 32),
    "v_head.summary.weight": torch.ones(1, 32),
    "model.layers.1.self_attn.q_proj.bias": torch.ones(64),
    "model.layers.1.attn.bias": torch.ones(32),
    "model.layers.4.mlp.up_proj.weight": torch.ones(48, 32),
    "model.layers.1.mlp.up_proj.lora_A.weight": torch.ones(4, 32),
    "vision_tower.patch_embedding.weight": torch.ones(4, 4),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_llm_with_a_tensor_that_nothing_takes_names_it(name, llama):
    message = refusal(change_weights(llama, lambda weights: weights.update({name: UNKNOWN[name]})))
    assert message == f"FOLDER has tensors that LlamaForCausalLM does not take: {name}"


def test_llm_with_more_layers_than_its_configuration_says_is_refused(llama):
    message = refusal(change_config(llama, num_hidden_layers=3))
    assert "does not take: model.layers.3.input_layernorm.weight (and 8 more)" in message
    message = refusal(change_config(llama, num_hidden_layers=2, num_nextn_predict_layers=1))
    assert "does not take: model.layers.3." in message


def test_llm_with_old_names_and_masks_computes_the_same(tmp_path):
    """GPT-2 as it was published: without the prefix of the language model, and with causal masks of two kinds."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    expected = tokens(tmp_path)

    def publish(weights):
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    assert tokens(change_weights(tmp_path, publish)) == expected


def test_llm_with_a_weight_of_another_shape_names_it(folder):
    def cut(weights):
        name = "model.layers.1.self_attn.k_proj.weight"
        weights[name] = weights[name][:-1]

    message = refusal(change_weights(folder, cut))
    assert "model.layers.1.self_attn.k_proj.weight is [31, 32], and [32, 32] by config.json" in message


@pytest.mark.parametrize("what", ["shape", "absence"])
def test_llm_with_one_wrong_expert_names_what_cannot_be_made(what, tmp_path, capfd):
    def spoil(weights):
        weight = weights.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")
        if what == "shape":
            weights["model.layers.1.block_sparse_moe.experts.2.w1.weight"] = weight[:-1]

    message = refusal(change_weights(save("mixtral", tmp_path), spoil))
    assert "model.layers.1.mlp.experts.gate_up_proj can't be made of the checkpoint's tensors" in message
    assert "47" in message if what == "shape" else "size 3" in message
    assert "REPORT" not in "".join(capfd.readouterr())


def sharded(folder):
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_llm_with_a_missing_or_broken_shard_names_it(llama):
    expected = tokens(llama)
    shard = sharded(llama)[1]
    assert tokens(llama) == expected
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    assert f"FOLDER/{shard.name} could not be loaded: SafetensorError" in refusal(llama)
    shard.unlink()
    assert refusal(llama) == f"FOLDER/{shard.name}, which model.safetensors.index.json names, is missing"


def test_llm_with_weights_of_another_name_is_refused(llama):
    (llama / "model.safetensors").rename(llama / "consolidated.safetensors")
    assert "neither a model.safetensors nor a model.safetensors.index.json" in refusal(llama)


TEXT = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
TEXT |= {"num_hidden_layers": 2, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
DECODER = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
DECODER |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 0}


def save_gemma3(folder):
    """A vision-language model that Transformers has among causal language models."""
    text = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


KINDS = {
    "CLIPModel": (
        lambda: transformers.CLIPConfig(text_config=TEXT, vision_config=VISION),
        "a vision-language model",
    ),
    "T5ForConditionalGeneration": (
        lambda: transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4),
        "an encoder-decoder model",
    ),
    "BartForConditionalGeneration": (lambda: transformers.BartConfig(**DECODER), "an encoder-decoder model"),
    "WhisperForConditionalGeneration": (
        lambda: transformers.WhisperConfig(**DECODER, num_mel_bins=8, bos_token_id=0, eos_token_id=0),
        "an encoder-decoder model",
    ),
    "LlamaForSequenceClassification": (lambda: transformers.LlamaConfig(**TEXT), "a classifier"),
    "Qwen2ForTokenClassification": (
        lambda: transformers.Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=True),
        "a classifier",
    ),
    "BertForMaskedLM": (lambda: transformers.BertConfig(**TEXT), "a masked language model"),
    "ViTForImageClassification": (lambda: transformers.ViTConfig(**VISION), "a classifier"),
    "ModernBertModel": (
        lambda: transformers.ModernBertConfig(**TEXT, cls_token_id=0, sep_token_id=0),
        "a model without a language-model head, as for embeddings",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_llm_with_a_model_of_another_kind_says_which(name, tmp_path):
    config, what = KINDS[name]
    getattr(transformers, name)(config()).save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"FOLDER is {what} ({name}): {CAUSAL}"
    assert refusal(tmp_path, load_format="dummy") == f"FOLDER is {what} ({name}): {CAUSAL}"


def test_llm_with_a_masked_model_without_a_head_says_so(tmp_path, capfd):
    transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained(tmp_path)
    capfd.readouterr()
    message = refusal(tmp_path)
    assert re.match(r"FOLDER has no weights for cls\.predictions\.bias of ", message)
    assert f"it is a model without a language-model head, as for embeddings (BertModel), and {CAUSAL}" in message
    assert "corrupted" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3"])
def test_llm_with_a_model_without_a_head_computes_embeddings_alone(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(**TEXT, num_key_value_heads=2)
    model = getattr(transformers, f"{name}Model")(config).eval()
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, num_pages=20, page_size=4) as llm:
        (done,) = llm.embed([5, 6, 7], EmbeddingParams(normalize=False))
        with torch.inference_mode():
            expected = model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
        assert torch.allclose(torch.from_numpy(done.values), expected, atol=1e-5)
        with pytest.raises(ValueError, match="has no language-model head: only embeddings can be computed"):
            llm.generate([[5]])


def test_llm_whose_head_is_missing_is_refused_unless_it_is_for_embeddings(tmp_path):
    """The largest Qwen3-Embedding says that it has a head, which it has not, and does not share its embeddings."""
    folder = change_weights(save("qwen3", tmp_path), lambda weights: weights.pop("lm_head.weight"))
    assert refusal(folder).startswith("FOLDER has no weights for lm_head.weight of Qwen3ForCausalLM")
    (folder / "modules.json").write_text("[]")
    with LLM(folder, num_pages=20, pooling="last") as llm:
        assert llm.embed([5])[0].finish_reason == "stop"


def test_llm_with_a_headless_model_that_ties_its_embeddings_runs(tmp_path):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.Qwen2Model(config).save_pretrained(tmp_path)
    assert len(tokens(tmp_path)) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "llama7"}, f"model_type = 'llama7': Transformers {transformers.__version__} does not know it"),
        ({"hidden_size": 32}, "model_type = None: it is missing in config.json"),
        ([1], "config.json could not be loaded: it is not a JSON object"),
    ],
)
def test_llm_with_an_unknown_configuration_says_why(content, message, llama):
    (llama / "config.json").write_text(json.dumps(content))
    assert message in refusal(llama)


def test_llm_with_an_adapter_says_of_which_model(tmp_path):
    content = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    message = refusal(tmp_path)
    assert message.startswith("FOLDER is an adapter (LORA) of org/base: give the folder or the name of that")


def test_llm_with_an_adapter_beside_its_model_is_refused(llama):
    (llama / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for load_format in ("auto", "dummy"):
        message = refusal(llama, load_format=load_format)
        assert message.startswith("FOLDER has an adapter_config.json beside its model: move the adapter's files")


def test_llm_with_other_files_than_safetensors_names_one(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert refusal(llama).endswith("the weights are missing; pytorch_model.bin is of a format that is not read")
    (llama / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"model\.gguf is a file: a model is a folder with config\.json"):
        LLM(llama / "model.gguf")


@pytest.mark.parametrize("name", ["/nowhere/model", "here/model", "model", "a/b/c"])
def test_llm_with_a_path_without_a_folder_names_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError) as raised:
        LLM(name)
    assert str(raised.value) == f"there is no model folder {name}"


def test_command_with_broken_weights_prints_one_line(llama, capfd):
    change_weights(llama, lambda weights: weights.update({f"{DOWN}.weight_scale": torch.ones(1)}))
    assert main(["generate", "x", "--model", str(llama)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"quire: error: {llama} seems to be quantized: LlamaForCausalLM does not take {DOWN}.weight_"
    )
