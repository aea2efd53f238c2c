"""What is no LoRA of the model is refused, with the name of the field or the tensor."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.adapters import CONFIG, WEIGHTS, change_config, change_tensors, save_adapter
from helpers.checkpoints import CONFIGS
from quire.engine.adapters import settings
from quire.engine.adapters.peft import read_adapter
from quire.engine.adapters.targets import adapter_targets

PREFIX = "base_model.model."
Q = "model.layers.1.self_attn.q_proj"
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
HEAD = f"{PREFIX}lm_head.base_layer.weight"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """An adapter that is served."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    folder = save_adapter(model, tmp_path_factory.mktemp("adapter"), **settings)
    assert len(read_adapter(folder, adapter_targets(model)).factors) == 6
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the adapter, to be changed."""
    return shutil.copytree(saved, tmp_path / "adapter")


def check_refused(model, folder, message, **options):
    """Read an adapter, and look for the folder and a text in the error."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_adapter(folder, adapter_targets(model), **options)
    assert str(folder) in str(raised.value)


FIELDS = {
    "use_dora": (True, "DoRA rescales"),
    "modules_to_save": (["lm_head"], "whole modules of the base were trained"),
    "trainable_token_indices": ([1, 2], "rows of the embedding were trained"),
    "lora_bias": (True, "the factors B have biases"),
    "target_parameters": (["experts.down_proj"], "parameters that are not linear layers"),
    "layer_replication": ([[0, 2], [1, 3]], "layers of the base are repeated"),
    "alora_invocation_tokens": ([5], "an activated LoRA begins in the middle"),
    "use_qalora": (True, "QALoRA averages groups"),
    "use_bdlora": ({"nblocks": 2}, "BD-LoRA has factors of diagonal blocks"),
    "arrow_config": ({"top_k": 3}, "Arrow mixes several adapters"),
    "kasa_config": ({"beta": 1}, "KaSA truncates"),
    "monteclora_config": ({"num_samples": 2}, "MonteCLoRA draws"),
    "use_something_new": (0.5, "the field is not known, and might change what the adapter computes"),
    "bias": ("lora_only", "biases of the base were trained; only 'none' is"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_read_adapter_with_a_field_of_another_method_names_it(field, model, folder):
    value, reason = FIELDS[field]
    change_config(folder, **{field: value})
    check_refused(model, folder, f"{field} = {value!r} in {CONFIG} is not supported: {reason}")


def test_read_adapter_knows_each_field_that_peft_writes():
    """Fields of another version might be refused as unknown."""
    known = settings._HARMLESS | settings._READ | settings._OTHER_METHODS.keys()
    assert {field.name for field in fields(LoraConfig)} <= known


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "something_new", ["pissa"]]
)
def test_read_adapter_whose_start_changed_the_base_names_it(start, model, folder):
    change_config(folder, init_lora_weights=start)
    check_refused(model, folder, f"init_lora_weights = {start!r} in {CONFIG} is not supported: it changes the base's")


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_read_adapter_whose_start_leaves_the_base_alone_is_read(start, model, folder):
    assert read_adapter(change_config(folder, init_lora_weights=start), adapter_targets(model)).rank == 4


@pytest.mark.parametrize("kind", ["LOHA", "IA3", "PROMPT_TUNING", "lora", 5, None])
def test_read_adapter_of_another_type_names_it(kind, model, folder):
    check_refused(model, change_config(folder, peft_type=kind), f"peft_type = {kind!r} in {CONFIG}: only 'LORA'")


NUMBERS = {
    "r = 0": {"r": 0},
    "r = 257": {"r": 257},
    "r = 4.0": {"r": 4.0},
    "r = True": {"r": True},
    "rank_pattern['q_proj'] = 300": {"rank_pattern": {"q_proj": 300}},
    "rank_pattern['q_proj'] = 'x'": {"rank_pattern": {"q_proj": "x"}},
}


@pytest.mark.parametrize("text", NUMBERS)
def test_read_adapter_with_a_rank_out_of_range_names_the_bound(text, model, folder):
    change_config(folder, **NUMBERS[text])
    check_refused(model, folder, f"{text} in {CONFIG}: a rank must be an integer from 1 to 256")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": float("nan")}, "lora_alpha = nan in adapter_config.json: an alpha must be a finite number"),
        ({"lora_alpha": "8"}, "lora_alpha = '8' in adapter_config.json: an alpha must be a finite number"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern['q_proj'] = True in adapter_config.json: an alpha must"),
        ({"alpha_pattern": [1]}, "alpha_pattern = [1] in adapter_config.json: it must be an object"),
        ({"rank_pattern": {"q_(": 4}}, "rank_pattern has 'q_(' in adapter_config.json, which is no regular expression"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes' in adapter_config.json: it must be true or false"),
    ],
)
def test_read_adapter_with_a_broken_setting_names_it(changes, message, model, folder):
    check_refused(model, change_config(folder, **changes), message)


