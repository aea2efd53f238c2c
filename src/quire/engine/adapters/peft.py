"""Reading an adapter in PEFT's format: the factors of a LoRA, by the modules that they change."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.adapters.settings import PeftSettings, read_settings
from quire.engine.adapters.targets import Names, Target
from quire.engine.reading import reading

_SAFETENSORS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(?P<weight>\.weight)?")
# PEFT writes the tensors of the embedding and of the head beside their factors, or after resizing the vocabulary.
_BASE_TENSOR = re.compile(r"(?P<module>.+?)(\.base_layer)?\.(?P<tensor>weight|bias)")
# Tensors of other methods than LoRA, by the ends of their names.
_OTHER_METHODS = {
    r"lora_magnitude_vector(\.weight)?": "magnitudes of DoRA",
    r"lora_(embedding_)?B\.bias": "a bias of a factor (lora_bias)",
    r"modules_to_save\..*": "a module that was trained whole (modules_to_save)",
    r"(trainable_tokens_delta|token_adapter)(\..*)?": "trained rows of an embedding (trainable_token_indices)",
    r"bias": "a trained bias of the base",
}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Threads that copy, check and hash tensors.
_READERS = min(8, os.cpu_count() or 1)
# torch computes operations on more elements in several threads. While an engine is busy, waiting for these threads
# takes much longer than the operation.
_ELEMENTS = 1 << 15
# Rows of a weight of the base that are compared at a time.
_ROWS = 4096

Factors = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class AdapterTensors:
    """The factors of an adapter: a module's output y becomes y + (x A^T) B^T; that of an embedding, y + A[:, id] B^T.

    Attributes:
        rank: the largest of its modules.
        factors: A [rank, in_features] and B [out_features, rank] of each adapted module, by its path in the network, on
            the CPU; the scale is in B.
        digest: 64 hexadecimal digits. Adapters of equal tensors and scales have equal ones, whatever their names and
            folders, and others do not.
        base_model_name: what the adapter calls the model that it was trained on, "" if nothing.
    """

    rank: int
    factors: Factors
    digest: str
    base_model_name: str


@dataclass
class _Pair:
    """The two factors of a module, in the file.

    Attributes:
        path: of the module in the network.
        module: its name in the adapter.
        names: of the tensors in the file, by "A" and "B".
    """

    path: str
    module: str
    names: dict[str, str]


def read_adapter(
    folder: Path, targets: Mapping[str, Target], dtype: torch.dtype | None = None, removed: Collection[str] = ()
) -> AdapterTensors:
    """Read a LoRA in PEFT's format. Nothing of the result depends on what happens to the folder afterwards.

    Args:
        folder: has adapter_config.json, and adapter_model.safetensors or adapter_model.bin.
        targets: the modules that may be adapted (`adapter_targets`).
        dtype: of the factors; None: the file's for A, float32 for B.
        removed: paths of the parts of the network that were removed (`removed_parts`), for messages.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is broken, the adapter is of another method than LoRA or does not fit the model, or a number
            is not finite, in the file or in `dtype`.
    """
    settings = read_settings(folder)
    file, tensors = _open(folder)
    try:
        pairs = _pairs(tensors, targets, Names(targets, removed))
        for pair in pairs:
            _check_shapes(tensors, pair, targets[pair.path], settings.rank_of(pair.module))
        with ThreadPoolExecutor(_READERS) as pool:
            done = list(pool.map(partial(_read, settings, targets, tensors, dtype), pairs))
    except ValueError as error:
        raise ValueError(f"{folder} can't be used as an adapter: {error} ({file})") from error
    text = "\n".join(f"{pair.path} {key}" for pair, (_, _, key) in zip(pairs, done, strict=True))
    return AdapterTensors(
        rank=max(len(a) for a, _, _ in done),
        factors={pair.path: (a, b) for pair, (a, b, _) in zip(pairs, done, strict=True)},
        digest=hashlib.sha256(text.encode()).hexdigest(),
        base_model_name=settings.base_model_name,
    )


def _open(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The name of the file with an adapter's tensors, and the tensors by their names. Those of a safetensors file are
    mapped, and not read yet.
    """
    name = next((name for name in (_SAFETENSORS, _PICKLE) if (folder / name).is_file()), None)
    if name is None:
        raise FileNotFoundError(f"{folder} has neither an {_SAFETENSORS} nor an {_PICKLE}: the factors are missing")
    path = folder / name
    with reading(str(path), False):
        if name == _SAFETENSORS:
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                return name, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ValueError(f"{path} could not be loaded: it is not a dictionary of tensors")
    for key, tensor in loaded.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            what = f"{str(tensor.layout).removeprefix('torch.')} on the device {tensor.device.type}"
            raise ValueError(f"{path} can't be used as an adapter: {key} is {what}: it must be strided, on the CPU")
    return name, {str(key): tensor.resolve_neg() for key, tensor in loaded.items()}


