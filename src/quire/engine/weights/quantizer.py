"""Reading quantized weights while Transformers loads a model: a quantizer of its interface for all formats."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.engine.weights.format import Format

_NAME = "quire"


def settings(format: Format) -> dict[str, Any]:
    """The `quantization_config` with which Transformers loads a checkpoint of a format by `Quantizer`."""
    return {"quant_method": _NAME, "format": format}


@register_quantization_config(_NAME)
class QuantizerConfig(QuantizationConfigMixin):
    """What a `Quantizer` is made of."""

    def __init__(self, format: Format, quant_method: str = _NAME) -> None:
        self.format, self.quant_method = format, quant_method


@register_quantizer(_NAME)
class Quantizer(HfQuantizer):
    """Loads weights of a format dequantized to the model's dtype."""

    requires_calibration = True

    def __init__(self, quantization_config: QuantizerConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.format = quantization_config.format
        self.serialized_names = {param: list(names) for param, names in self.format.names.items()}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """The operation that makes a parameter of the tensors that a checkpoint has for it."""
        return {"deserialize": ReadWeight, "dequantize": ReadWeight}

    def postprocess_model(self, model: Any, **options: Any) -> None:
        """Remove what says that the model is quantized, since no other code has to treat it so."""
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        """Models are not saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Models are not trained."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        size, dtype = sum(x.numel() * x.element_size() for x in model.parameters()), str(model.dtype)
        what = f"{self.format.method} weights are dequantized to {dtype.removeprefix('torch.')}"
        warnings.warn(f"{what}: {size / 1e9:.1f} GB of memory", RuntimeWarning, stacklevel=2)


class ReadWeight(ConversionOps):
    """Makes a parameter of the tensors that a checkpoint has for it or, before operations that merge several such
    parameters, each of these.
    """

    def __init__(self, hf_quantizer: Quantizer) -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *args: Any, full_layer_name: str, model: Any, **options: Any
    ) -> dict[str, Any]:
        """The parameters, by patterns of their names; those that are not quantized are cast.

        Args:
            input_dict: lists of tensors, by patterns of names. Those whose patterns differ in their last part alone are
                of the same parameters.
            full_layer_name: the name of the parameter of the model.
            model: the model.
        """
        format, dtype = self.hf_quantizer.format, model.get_parameter_or_buffer(full_layer_name).dtype
        params = {name: param for param, names in format.names.items() for name in names}
        groups: dict[str, dict[str, list[Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            stem, dot, name = pattern.rpartition(".")
            target = f"{stem}{dot}{params[name]}"
            groups.setdefault(target, {})[name] = tensors if isinstance(tensors, list) else [tensors]
        prefix = f"{full_layer_name.rpartition('.')[0]}."
        result: dict[str, Any] = {}
        for target, lists in groups.items():
            counts = {name: len(tensors) for name, tensors in lists.items()}
            if len(set(counts.values())) > 1:
                raise ValueError(f"the numbers of tensors differ: {counts}")
            each = [dict(zip(lists, tensors, strict=True)) for tensors in zip(*lists.values(), strict=True)]
            weights = [_read(format, tensors, prefix, dtype) for tensors in each]
            result[target] = weights if len(weights) > 1 else weights[0]
        return result


def _read(format: Format, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype) -> Tensor:
    """A weight that is quantized or not, in dtype. The format has checks for all that is not a plain weight."""
    (name, tensor), *others = tensors.items()
    if not others and name in format.names and tensor.dtype.is_floating_point and tensor.element_size() > 1:
        return tensor.to(dtype)
    weight = format.matrix(tensors, prefix).dequantized(dtype)
    # Transformers has the weights of GPT-OSS's experts transposed.
    return weight.mT.contiguous() if weight.ndim == 3 else weight
