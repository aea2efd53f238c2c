"""The arguments of plans and runs as records, and the handling of unsupported and of positional arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.definition.checks import as_dtype, check
from quire.definition.spec import AttentionSpec, attention_spec

Scale = float | Tensor
DType = str | torch.dtype


class LayerArgs(NamedTuple):
    """The arguments of `plan` except for its tables, as FlashInfer names them: what the layer's spec is made of, and
    what a later plan is compared with (see `layer_args`). None means the default of `AttentionSpec`.

    Attributes:
        page_size: tokens in a page, 0 for ragged rows.
        q_len: query tokens of every request, 0 if requests differ.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None = None
    page_size: int = 0
    q_len: int = 0
    q_data_type: DType = "float16"
    kv_data_type: DType | None = None
    o_data_type: DType | None = None
    causal: bool | None = True
    window_left: int | None = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    slopes: tuple[float, ...] = ()
    batch_invariant: bool = False
    latent: bool = False
    window_right: int | None = -1

    def spec(self, custom_mask: bool = False, items: bool = False) -> AttentionSpec:
        """The layer.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        settings = self._asdict()
        del settings["page_size"], settings["q_len"]
        q_dtype = as_dtype(settings.pop("q_data_type"), "q_data_type")
        for name in ("kv", "o"):
            given = settings.pop(f"{name}_data_type")
            settings[f"{name}_dtype"] = q_dtype if given is None else as_dtype(given, f"{name}_data_type")
        return attention_spec(**settings, q_dtype=q_dtype, custom_mask=custom_mask, items=items)


_layer_args = lru_cache(maxsize=1024, typed=True)(LayerArgs)


def layer_args(**fields: Any) -> LayerArgs:
    """The `LayerArgs` of these fields. Equal fields of equal types give the same object, so that one comparison tells
    whether a plan has the layer of the last plan; 8.0 and 8 differ, so that 8.0 is checked after 8, too.
    """
    try:
        return _layer_args(**fields)
    except TypeError:
        # A value without a hash cannot be looked up. The checks refuse it later.
        return LayerArgs(**fields)


class RunArgs(NamedTuple):
    """The arguments of `run` except for q, k and v.

    Attributes:
        q_scale, k_scale, v_scale: factors of the stored values; numbers, or tensors of one per head.
        window_left, logits_soft_cap, sm_scale: values that override the plan's, unless they are None.
        sinks: [num_qo_heads], a logit per head that joins the softmax's denominator.
        out, lse: where to write; None allocates.
        lse_base, lse_layout: "log2" or "ln", and "NH" for [tokens, heads] or "HN" for [heads, tokens].
        latent: q_pe, k_pe and pe_gain of `quire.kernels.call.Call`, for latent layers, whose tensors have been checked.
        spec: the layer, if it is not the planned one.
    """

    q_scale: Scale | None = None
    k_scale: Scale | None = None
    v_scale: Scale | None = None
    window_left: int | None = None
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    sinks: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    return_lse: bool = False
    lse_base: str = "log2"
    lse_layout: str = "NH"
    latent: tuple[Tensor, Tensor, float] | None = None
    spec: AttentionSpec | None = None


def refuse(**options: Any) -> None:
    """Refuse options of FlashInfer's that Quire does not have, where they are set."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported")


def takes_sink(jit_args: Any) -> bool:
    """Whether jit_args name FlashInfer's variant AttentionSink; ValueError for another variant."""
    if jit_args is None:
        return False
    variant = jit_args[11] if len(jit_args) > 11 else None
    check(variant == "AttentionSink", "jit_args", variant, "the variant AttentionSink, or none")
    return True


def product(a: Scale | None, b: Scale | None) -> Scale | None:
    """The product of two factors, either of which may be missing."""
    return b if a is None else a if b is None else a * b


def by_position(
    args: tuple[Any, ...],
    sink_by_position: bool,
    q_scale: Scale | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    sm_scale: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Scale | None, Scale | None, Scale | None, float | None, Tensor | None, bool]:
    """The arguments of a run of which `args` came by position, as `quire.wrappers.base.AttentionWrapper` defines."""
    max_given = 2 if sink_by_position else 4
    check(len(args) <= max_given, "arguments by position", len(args), f"at most {max_given} after the tensors")
    if sink_by_position:
        sinks = args[0] if args else sinks
        sm_scale = args[1] if len(args) > 1 else sm_scale
    elif args:
        q_more, k_more, v_more = (*args, None, None)[:3]
        q_scale, k_scale, v_scale = product(q_scale, q_more), product(k_scale, k_more), product(v_scale, v_more)
        return_lse = bool(args[3]) if len(args) == 4 else return_lse
    return q_scale, k_scale, v_scale, sm_scale, sinks, return_lse
