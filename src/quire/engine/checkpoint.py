"""Reads a checkpoint folder with Transformers, and refuses one that would not run as the model that it describes.

Transformers loads much that it does not understand. It leaves out tensors that no parameter takes, casts weights of 8
bits without their scales, and asks on the terminal whether to run code of the folder. All that is an error here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.distribution import pip_install
from quire.engine.headless import replace_head
from quire.engine.hf_attention import NAME, attention
from quire.engine.multimodal import auto_class, is_multimodal, keep_language_model
from quire.engine.reading import read_json, reading, untrusted
from quire.engine.transformers_internals import conversion_errors, reading_to, without_load_report
from quire.engine.weights.registry import find_format

if TYPE_CHECKING:
    from quire.engine.parallel.ranks import Ranks

_CAN_RUN = "only causal language models of text can be run"
_UNQUANTIZED = "such weights can be run only in formats that config.json names in quantization_config"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
# The types of more than 8 bits, as safetensors names them. All others are of quantized weights, or masks.
_FLOATS = {"F64", "F32", "F16", "BF16"}
_WIDE = {*_FLOATS, "BOOL", "I16", "I32", "I64", "U16", "U32", "U64"}
# The type and the shape of each tensor of a checkpoint.
Headers = dict[str, tuple[str, list[int]]]

# Tensors that checkpoints have beside the parameters of their model: buffers that the code computes by itself, scales
# of an fp8 cache and of fp8 queries (`scales.py` reads those of keys and values), and heads that predict further tokens
# (MTP).
_HARMLESS = re.compile(
    r"(.*\.)?("
    r"(\w+_)?inv_freq|(cos|sin)_cached|position_ids|masked_bias|causal_mask|decoder\.version"
    r"|(q|k|v|kv|prob)_scale|[qkv]_proj\.output_scale"
    r"|mtp(_\w+)?\..*"
    r")"
)
# Old checkpoints have causal masks of this name, with four dimensions. A bias has one.
_MASK = re.compile(r"(.*\.)?(attn|attention)\.bias")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_OF_QUANTIZATION = re.compile(r"scale|zero|absmax|quant|packed|qweight|g_idx|SCB", re.IGNORECASE)
# What a model is, by the end of its class's name.
_HEADS = {
    r"\w*Classification|QuestionAnswering|MultipleChoice|\w*RewardModel": "a classifier",
    r"MaskedLM": "a masked language model",
    r"(?<!Head)Model": "a model without a language-model head, as for embeddings",
}


def check_files(folder: Path) -> None:
    """Refuse a folder that is not a checkpoint, apart from its weights.

    Raises:
        FileNotFoundError: its config.json is missing.
        ValueError: it has an adapter.
    """
    has_config, adapter = (folder / "config.json").is_file(), folder / "adapter_config.json"
    if adapter.is_file() and not has_config:
        content = read_json(adapter)
        kind, base = content.get("peft_type") or "LORA", content.get("base_model_name_or_path") or "another model"
        raise ValueError(
            f"{folder} is an adapter ({kind}) of {base}: give the folder or the name of that model, and this folder as "
            'one of its adapters, {"name": folder}'
        )
    if adapter.is_file():
        raise ValueError(
            f"{folder} has an adapter_config.json beside its model: move the adapter's files to a folder of their own, "
            "which can be one of the model's adapters"
        )
    if not has_config:
        raise FileNotFoundError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")


def check_weights(folder: Path) -> None:
    """Raise a FileNotFoundError if a checkpoint has no weights."""
    if not any(folder.glob("*.safetensors")):
        others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
        what = f"; {others[0]} is of a format that is not read" if others else ""
        raise FileNotFoundError(f"{folder} has no *.safetensors file: the weights are missing{what}")


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """Transformers' configuration of a checkpoint.

    Args:
        folder: the checkpoint, which `check_files` accepts.
        trust_remote_code: whether to run Python code that comes with the checkpoint.

    Raises:
        ImportError: Transformers is not installed.
        ValueError: config.json is broken, or it describes what can't be run.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
    except ImportError as error:
        raise ImportError(f"running models needs Transformers: {pip_install('engine')} ({error})") from error

    content = read_json(folder / "config.json")
    kind, code = content.get("model_type"), content.get("auto_map") or {}
    if kind not in CONFIG_MAPPING and "AutoConfig" not in code:
        what = f"Transformers {__version__} does not know it" if kind else "it is missing in config.json"
        raise ValueError(f"{folder} can't be run: model_type = {kind!r}: {what}")
    with reading(str(folder), trust_remote_code, _explained):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    _check_kind(folder, config, trust_remote_code)
    _set_format(folder, config)
    return config


