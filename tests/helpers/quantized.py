"""Quantized checkpoints, written by the library of each format where it runs without a GPU, or else packed here as the
format's own tools do.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

# Tensors of a checkpoint by the ends of their names, and the weight in float32 that they stand for.
Quantized = tuple[dict[str, Tensor], Tensor]
# The weights that are quantized: linear layers of attention, of MLPs and of experts.
_LINEAR = re.compile(r".*(_proj|\.w[123])\.weight")
# Those of GPT-OSS, all of whose experts are one tensor.
_EXPERTS = re.compile(r".*experts\.(gate_up|down)_proj")


def compressed_scheme(stored: str, **weights: Any) -> QuantizationScheme:
    """A scheme of compressed-tensors for linear layers."""
    return QuantizationScheme(targets=["Linear"], weights=weights, format=stored)


SCHEMES = {
    "ct fp8 tensor": compressed_scheme("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct fp8 channel": compressed_scheme("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct fp8 block": compressed_scheme(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "ct int8 channel": compressed_scheme("int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct int4": compressed_scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    "ct int4 asymmetric": compressed_scheme(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=False
    ),
    "ct int4 channel": compressed_scheme("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "ct packed int8": compressed_scheme(
        "pack-quantized", num_bits=8, type="int", strategy="group", group_size=128, symmetric=False
    ),
    "ct mxfp4": compressed_scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
}


def compressed(name: str, weight: Tensor) -> Quantized:
    """A weight as compressed-tensors stores and reads it."""
    scheme = SCHEMES[name]
    args = scheme.weights
    assert args is not None
    rows, columns = weight.shape
    block = {"tensor": weight.shape, "channel": (1, columns), "block": (128, 128)}
    size = block.get(str(args.strategy), (1, args.group_size))
    blocks = weight.reshape(rows // size[0], size[0], columns // size[1], size[1])
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    if str(args.strategy) == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero.round().to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors = compressor.compress(state, scheme)
    return tensors, compressor.decompress(tensors, scheme)["weight"].float()


def transformers_fp8(weight: Tensor, block: list[int] | None, scale_fmt: str | None = None) -> Quantized:
    """A weight as Transformers stores and reads it in fp8."""
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantizer = SimpleNamespace(quantization_config=config)
    tensors = Fp8Quantize(quantizer).convert({"weight": weight})
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    dense = Fp8Dequantize(quantizer)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
    if block is None:
        tensors["weight_scale_inv"] = tensors["weight_scale_inv"].reshape(())
        tensors["activation_scale"] = torch.tensor(0.5)
    return tensors, dense


def partial_blocks(weight: Tensor) -> Quantized:
    """A weight in blocks of 128 x 128, of which the last ones have fewer rows and columns."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale, dense, codes = torch.empty(rows, columns), torch.empty_like(weight), weight.to(torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scale[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scale[i, j]
    return {"weight": codes, "weight_scale_inv": scale}, dense


