"""Gated activations, also with fp8 outputs.

Names, parameters and meanings are those of `flashinfer.activation`. The functions with fp8 outputs are Quire's own, and
have the parameters of `quire.norm.rmsnorm_quant`. All arithmetic is in float32, and results are rounded once.
"""

from __future__ import annotations

from torch import Tensor

from quire.definition.tensors import as_divisor, check_floats, check_tensors, float_output, refuse_grad
from quire.kernels.activation import act_and_mul

__all__ = [
    "gelu_and_mul",
    "gelu_and_mul_quant",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_quant",
    "silu_and_mul",
    "silu_and_mul_quant",
]


def _act(
    kind: str, input: Tensor, out: Tensor | None, scale: float | Tensor | None = None, fp8: bool = False
) -> Tensor:
    """Check the arguments and compute into `out`, which is allocated if it is None and not of `fp8`."""
    refuse_grad(input=input, out=out)
    check_tensors(input=input)
    if not input.ndim or input.shape[-1] % 2 or not input.shape[-1]:
        raise ValueError(f"input has shape {list(input.shape)}: the last dimension must be 2 * dim, dim at least 1")
    check_floats(input, "input", tuple(input.shape))
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    divisor, factor = as_divisor(scale, "scale", input.device)
    out = float_output(out, "out", shape, input, fp8)
    x, y = input, out
    if input.ndim != 2:
        x = input.reshape(-1, input.shape[-1])
        try:
            y = out.view(-1, shape[-1])
        except RuntimeError:
            raise ValueError(f"out has strides {list(out.stride())}: its rows must be equally far apart") from None
    act_and_mul(y, x, divisor, factor, kind)
    return out


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """``silu(input[..., :dim]) * input[..., dim:]``, where silu(x) is x / (1 + exp(-x)).

    Args:
        input: [..., 2 * dim], float16, bfloat16 or float32, any strides with the last one 1.
        out: where to write, [..., dim] of the input's dtype, rows equally far apart; None: a new tensor.
        enable_pdl: accepted, without effect.

    Returns:
        `out`.

    Raises:
        ValueError: an argument that does not fit; in grad mode, an input or output that requires grad.
    """
    return _act("silu", input, out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """``gelu(input[..., :dim]) * input[..., dim:]``, where gelu(x) is x / 2 * (1 + erf(x / sqrt(2))); as
    `silu_and_mul`.
    """
    return _act("gelu", input, out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """``gelu(input[..., :dim]) * input[..., dim:]``, where gelu(x) is approximated by
    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))); as `silu_and_mul`.
    """
    return _act("gelu_tanh", input, out)


def silu_and_mul_quant(
    out: Tensor, input: Tensor, scale: float | Tensor | None, enable_pdl: bool | None = None
) -> None:
    """`silu_and_mul` divided by a scale, as fp8.

    Args:
        out: where to write, torch.float8_e4m3fn or float8_e5m2 [..., dim], rows equally far apart. Values beyond the
            range of fp8 become its largest finite value.
        scale: a positive number, or a tensor with one element on the input's device, never read by the host; None: 1.
        input, enable_pdl: as in `silu_and_mul`.

    Raises:
        ValueError: as in `silu_and_mul`.
    """
    _act("silu", input, out, scale, fp8=True)


def gelu_and_mul_quant(
    out: Tensor, input: Tensor, scale: float | Tensor | None, enable_pdl: bool | None = None
) -> None:
    """`gelu_and_mul` divided by a scale, as fp8; arguments as in `silu_and_mul_quant`."""
    _act("gelu", input, out, scale, fp8=True)


def gelu_tanh_and_mul_quant(
    out: Tensor, input: Tensor, scale: float | Tensor | None, enable_pdl: bool | None = None
) -> None:
    """`gelu_tanh_and_mul` divided by a scale, as fp8; arguments as in `silu_and_mul_quant`."""
    _act("gelu_tanh", input, out, scale, fp8=True)