def load_network(
    folder: Path,
    config: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    dummy: bool,
    trust_remote_code: bool,
    dequantize: bool = True,
    ranks: Ranks | None = None,
) -> Any:
    """Transformers' model of a checkpoint, with Quire's attention function. Its weights are on the device; buffers that
    are not in the checkpoint are on the CPU.

    Args:
        folder: the checkpoint.
        config: what `read_config` returned.
        device: of the weights. On the CPU they are pages of the mapped files, unless they are cast or made of several
            tensors.
        dtype: of the weights; None: the checkpoint's.
        dummy: whether to make random weights instead of reading them.
        trust_remote_code: as for `read_config`.
        dequantize: whether quantized weights become weights of the dtype; else they are on the device as they are.
        ranks: those that divide a model of random weights, of which only this rank's part is made; None: all is made.

    Raises:
        FileNotFoundError: a file of the weights is missing.
        ValueError: the weights are broken, quantized, or not those of the model; or the model can't be divided.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    kind = auto_class(config)
    if not dequantize and getattr(config, "quantization_config", None) is not None:
        config.quantization_config["device"] = device
    if dummy:
        dtype = dtype or config.dtype or torch.float32
        return _random_network(folder, config, device, dtype, trust_remote_code, ranks)
    headers = _read_headers(folder, config)
    _check_types(folder, config, headers)
    with reading(str(folder), trust_remote_code, _explained), _quiet(), reading_to(device):
        # Weights of other shapes are listed in the report, and `_check_report` refuses them.
        network, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            attn_implementation=NAME,
            trust_remote_code=trust_remote_code,
        )
    if replace_head(network, folder, report["missing_keys"]):
        report["missing_keys"] = set()
    _check_report(folder, config, network, report, headers)
    return _text_part(folder, network)


def _random_network(
    folder: Path, config: Any, device: torch.device, dtype: torch.dtype, trust_remote_code: bool, ranks: Ranks | None
) -> Any:
    """Transformers' model, or this rank's part of it, with random weights, which are quantized if a checkpoint's would
    stay quantized. Ranks draw equal numbers, since they have the same seed and parts of equal shapes.
    """
    settings = getattr(config, "quantization_config", None) or {}
    config.quantization_config = None
    format = settings["format"] if settings.get("device") is not None else None
    is_empty = format is not None or ranks is not None
    kind, options = auto_class(config), {"dtype": dtype, "attn_implementation": NAME}
    with reading(str(folder), trust_remote_code, _explained), torch.device("meta" if is_empty else device):
        network = kind.from_config(config, **options, trust_remote_code=trust_remote_code)
    network = _text_part(folder, network)
    if not is_empty:
        return network
    from quire.engine.parallel.shard import divide_head, shard
    from quire.engine.weights.random_weights import fill

    if ranks is not None:
        shard(network, ranks, folder, torch.device("meta"))
    with reading(str(folder), trust_remote_code, _explained):
        fill(network, format, device)
    if ranks is not None:
        # `shard` leaves a head whole that shares its weight with the embedding on the meta device. Now it has memory.
        divide_head(network, ranks, device)
    return network


def _text_part(folder: Path, network: Any) -> Any:
    """The network; of a multimodal one, only the language model is left."""
    if is_multimodal(network.config):
        keep_language_model(network)
        what = f"{folder} is {_described(network.config)}: its language model runs, on text alone"
        print(f"quire: {what}", file=sys.stderr, flush=True)
    return network


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without Transformers' progress bars, and without its messages about tensors that `_check_report`
    refuses.
    """
    from transformers.utils import logging as settings

    bars = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        with without_load_report():
            yield
    finally:
        if bars:
            settings.enable_progress_bar()


def _check_kind(folder: Path, config: Any, trust_remote_code: bool) -> None:
    """Refuse a model that is not a causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    is_known, name = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or is_multimodal(config), _class_name(config)
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        if trust_remote_code:
            return
        if not is_known:
            raise ValueError(untrusted(str(folder)))
    # A class without a head may run, since some models compute logits with the weights of their embeddings.
    has_other_head = config.is_encoder_decoder or _head(name) not in (None, _head("Model"))
    if not is_known or (has_other_head and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ValueError(f"{folder} is {_described(config)}: {_CAN_RUN}")


def _class_name(config: Any) -> str:
    """The name of the class that saved a checkpoint, "" if config.json does not have it."""
    return str(next(iter(config.architectures or ()), ""))


def _head(name: str) -> str | None:
    """What a model is by the end of its class's name, None if that does not say."""
    return next((what for end, what in _HEADS.items() if re.search(f"({end})$", name)), None)


def _described(config: Any) -> str:
    """What a model is, with the name of its class."""
    parts = {"vision_config": "a vision-language model", "audio_config": "a model of audio"}
    what = next((what for part, what in parts.items() if getattr(config, part, None) is not None), None)
    if what is None and config.is_encoder_decoder:
        what = "an encoder-decoder model"
    name = _class_name(config)
    what = what or _head(name) or f"a model of type {config.model_type}"
    return f"{what} ({name})" if name else what