def model_opt(weight: Tensor, algorithm: str) -> Quantized:
    """A weight as ModelOpt stores it in fp8."""
    if algorithm == "FP8_PB_WO":
        tensors, dense = partial_blocks(weight)
        return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"][:, None, :, None]}, dense
    scale = weight.abs().amax(1) / 448 if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else weight.abs().max() / 448
    codes = (weight / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    return tensors, codes.float() * scale.reshape(-1, 1)


def integers(weight: Tensor, bits: int, size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int64 [rows, columns] from 0, scales [rows, groups] in float16, and zero points int64 [rows, groups]."""
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    middle, largest = 2 ** (bits - 1), 2**bits - 1
    scale = torch.maximum(-low, high) / (middle - 1) if symmetric else (high - low) / largest
    scale = scale.half().float()
    zero = torch.full_like(scale, middle) if symmetric else (-low / scale).round().clamp(0, largest)
    codes = (groups / scale[..., None]).round().add(zero[..., None]).clamp(0, largest)
    return codes.flatten(1).long(), scale, zero.long()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of the last dimension in words of 32 bits, the first of them in the lowest bits."""
    parts = codes.unflatten(-1, (-1, 32 // bits))
    return sum(parts[..., i] << (bits * i) for i in range(32 // bits)).to(torch.uint32).view(torch.int32)


def awq(weight: Tensor) -> Quantized:
    """A weight as AWQ's "gemm" kernels have it, in groups of 64 columns."""
    codes, scale, zero = integers(weight, 4, 64, symmetric=False)
    dense = (codes - zero.repeat_interleave(64, 1)) * scale.repeat_interleave(64, 1)
    # Of eight rows, this one is in each place of a word.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words, zeros = (pack(x.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for x in (codes, zero))
    return {"qweight": words, "qzeros": zeros, "scales": scale.T.half().contiguous()}, dense.float()


def gptq(weight: Tensor, bits: int = 4, symmetric: bool = True, act_order: bool = False, v2: bool = False) -> Quantized:
    """A weight as GPTQ stores it, in groups of 32 columns."""
    columns = weight.shape[1]
    order = torch.randperm(columns) if act_order else torch.arange(columns)
    codes, scale, zero = integers(weight[:, order], bits, 32, symmetric)
    dense, groups = torch.empty_like(weight), torch.empty(columns, dtype=torch.int32)
    dense[:, order] = ((codes - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)).float()
    groups[order] = torch.arange(columns, dtype=torch.int32) // 32
    stored = torch.empty_like(codes)
    stored[:, order] = codes
    zeros = pack(zero.T, bits)
    if not v2:
        # GPTQModel subtracts from whole words, so that a zero point of 0 borrows from the next one.
        zeros = zeros - {4: 0x11111111, 8: 0x01010101}[bits]
    words = pack(stored, bits).T.contiguous()
    return {"qweight": words, "qzeros": zeros, "scales": scale.T.half().contiguous(), "g_idx": groups}, dense


def compressed_in_order(weight: Tensor) -> Quantized:
    """A weight as compressed-tensors stores it if columns are grouped by their importance, which is random here."""
    order = torch.randperm(weight.shape[1])
    places = order.argsort()
    tensors, dense = compressed("ct int4", weight[:, order].contiguous())
    codes = unpack_from_int32(tensors["weight_packed"], 4, weight.shape)[:, places].contiguous()
    groups = (places // 32).int()
    return {**tensors, "weight_packed": pack_to_int32(codes, 4), "weight_g_idx": groups}, dense[:, places].contiguous()


def auto_fp8(weight: Tensor) -> Quantized:
    """A weight as AutoFP8 stores it: one scale, and one of activations."""
    tensors, dense = transformers_fp8(weight, None)
    return {
        "weight": tensors["weight"],
        "weight_scale": tensors["weight_scale_inv"],
        "input_scale": torch.tensor(0.5),
    }, dense


def mxfp4_experts(weight: Tensor) -> Quantized:
    """Weights [experts, in_features, out_features] as GPT-OSS stores them."""
    blocks, exponents, dense = [], [], []
    for expert in weight:
        tensors, read = compressed("ct mxfp4", expert.T.contiguous())
        blocks.append(tensors["weight_packed"].unflatten(1, (-1, 16)))
        exponents.append(tensors["weight_scale"])
        dense.append(read.T)
    return {"_blocks": torch.stack(blocks), "_scales": torch.stack(exponents)}, torch.stack(dense)


def _config(name: str) -> dict[str, Any]:
    return QuantizationConfig(config_groups={"group_0": SCHEMES[name]}, format=SCHEMES[name].format).model_dump(
        mode="json"
    )


def _config_in_order(name: str) -> dict[str, Any]:
    """The configuration of columns that are grouped by their importance, which new versions of the library refuse."""
    config = _config(name)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return config


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
# Of each format, `quantization_config` and a function that quantizes a weight.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    **{name: (_config(name), lambda x, name=name: compressed(name, x)) for name in SCHEMES},
    "fp8 block": (_FP8 | {"weight_block_size": [128, 128]}, lambda x: transformers_fp8(x, [128, 128])),
    "fp8 block ue8m0": (
        _FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        lambda x: transformers_fp8(x, [128, 128], "ue8m0"),
    ),
    "fp8 partial blocks": (_FP8 | {"weight_block_size": [128, 128]}, partial_blocks),
    "fp8 tensor": (_FP8 | {"activation_scheme": "static"}, lambda x: transformers_fp8(x, None)),
    "fp8 of AutoFP8": (_FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}, auto_fp8),
    "ct int4 act-order": (_config_in_order("ct int4"), compressed_in_order),
    **{
        f"modelopt {name}": ({"quant_method": "modelopt", "quant_algo": name}, lambda x, name=name: model_opt(x, name))
        for name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    },
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (_GPTQ, gptq),
    "gptq asymmetric": (_GPTQ | {"sym": False}, lambda x: gptq(x, symmetric=False)),
    "gptq act-order": (_GPTQ | {"desc_act": True}, lambda x: gptq(x, act_order=True)),
    "gptq v2": (_GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, lambda x: gptq(x, symmetric=False, v2=True)),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, mxfp4_experts),
    "gptq 8 bits": (_GPTQ | {"bits": 8, "sym": False}, lambda x: gptq(x, 8, symmetric=False)),
}


def quantize(source: Path, target: Path, name: str) -> tuple[Path, Path]:
    """Write the checkpoint `source` in a format, and with the weights that the format's tensors stand for.

    Returns:
        both folders, within `target`.
    """
    settings, quantized = FORMATS[name]
    folder, dense = target / "quantized", target / "dense"
    shutil.copytree(source, folder)
    shutil.copytree(source, dense)
    tensors: dict[str, Tensor] = {}
    weights = load_file(source / "model.safetensors")
    for key, weight in list(weights.items()):
        if (_EXPERTS if name == "mxfp4" else _LINEAR).fullmatch(key) is None:
            tensors[key] = weight
            continue
        ends, weights[key] = quantized(weight)
        tensors |= {f"{key.removesuffix('weight')}{end}": tensor for end, tensor in ends.items()}
    write(folder, tensors, settings)
    write(dense, weights)
    return folder, dense


def write(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None = None) -> None:
    """Replace the tensors of a checkpoint, and its `quantization_config`."""
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    if settings is not None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
