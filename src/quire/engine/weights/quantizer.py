"""Reading quantized weights while Transformers loads a model: a quantizer of its interface for all formats."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.engine import moe
from quire.engine.transformers_internals import conversions_of_parts
from quire.engine.weights.format import OF_ACTIVATIONS, Format
from quire.engine.weights.layouts import Matrix
from quire.engine.weights.modules import (
    QuantizedWeight,
    can_join,
    can_multiply,
    can_stack,
    joined,
    replace_parameters,
    stacked,
)

_NAME = "quire"
# Operations that merge the experts of checkpoints to parameters [experts, out_features, in_features].
_MERGE, _JOIN = (MergeModulelist, 0), (Concatenate, 1)
# Models whose quantized checkpoints have a tensor for each expert. Transformers converts only checkpoints that have one
# tensor for all experts.
_EXPERTS_APART = {"qwen3_vl_moe"}


def settings(format: Format, device: torch.device | None = None) -> dict[str, Any]:
    """The `quantization_config` with which Transformers loads a checkpoint of a format by `Quantizer`.

    Args:
        format: of the weights.
        device: where weights are kept quantized; None: they are dequantized.
    """
    return {"quant_method": _NAME, "format": format, "device": device}


@register_quantization_config(_NAME)
class QuantizerConfig(QuantizationConfigMixin):
    """What a `Quantizer` is made of."""

    def __init__(self, format: Format, device: torch.device | None = None, quant_method: str = _NAME) -> None:
        self.format, self.device = format, device
        self.quant_method = quant_method


@register_quantizer(_NAME)
class Quantizer(HfQuantizer):
    """Loads weights of a format: those of linear layers and experts as they are, if there is a device to keep them on,
    and all others dequantized to the model's dtype.
    """

    requires_calibration = True

    def __init__(self, quantization_config: QuantizerConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.format, self.device = quantization_config.format, quantization_config.device
        # Why weights that should be kept are dequantized, by their names.
        self.dequantized: dict[str, str] = {}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The conversions of a model's weights. Where several are merged, `ReadWeight` does it, which can merge
        weights that stay quantized.
        """
        if getattr(model.config, "model_type", None) in _EXPERTS_APART:
            weight_conversions = [*weight_conversions, *get_checkpoint_conversion_mapping("qwen2_moe")]
        return conversions_of_parts(weight_conversions, self.format.names, lambda merging: ReadWeight(self, merging))

    def postprocess_model(self, model: Any, **options: Any) -> None:
        """Remove what says that the model is quantized, since no other code has to treat it so."""
        self.remove_quantization_config(model)
        replace_parameters(model)
        if self.dequantized:
            name, why = next(iter(self.dequantized.items()))
            more = f" (and {len(self.dequantized) - 1} more)" if len(self.dequantized) > 1 else ""
            what = f"{name}{more} is dequantized to {_name_of(model.dtype)}: {why}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def is_serializable(self) -> bool:
        """Models are not saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Models are not trained."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        if self.device is None:
            size = sum(x.numel() * x.element_size() for x in model.parameters())
            what = f"{self.format.method} weights are dequantized to {_name_of(model.dtype)}"
            warnings.warn(f"{what}: {size / 1e9:.1f} GB of memory", RuntimeWarning, stacklevel=2)


class ReadWeight(ConversionOps):
    """Makes a parameter of the tensors that a checkpoint has for it or, where several such parameters are merged, for
    each of these.

    Args:
        hf_quantizer: has the format, and the device of weights that stay quantized.
        merging: the operations that merge parameters.
    """

    def __init__(self, hf_quantizer: Quantizer, merging: Sequence[ConversionOps] = ()) -> None:
        self.hf_quantizer, self.merging = hf_quantizer, list(merging)

    def __deepcopy__(self, memo: Any) -> ReadWeight:
        return self

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
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        sources, (target, *_) = options["source_patterns"], options["target_patterns"]
        input_dict = {name: input_dict[name] for name in sorted(input_dict, key=sources.index)}
        weights = self._read(input_dict, f"{full_layer_name.rpartition('.')[0]}.", dtype)
        device = self.hf_quantizer.device
        if device is not None and any(isinstance(w, Matrix) for parts in weights.values() for w in parts):
            found = keep(list(weights.values()), full_layer_name, model, self.merging)
            if isinstance(found, nn.Parameter):
                return {target: found}
            self.hf_quantizer.dequantized[full_layer_name] = found
        result: dict[str, Any] = {}
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        for pattern, parts in weights.items():
            dense = [self._dequantized(w, dtype, module) if isinstance(w, Matrix) else w for w in parts]
            result[pattern if self.merging else target] = dense if len(dense) > 1 else dense[0]
        for operation in self.merging:
            result = operation.convert(result, *args, full_layer_name=full_layer_name, model=model, **options)
        return result

    def _read(self, input_dict: dict[str, Any], prefix: str, dtype: torch.dtype) -> dict[str, list[Matrix | Tensor]]:
        """The weights that are merged, by patterns of names, in the order of these."""
        params = {name: param for param, names in self.hf_quantizer.format.names.items() for name in names}
        groups: dict[str, dict[str, list[Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            stem, dot, name = pattern.removesuffix("$").rpartition(".")
            if name.endswith(OF_ACTIVATIONS):
                # Some experts may have none.
                continue
            weight = f"{stem}{dot}{params[name]}$"
            groups.setdefault(weight, {})[name] = tensors if isinstance(tensors, list) else [tensors]
        result: dict[str, list[Matrix | Tensor]] = {}
        for weight, lists in groups.items():
            counts = {name: len(tensors) for name, tensors in lists.items()}
            if len(set(counts.values())) > 1:
                raise ValueError(f"the numbers of tensors differ: {counts}")
            each = [dict(zip(lists, tensors, strict=True)) for tensors in zip(*lists.values(), strict=True)]
            result[weight] = [self._read_one(tensors, prefix, dtype) for tensors in each]
        return result

    def _read_one(self, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype) -> Matrix | Tensor:
        """A weight, which is quantized or not. The format checks all but unquantized weights."""
        (name, tensor), *others = tensors.items()
        format, device = self.hf_quantizer.format, self.hf_quantizer.device
        if not others and name in format.names and tensor.dtype.is_floating_point and tensor.element_size() > 1:
            return tensor.to(dtype)
        if device is not None:
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return format.matrix(tensors, prefix)

    def _dequantized(self, matrix: Matrix, dtype: torch.dtype, module: nn.Module) -> Tensor:
        """The weight of a module, which is transposed in GPT-OSS's experts and in GPT-2's layers."""
        is_conv = isinstance(module, Conv1D)
        format = self.hf_quantizer.format
        if is_conv and not any("qweight" in names for names in format.names.values()):
            raise ValueError(f"weights of Conv1D are supported in the formats awq and gptq, not in {format.method}")
        is_transposed = is_conv or (matrix.codes.ndim == 3 and getattr(module, "is_transposed", False))
        weight = matrix.dequantized(dtype)
        return weight.mT.contiguous() if is_transposed else weight


def keep(
    weights: Sequence[Sequence[Matrix | Tensor]], name: str, model: nn.Module, merging: Sequence[ConversionOps]
) -> nn.Parameter | str:
    """A parameter that `replace_parameters` replaces by a quantized weight, or else why it can't stay quantized.

    Args:
        weights: what is merged to the parameter: lists of the weights of all experts, or one list of one weight.
        name: of the parameter.
        model: whose parameter it is.
        merging: the operations that merge it.
    """
    parent, _, last = name.rpartition(".")
    module, param = model.get_submodule(parent), model.get_parameter(name)
    matrices = [w for parts in weights for w in parts if isinstance(w, Matrix)]
    if len(matrices) < sum(map(len, weights)):
        return "some of the tensors that are merged to it are not quantized"
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if name in tied or name in tied.values():
        return "config.json ties it to another parameter"
    if not all(map(can_multiply, matrices)):
        return f"there is no kernel for {matrices[0].kind} in blocks of {matrices[0].block}"
    is_linear = last == "weight" and type(module).forward is nn.Linear.forward
    if not is_linear and not (moe.is_experts(module) and last in moe.PROJECTIONS):
        return f"it is not a weight of a linear layer or of experts, but of {type(module).__name__}"
    parts = [[QuantizedWeight.of(w, param.dtype) for w in each if isinstance(w, Matrix)] for each in weights]
    weight = _merged(parts, [(type(operation), getattr(operation, "dim", None)) for operation in merging])
    if weight is None:
        return "the tensors that are merged to it can't be merged as they are stored"
    shape = (*weight.codes.shape[:1], weight.rows, weight.columns) if not is_linear else (weight.rows, weight.columns)
    placeholder = torch.empty(shape, dtype=param.dtype, device="meta")
    if getattr(module, "is_transposed", False):
        placeholder = placeholder.mT
    kept = nn.Parameter(placeholder, requires_grad=False)
    kept.quire_weight = weight  # type: ignore[attr-defined]
    return kept


def _merged(parts: Sequence[Sequence[QuantizedWeight]], merging: list[Any]) -> QuantizedWeight | None:
    """The weight that operations merge of others; None if these can't be merged without dequantizing them.

    Args:
        parts: lists of the weights of all experts, or of one weight.
        merging: the classes of the operations, and their dimensions.
    """
    if merging[:1] == [_MERGE]:
        merging = merging[1:]
        if not all(map(can_stack, parts)):
            return None
        whole = [stacked(each) for each in parts]
        last = [_JOIN]
    else:
        whole, last = [each[0] for each in parts], [(Concatenate, 0)]
    if not merging:
        return whole[0] if len(whole) == 1 else None
    return joined(whole) if merging == last and can_join(whole) else None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
