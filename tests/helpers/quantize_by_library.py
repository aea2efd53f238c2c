"""A program that writes a checkpoint in a format by the format's own library, which changes Transformers or torch when
it is imported, and so has a process of its own.

    python -m helpers.quantize_by_library SOURCE TARGET FORMAT

TARGET/quantized is the checkpoint, and TARGET/dense.safetensors has the weights that the library reads in it, or else
those that it was given, by the names of parameters.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_LINEAR = re.compile(r".*_proj\.weight")
MODEL_OPT = {
    "FP8": "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_PB_WO": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
}
GPTQ_MODEL = ("gptq", "gptq_v2", "gptq act-order", "awq")
FORMATS = (*MODEL_OPT, *GPTQ_MODEL)


def is_installed(name: str) -> bool:
    """Whether the library of a format is installed. GPTQModel asks for a torch of its own, and runs with others."""
    return find_spec("modelopt" if name in MODEL_OPT else "gptqmodel") is not None


def by_model_opt(source: Path, target: Path, name: str) -> None:
    """Quantize a model by ModelOpt."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weights = {key: param.detach().float() for key, param in model.named_parameters()}
    model = mtq.quantize(model, getattr(mtq, MODEL_OPT[name]), lambda m: m(torch.arange(1, 20)[None]))
    export_hf_checkpoint(model, export_dir=target / "quantized")
    save_file(weights, target / "dense.safetensors")


def by_gptq_model(source: Path, target: Path, name: str) -> None:
    """Pack weights by the layers of GPTQModel."""
    shutil.copytree(source, target / "quantized")
    tensors: dict[str, Tensor] = {}
    dense = load_file(source / "model.safetensors")
    for key, weight in list(dense.items()):
        if _LINEAR.fullmatch(key) is None:
            tensors[key] = weight
            continue
        ends, dense[key] = _packed(weight, name)
        tensors |= {key.removesuffix("weight") + end: tensor for end, tensor in ends.items()}
    save_file(tensors, target / "quantized" / "model.safetensors", {"format": "pt"})
    save_file(dense, target / "dense.safetensors")
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    if name == "awq":
        settings |= {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    else:
        settings |= {"desc_act": name == "gptq act-order", "checkpoint_format": name.partition(" ")[0]}
    file = target / "quantized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


def _packed(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight, and the weight in float32 that the library reads in them."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False)
    order = torch.randperm(columns) if name == "gptq act-order" else torch.arange(columns)
    groups = torch.empty(columns, dtype=torch.int32)
    groups[order] = torch.arange(columns, dtype=torch.int32) // 32
    parts = weight[:, order].unflatten(1, (-1, 32))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    # The library has no clamp for codes of AWQ.
    codes = (weight / scale[:, groups]).round().add(zero[:, groups]).clamp(0, 15)
    linear.weight.data = (codes - zero[:, groups]) * scale[:, groups]
    kind = AwqTorchLinear if name == "awq" else TorchLinear
    options: dict[str, Any] = {"bits": 4, "group_size": 32, "sym": False, "desc_act": name == "gptq act-order"}
    layer = kind(in_features=columns, out_features=rows, bias=False, **options)
    layer.pack(linear, scale.half() if name == "awq" else scale, zero, g_idx=groups)
    if name == "awq":
        read = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, 32)
    else:
        layer.post_init()
        layer.scales = layer.scales.float()
        read = layer.dequantize_weight()
        if name != "gptq_v2":
            convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=4, pack_dtype=torch.int32))
    names = ("qweight", "qzeros", "scales") + (() if name == "awq" else ("g_idx",))
    tensors = {end: getattr(layer, end).contiguous().clone() for end in names}
    return tensors | {"scales": tensors["scales"].half()}, read.float().T.contiguous()


if __name__ == "__main__":
    source, target, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    (by_model_opt if name in MODEL_OPT else by_gptq_model)(source, target, name)