def test_read_adapter_with_a_rank_that_tensors_do_not_have_names_both(model, folder):
    what = f"{A.replace('layers.1', 'layers.0')} is [4, 32], and [8, 32] by {Q.replace('layers.1', 'layers.0')} of the"
    check_refused(model, change_config(folder, rank_pattern={"q_proj": 8}), f"{what} base and the rank 8 of {CONFIG}")


def tensor_changes():
    """Changes of an adapter's tensors, by a name, and what is said of them."""
    many = torch.zeros(4, 32)
    yield (
        "another layer",
        {f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight": many},
        ("layers.9.self_attn.q_proj, and the base has no linear layer or embedding of that name"),
    )
    yield (
        "experts",
        {f"{PREFIX}model.layers.0.mlp.experts.1.w1.lora_A.weight": many},
        ("is of model.layers.0.mlp.experts.1.w1, and the base has no linear layer"),
    )
    yield "a norm", {f"{PREFIX}model.norm.lora_A.weight": many}, "is of model.norm, and the base has no linear layer"
    yield "no prefix", {f"{Q}.lora_A.weight": many}, f"{Q}.lora_A.weight is not known: it is no factor of a LoRA"
    yield "a name", {f"{PREFIX}{Q}.lora_A.default.weight": many}, "is not known: it is no factor of a LoRA"
    yield "a factor without its end", {f"{PREFIX}{Q}.lora_A": many}, "is not known: it is no factor of a LoRA"
    yield "DoRA", {f"{PREFIX}{Q}.lora_magnitude_vector": many}, "lora_magnitude_vector is magnitudes of DoRA, which"
    yield "a bias of B", {f"{PREFIX}{Q}.lora_B.bias": many}, "lora_B.bias is a bias of a factor (lora_bias), which"
    yield "a bias", {f"{PREFIX}{Q}.base_layer.bias": many}, "base_layer.bias is a trained bias of the base, which"
    yield (
        "tokens",
        {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": many},
        ("is trained rows of an embedding (trainable_token_indices), which is not supported"),
    )
    yield "a weight", {f"{PREFIX}{Q}.weight": many}, f"{Q}.weight is not known: it is no factor of a LoRA"
    yield "a head of another task", {f"{PREFIX}score.weight": many}, "score.weight is not known"
    yield (
        "an embedding's factor",
        {f"{PREFIX}{Q}.lora_embedding_A": many},
        (f"is a factor of an embedding, and {Q} is a linear layer"),
    )
    yield (
        "a linear factor",
        {f"{PREFIX}model.embed_tokens.lora_A.weight": many},
        ("is a factor of a linear layer, and model.embed_tokens is an embedding"),
    )
    yield "no B", {B: None}, f"{A} has no factor B beside it"
    yield "no A", {A: None}, f"{B} has no factor A beside it"
    yield (
        "another rank",
        {A: torch.zeros(5, 32), B: torch.zeros(64, 5)},
        (f"{A} is [5, 32], and [4, 32] by {Q} of the base and the rank 4 of {CONFIG}"),
    )
    yield "another base", {A: torch.zeros(4, 48)}, f"{A} is [4, 48], and [4, 32] by {Q} of the base"
    yield "other outputs", {B: torch.zeros(32, 4)}, f"{B} is [32, 4], and [64, 4] by {Q} of the base"
    yield "a convolution", {A: torch.zeros(4, 32, 1)}, f"{A} is [4, 32, 1], and [4, 32] by {Q} of the base"
    yield "integers", {B: torch.zeros(64, 4, dtype=torch.int8)}, f"{B} is int8: it must be one of float64, float32"
    yield "8 bits", {B: torch.zeros(64, 4).to(torch.float8_e4m3fn)}, f"{B} is float8_e4m3fn: it must be one of"
    yield (
        "the same twice",
        {
            f"{PREFIX}layers.1.self_attn.q_proj.lora_A.weight": many,
            f"{PREFIX}layers.1.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
        },
        f"layers.1.self_attn.q_proj are both of {Q}",
    )
    yield (
        "a resized vocabulary",
        {HEAD: torch.zeros(98, 32)},
        (f"{HEAD} is [98, 32], and [97, 32] in the base: the vocabulary was resized"),
    )
    yield "a head of another base", {HEAD: torch.zeros(97, 48)}, "[97, 32] in the base: it is of another base"
    yield (
        "a trained head",
        {HEAD: torch.zeros(97, 32)},
        (f"{HEAD} differs from the base's weight: it was trained, or is of another base"),
    )


CHANGES = {name: (changes, message) for name, changes, message in tensor_changes()}


@pytest.mark.parametrize("name", CHANGES)
def test_read_adapter_with_tensors_that_do_not_fit_names_them(name, model, folder):
    changes, message = CHANGES[name]

    def change(tensors):
        tensors |= changes
        for key in [key for key, tensor in tensors.items() if tensor is None]:
            del tensors[key]

    change_tensors(folder, change)
    check_refused(model, folder, message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [A, B])
def test_read_adapter_with_a_number_that_is_not_finite_names_it(name, value, model, folder, rng):
    row, column = (rng.randrange(size) for size in load_file(folder / WEIGHTS)[name].shape)

    def change(tensors):
        tensors[name][row, column] = value

    change_tensors(folder, change)
    check_refused(model, folder, f"{name} is {value} at [{row}, {column}]: all elements must be finite")


def test_read_adapter_with_large_numbers_is_read(model, folder):
    """Their sum is infinite in float32, and they are not."""
    change_tensors(folder, lambda tensors: tensors[A].fill_(3e38))
    assert read_adapter(folder, adapter_targets(model)).factors[Q][0].min() == 3e38


def test_read_adapter_with_factors_beyond_the_dtype_names_them(model, folder):
    change_tensors(folder, lambda tensors: tensors[B].fill_(60000.0))
    targets = adapter_targets(model)
    assert read_adapter(folder, targets, dtype=torch.bfloat16).factors[Q][1].isfinite().all()
    check_refused(
        model, folder, f"{B} times its scale, 2.0, in float16 is inf at [0, 0]: all elements", dtype=torch.float16
    )
    change_tensors(folder, lambda tensors: (tensors[B].fill_(0), tensors[A].fill_(1e5)))
    check_refused(model, folder, f"{A} in float16 is inf at [0, 0]", dtype=torch.float16)


@pytest.mark.parametrize("size", [4, 60, 2000, -8])
def test_read_adapter_with_a_truncated_file_names_it(size, model, folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:size])
    check_refused(model, folder, f"{WEIGHTS} could not be loaded: SafetensorError")


@pytest.mark.parametrize("content", [b"", b"\x80\x02]", b"PK\x03\x04"])
def test_read_adapter_with_a_broken_pickle_names_it(content, model, folder):
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(content)
    check_refused(model, folder, "adapter_model.bin could not be loaded")


def test_read_adapter_with_a_pickle_of_code_does_not_run_it(model, folder, tmp_path):
    class Harm:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    (folder / WEIGHTS).unlink()
    torch.save({A: Harm()}, folder / "adapter_model.bin")
    check_refused(model, folder, "adapter_model.bin could not be loaded")
    assert not (tmp_path / "harm").exists()


def test_read_adapter_with_a_pickle_of_something_else_names_it(model, folder):
    (folder / WEIGHTS).unlink()
    torch.save([torch.zeros(3)], folder / "adapter_model.bin")
    check_refused(model, folder, "adapter_model.bin could not be loaded: it is not a dictionary of tensors")


def test_read_adapter_without_factors_says_so(model, folder):
    change_tensors(folder, lambda tensors: tensors.clear())
    check_refused(model, folder, "it has no factors")


@pytest.mark.parametrize("content", ["{", "[]", '"LORA"'])
def test_read_adapter_with_a_broken_config_names_it(content, model, folder):
    (folder / CONFIG).write_text(content)
    check_refused(model, folder, f"{folder / CONFIG} could not be loaded")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_read_adapter_without_a_file_names_it(name, model, folder):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(folder))} has n.*{name}"):
        read_adapter(folder, adapter_targets(model))


def test_read_adapter_with_a_weight_of_a_quantized_head_says_that_it_cannot_compare_it(model, folder):
    targets = adapter_targets(model)
    targets["lm_head"] = replace(targets["lm_head"], weight=None)
    with pytest.raises(ValueError, match="can't be compared with the base's weight, which is quantized"):
        read_adapter(folder, targets)
    change_tensors(folder, lambda tensors: tensors.pop(HEAD))
    assert "lm_head" in read_adapter(folder, targets).factors
