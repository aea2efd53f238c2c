"""Adapters that PEFT has written: their factors change a model's weights as PEFT does."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PhiConfig

from helpers.adapters import CONFIG, WEIGHTS, change_config, change_tensors, merged, save_adapter, with_factors
from helpers.checkpoints import CONFIGS, FURTHER_CONFIGS, SHAPE
from quire.engine.adapters.peft import read_adapter
from quire.engine.adapters.targets import adapter_targets

FAMILIES = CONFIGS | FURTHER_CONFIGS
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def network(name="llama", **changes):
    config = FAMILIES[name]()
    config.update({"num_hidden_layers": 2, **changes})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def read(model, folder, **options):
    return read_adapter(folder, adapter_targets(model), **options)


def check_as_merged(model, folder):
    """Compare each weight of a model with the factors of an adapter to what PEFT makes of it."""
    adapter = read(model, folder)
    ours, theirs = with_factors(model, adapter), merged(copy.deepcopy(model), folder)
    changed = 0
    for (name, weight), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(
            weight, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        changed += not torch.equal(expected, model.get_parameter(name))
    assert changed == len(adapter.factors)
    tokens = torch.randint(0, 90, (2, 9))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    return adapter


SETTINGS = {
    "LoRA": {"r": 8, "lora_alpha": 20, "target_modules": ["q_proj", "v_proj"]},
    "rsLoRA": {"r": 8, "lora_alpha": 20, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"},
    "one layer": {"r": 4, "target_modules": ALL_LINEAR, "layers_to_transform": [1], "layers_pattern": "layers"},
    "rank 1": {"r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"k_proj": 2, "layers.1.*.o_proj": 7, "^model.layers.0.mlp.up_proj": 9},
        "alpha_pattern": {"v_proj": 33, "layers.0.mlp.down_proj": 1.5, "k_proj": 12},
    },
    "patterns with rsLoRA": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"k_proj": 2, "q_proj": 16},
        "alpha_pattern": {"q_proj": 3},
    },
    "embedding and head": {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_read_adapter_has_the_weights_that_peft_merges(settings, tmp_path):
    model = network()
    adapter = check_as_merged(model, save_adapter(model, tmp_path, **settings))
    ranks = [len(a) for a, _ in adapter.factors.values()]
    assert set(ranks) == {*settings.get("rank_pattern", {}).values(), settings["r"]}
    assert adapter.rank == max(ranks)


@pytest.mark.parametrize("name", FAMILIES)
def test_read_adapter_of_a_family_has_the_weights_that_peft_merges(name, tmp_path):
    model = network(name)
    # PEFT adapts Mixtral's experts with all linear layers, and these are parameters.
    modules = ALL_LINEAR[:4] if name == "mixtral" else "all-linear"
    adapter = check_as_merged(model, save_adapter(model, tmp_path, r=4, lora_alpha=3, target_modules=modules))
    assert {path.split(".")[2] for path in adapter.factors} == {"0", "1"}


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_read_adapter_of_an_embedding_that_scales_has_the_output_of_peft(name, tmp_path):
    """Gemma multiplies embeddings by the root of their size, and an adapter's part of them, too."""
    model = network(name, tie_word_embeddings=False)
    folder = save_adapter(model, tmp_path, r=4, lora_alpha=6, target_modules=["embed_tokens"])
    check_as_merged(model, folder)
    tokens = torch.randint(0, 90, (1, 5))
    ((path, (a, b)),) = read(model, folder).factors.items()
    embedding = model.get_submodule(path)
    expected = merged(copy.deepcopy(model), folder).get_submodule(path)(tokens)
    torch.testing.assert_close(embedding(tokens) + a[:, tokens].movedim(0, -1) @ b.T, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_read_adapter_of_a_small_dtype_folds_the_scale_in_float32(dtype, tmp_path):
    model = network()
    folder = save_adapter(model, tmp_path, dtype=dtype, r=4, lora_alpha=3, use_rslora=True, target_modules=["q_proj"])
    saved = load_file(folder / WEIGHTS)
    for path, (a, b) in read(model, folder).factors.items():
        assert a.dtype == dtype
        assert torch.equal(a, saved[f"base_model.model.{path}.lora_A.weight"])
        assert b.dtype == torch.float32
        assert torch.equal(b, saved[f"base_model.model.{path}.lora_B.weight"].float() * (3 / 4**0.5))
    rounded = read(model, folder, dtype=torch.bfloat16)
    for path, (a, b) in read(model, folder).factors.items():
        assert torch.equal(rounded.factors[path][0], a.bfloat16())
        assert torch.equal(rounded.factors[path][1], b.bfloat16())
    assert rounded.digest == read(model, folder).digest


def test_read_adapter_with_tied_weights_has_factors_of_embedding_and_head(tmp_path):
    model = network(tie_word_embeddings=True)
    folder = save_adapter(model, tmp_path, r=4, target_modules=["embed_tokens"], ensure_weight_tying=True)
    factors = read(model, folder).factors
    assert factors.keys() == {"model.embed_tokens", "lm_head"}
    # PEFT trains them as one, so that the weights stay tied.
    embedding, head = factors["model.embed_tokens"], factors["lm_head"]
    torch.testing.assert_close((embedding[1] @ embedding[0]).T, head[1] @ head[0])


def test_read_adapter_from_a_pickle_is_that_of_safetensors(tmp_path):
    model = network()
    folder = save_adapter(model, tmp_path, r=4, target_modules=["q_proj", "embed_tokens"])
    expected = read(model, folder)
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    found = read(model, folder)
    assert found.digest == expected.digest
    assert found.factors.keys() == expected.factors.keys()
    assert all(
        torch.equal(x, y) for p in found.factors for x, y in zip(found.factors[p], expected.factors[p], strict=True)
    )


def test_read_adapter_from_a_pickle_of_negated_views_is_that_of_safetensors(tmp_path):
    model = network()
    folder = save_adapter(model, tmp_path, r=4, target_modules=["q_proj"])
    expected = read(model, folder)
    views = {name: torch._neg_view(-tensor) for name, tensor in load_file(folder / WEIGHTS).items()}
    torch.save(views, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    assert read(model, folder).digest == expected.digest


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (torch.Tensor.to_sparse, "sparse_coo on the device cpu"),
        (torch.Tensor.to_sparse_csr, "sparse_csr on the device cpu"),
        (lambda x: x.to("meta"), "strided on the device meta"),
    ],
    ids=["coo", "csr", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_read_adapter_from_a_pickle_of_other_tensors_names_the_tensor(change, what, tmp_path):
    model = network()
    folder = save_adapter(model, tmp_path, r=4, target_modules=["q_proj"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(folder / WEIGHTS)
    torch.save(tensors | {name: change(tensors[name])}, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"adapter_model.bin can't be used as an adapter: {name} is {what}"):
        read(model, folder)


def test_read_adapter_reports_the_base_that_the_adapter_names(tmp_path):
    model = network()
    folder = save_adapter(model, tmp_path, r=4, target_modules=["q_proj"])
    assert read(model, folder).base_model_name == ""
    assert read(model, change_config(folder, base_model_name_or_path="some/model")).base_model_name == "some/model"


def test_read_adapter_does_not_depend_on_later_writes_to_the_file(tmp_path):
    model = network()
    folder = save_adapter(model, tmp_path, r=4, target_modules=["q_proj"])
    expected, adapter = load_file(folder / WEIGHTS), read(model, folder)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(b"\xff" * size)
    for path, (a, _) in adapter.factors.items():
        assert torch.equal(a, expected[f"base_model.model.{path}.lora_A.weight"])


def test_digest_is_of_the_content_alone(tmp_path, rng):
    model = network()
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    folder = save_adapter(model, tmp_path / "one", **settings)
    digest = read(model, folder).digest
    assert len(digest) == 64
    assert int(digest, 16) >= 0

    other = tmp_path / "two"
    other.mkdir()
    for name in (CONFIG, WEIGHTS):
        (other / name).write_bytes((folder / name).read_bytes())
    assert read(model, other).digest == digest
    # Neither what the file says beside the factors and their scales, nor the order of its tensors, is content.
    change_config(other, base_model_name_or_path="other", lora_dropout=0.5, alpha_pattern={"q_proj": 8})
    change_tensors(other, lambda tensors: [tensors.update({name: tensors.pop(name)}) for name in sorted(tensors)[::-1]])
    assert read(model, other).digest == digest

    assert read(model, change_config(other, lora_alpha=9, alpha_pattern={})).digest != digest
    change_config(other, lora_alpha=8)
    assert read(model, other).digest == digest

    def change_one(tensors):
        name = rng.choice(sorted(tensors))
        tensors[name].flatten()[rng.randrange(tensors[name].numel())] += 0.25

    assert read(model, change_tensors(other, change_one)).digest != digest

    def swap(tensors):
        first, second = (f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in (0, 1))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    assert read(model, change_tensors(folder, swap)).digest != digest


def test_read_adapter_of_a_head_with_a_bias_takes_the_bias_of_the_base_alone(tmp_path):
    """PEFT writes the head's bias beside its factors, too."""
    model = AutoModelForCausalLM.from_config(PhiConfig(**SHAPE), dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.bias)
    folder = save_adapter(copy.deepcopy(model), tmp_path, r=4, target_modules=["lm_head", "q_proj"])
    name = "base_model.model.lm_head.base_layer.bias"
    assert name in load_file(folder / WEIGHTS)
    check_as_merged(model, folder)
    change_tensors(folder, lambda tensors: tensors[name].add_(0.5))
    with pytest.raises(ValueError, match=rf"{name} differs from the base's bias: it was trained"):
        read(model, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16, torch.float16])
def test_read_adapter_with_weights_of_the_base_takes_them_in_other_dtypes(trained, dtype, tmp_path):
    """PEFT writes the base's embedding beside its factors, in the dtype that the base had in training."""
    model = network()
    folder = save_adapter(
        copy.deepcopy(model), tmp_path, dtype=trained, r=4, target_modules=["embed_tokens", "lm_head"]
    )
    assert "base_model.model.lm_head.base_layer.weight" in load_file(folder / WEIGHTS)
    assert read(model.to(dtype), folder).factors.keys() == {"model.embed_tokens", "lm_head"}