def _pairs(tensors: Mapping[str, Tensor], targets: Mapping[str, Target], names: Names) -> list[_Pair]:
    """The factors of each module, in the order of the modules' paths.

    Raises:
        ValueError: a tensor is no factor, its module is none of the targets or one of another kind, or a factor is
            missing.
    """
    pairs: dict[str, _Pair] = {}
    for name in sorted(tensors):
        found = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if not name.startswith(_PREFIX) or found is None or bool(found["embedding"]) == bool(found["weight"]):
            _check_base_tensor(name, tensors[name], targets, names)
            continue
        path = _find(name, found["module"], names)
        if (targets[path].kind == "embedding") != bool(found["embedding"]):
            kinds = ("an embedding", "a linear layer")
            of, other = kinds if found["embedding"] else kinds[::-1]
            raise ValueError(f"{name} is a factor of {of}, and {path} is {other}")
        pair = pairs.setdefault(path, _Pair(path=path, module=found["module"], names={}))
        if pair.module != found["module"]:
            raise ValueError(f"{pair.module} and {found['module']} are both of {path}")
        pair.names[found["factor"]] = name
    for pair in pairs.values():
        missing = {"A", "B"} - pair.names.keys()
        if missing:
            raise ValueError(f"{next(iter(pair.names.values()))} has no factor {missing.pop()} beside it")
    if not pairs:
        raise ValueError("it has no factors")
    return [pairs[path] for path in sorted(pairs)]


def _find(name: str, module: str, names: Names) -> str:
    """The path in the network of the module that tensor `name` belongs to; ValueError if there is none."""
    path, part = names.find(module), names.removed(module)
    if path is None and part is not None:
        raise ValueError(f"{name} is of {part}, which does not run: only the language model does, on text alone")
    if path is None:
        raise ValueError(f"{name} is of {module}, and the base has no linear layer or embedding of that name")
    return path


def _check_base_tensor(name: str, tensor: Tensor, targets: Mapping[str, Target], names: Names) -> None:
    """Raise a ValueError for a tensor that is no factor, unless it is the base's own weight or bias of the embedding or
    head, which PEFT writes beside their factors.
    """
    short = name.removeprefix(_PREFIX)
    found = _BASE_TENSOR.fullmatch(short)
    path = names.find(found["module"]) if found is not None and name.startswith(_PREFIX) else None
    target = None if path is None or targets[path].kind == "linear" else targets[path]
    is_bias = found is not None and found["tensor"] == "bias"
    if target is None or (is_bias and target.bias is None):
        for pattern, what in _OTHER_METHODS.items():
            if re.fullmatch(rf"(.*\.)?{pattern}", short):
                raise ValueError(f"{name} is {what}, which is not supported")
        raise ValueError(f"{name} is not known: it is no factor of a LoRA")
    base = target.bias if is_bias else target.weight
    if base is None:
        raise ValueError(f"{name} can't be compared with the base's weight, which is quantized")
    shape = (target.out_features,) if is_bias else target.weight_shape
    if tuple(tensor.shape) != shape:
        what = "the vocabulary was resized" if tensor.shape[1:] == base.shape[1:] else "it is of another base"
        raise ValueError(f"{name} is {list(tensor.shape)}, and {list(shape)} in the base: {what}")
    # Rank 0 reads adapters. Of a head that several ranks divide, it has the first rows.
    if not _is_same(tensor[: len(base)], base):
        what = "bias" if is_bias else "weight"
        raise ValueError(f"{name} differs from the base's {what}: it was trained, or is of another base")