def _set_format(folder: Path, config: Any) -> None:
    """Replace the `quantization_config` by one with which Transformers loads the weights by a `Quantizer`, or remove it
    if only the cache is quantized. Transformers would otherwise require the package that quantized the model.
    """
    format = find_format(folder, read_json(folder / "hf_quant_config.json").get("quantization"), config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if format is not None:
        from quire.engine.weights.quantizer import settings

        config.quantization_config = settings(format)


def _read_headers(folder: Path, config: Any) -> Headers:
    """The types and shapes of the tensors in the files that Transformers will read."""
    from safetensors import safe_open

    names = [getattr(config, "transformers_weights", None), "model.safetensors", "model.safetensors.index.json"]
    file = next((folder / name for name in names if name and (folder / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder} has neither a {names[1]} nor a {names[2]}: the weights are missing")
    files, headers = [file], Headers()
    if file.name.endswith(".json"):
        files = [folder / name for name in sorted(set(read_json(file).get("weight_map", {}).values()))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which {file.name} names, is missing")
        with reading(str(path), False), safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                headers[name] = part.get_dtype(), part.get_shape()
    return headers


def _check_types(folder: Path, config: Any, headers: Headers) -> None:
    """Refuse tensors of 8 bits and less, and integer weights, which Transformers would cast without their scales. The
    format of quantized weights has checks of its own for tensors of its names.
    """
    quantized = [name for name, (kind, _) in headers.items() if kind not in _WIDE]
    quantized += [name for name, (kind, _) in headers.items() if kind in _WIDE - _FLOATS and name.endswith(".weight")]
    format = (getattr(config, "quantization_config", None) or {}).get("format")
    ends = () if format is None else tuple(name for names in format.names.values() for name in names)
    found = [name for name in quantized if not name.endswith(ends) and not _is_harmless(name, config, headers)]
    if found:
        what = f"{found[0]} is {headers[found[0]][0]}{_more(found)}"
        raise ValueError(f"{folder} has quantized weights: {what}: {_UNQUANTIZED}")


def _is_harmless(name: str, config: Any, headers: Headers) -> bool:
    """Whether the model computes the same without a tensor of its checkpoint."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    predicting = getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0
    layer = _LAYER.fullmatch(name)
    if layer is not None and layers is not None and layers <= int(layer[1]) < layers + predicting:
        return True
    is_mask = _MASK.fullmatch(name) is not None and name in headers and len(headers[name][1]) == 4
    return is_mask or _HARMLESS.fullmatch(name) is not None


def _zero_biases(folder: Path, names: Iterable[str], headers: Headers) -> set[str]:
    """Those of the tensors that are biases of zeros, which early tools of GPTQ write for each quantized layer, also for
    models without biases.
    """
    from safetensors import safe_open

    biases = {name for name in names if name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in headers}
    found = set()
    for path in folder.glob("*.safetensors") if biases else ():
        with safe_open(path, "pt") as tensors:
            found |= {name for name in biases.intersection(tensors.keys()) if not tensors.get_tensor(name).any()}
    return found


def _check_report(folder: Path, config: Any, network: Any, report: dict[str, Any], headers: Headers) -> None:
    """Refuse weights that are not those of the model, by Transformers' report of the tensors that it loaded. The report
    has the names of parameters, which may differ from the names in the files.
    """
    kind, said = type(network).__name__, _class_name(config)
    is_other = said not in ("", kind) and not re.search("CausalLM|LMHead", said)
    hint = f"; by config.json it is {_described(config)}, and {_CAN_RUN}" if is_other else ""
    unknown = [name for name in sorted(report["unexpected_keys"]) if not _is_harmless(name, config, headers)]
    zeros = _zero_biases(folder, unknown, headers)
    unknown = [name for name in unknown if name not in zeros]
    scales = [name for name in unknown if _OF_QUANTIZATION.search(name)]
    if scales:
        what = f"{kind} does not take {scales[0]}{_more(scales)}"
        raise ValueError(f"{folder} seems to be quantized: {what}, and {_UNQUANTIZED}")
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{folder} has no weights for {missing[0]} of {kind}{_more(missing)}{hint}")
    others = sorted(report["mismatched_keys"])
    if others:
        name, found, wanted = others[0]
        what = f"{name} is {list(found)}, and {list(wanted)} by config.json{_more(others)}"
        raise ValueError(f"{folder} has weights of other shapes than {kind}: {what}{hint}")
    if unknown:
        raise ValueError(f"{folder} has tensors that {kind} does not take: {unknown[0]}{_more(unknown)}{hint}")


def _explained(error: Exception) -> str | None:
    """What is wrong with a checkpoint whose loading has raised an error; None if the error does not say it."""
    # A model that has a table of attention functions of its own does not find Quire's there.
    if isinstance(error, KeyError) and error.args == (NAME,):
        return "can't be run: it does not use Transformers' attention interface"
    errors = conversion_errors(error)
    if not errors:
        return None
    # Transformers could not make these parameters of the checkpoint's tensors.
    name, text = min(errors.items())
    why = re.search(r"^\w+(Error|Exception): (.*)$", text, re.MULTILINE)
    reason = f"{name} can't be made of the checkpoint's tensors{_more(errors)}: {why[2] if why else text}"
    return f"could not be loaded: {reason}"


def _more(names: Iterable[Any]) -> str:
    count = sum(1 for _ in names) - 1
    return f" (and {count} more)" if count else ""