@torch.inference_mode()
def _is_same(saved: Tensor, base: Tensor) -> bool:
    """Whether two weights of a base are the same, but for the rounding of their dtypes."""
    dtypes = {saved.dtype, base.dtype}
    tolerance = 0.0 if len(dtypes) == 1 else max(torch.finfo(dtype).eps for dtype in dtypes)
    least = 0.0 if len(dtypes) == 1 else max(torch.finfo(dtype).tiny for dtype in dtypes)
    for start in range(0, len(base), _ROWS):
        rows = base[start : start + _ROWS].float()
        others = saved[start : start + _ROWS].to(rows.device).float()
        if not torch.allclose(others, rows, rtol=tolerance, atol=least):
            return False
    return True


def _check_shapes(tensors: Mapping[str, Tensor], pair: _Pair, target: Target, rank: int) -> None:
    """Raise a ValueError if a factor's shape does not fit its module and the rank, or its dtype is not supported."""
    a, b = pair.names["A"], pair.names["B"]
    expected = {a: (rank, target.in_features), b: (target.out_features, rank)}
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            what = f"and {list(shape)} by {pair.path} of the base and the rank {rank} of adapter_config.json"
            raise ValueError(f"{name} is {list(tensor.shape)}, {what}")
        if tensor.dtype not in _DTYPES:
            allowed = ", ".join(_named(dtype) for dtype in _DTYPES)
            raise ValueError(f"{name} is {_named(tensor.dtype)}: it must be one of {allowed}")


def _read(
    settings: PeftSettings,
    targets: Mapping[str, Target],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    pair: _Pair,
) -> tuple[Tensor, Tensor, str]:
    """The factors A and B of a module, and a text that identifies the saved factors and their scale."""
    scale = settings.scale_of(pair.module) * targets[pair.path].output_scale
    names = pair.names
    factors, texts = {}, [scale.hex()]
    for name in ("A", "B"):
        # The file is mapped and may be overwritten at any time, so the copy is what is checked and hashed.
        copied = tensors[names[name]].contiguous().view(torch.uint8).numpy().copy()
        saved = torch.from_numpy(copied).view(tensors[names[name]].dtype)
        texts.append(f"{_named(saved.dtype)} {list(saved.shape)} {hashlib.sha256(copied.data.cast('B')).hexdigest()}")
        factors[name] = saved
    a, b = (
        _scaled(factors["A"], 1.0, dtype or factors["A"].dtype),
        _scaled(factors["B"], scale, dtype or torch.float32),
    )
    if not (_is_finite(a) and _is_finite(b)):
        _raise_where_not_finite(names["A"], factors["A"])
        _raise_where_not_finite(names["B"], factors["B"])
        _raise_where_not_finite(f"{names['A']} in {_named(a.dtype)}", a)
        _raise_where_not_finite(f"{names['B']} times its scale, {scale}, in {_named(b.dtype)}", b)
    return a, b, " ".join(texts)


def _scaled(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor times a scale, computed in float32; the tensor itself if neither values nor dtype change."""
    if scale == 1.0 and x.dtype == dtype:
        return x
    result = torch.empty(x.shape, dtype=dtype)
    for part, scaled in zip(x.flatten().split(_ELEMENTS), result.flatten().split(_ELEMENTS), strict=True):
        scaled.copy_(part.float() * scale)
    return result


def _is_finite(x: Tensor) -> bool:
    """Whether no element of a contiguous tensor is NaN or infinite."""
    size = x.dtype.itemsize
    signed = x.view(torch.uint8).numpy().view(f"i{size}")
    unsigned = signed.view(f"u{size}")
    infinity = torch.tensor([inf, -inf], dtype=x.dtype).view(torch.uint8).numpy().view(unsigned.dtype)
    # Read as integers, infinity and NaN are larger than all finite numbers of their sign: as signed integers for
    # positive numbers, as unsigned ones for negative numbers.
    return int(signed.max()) < int(infinity[0]) and int(unsigned.max()) < int(infinity[1])


def _raise_where_not_finite(name: str, x: Tensor) -> None:
    wrong = (~x.isfinite()).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        raise ValueError(f"{name} is {x[tuple(at)].item()} at {at}: all elements must be finite")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
