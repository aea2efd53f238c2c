"""Arguments of `quire.sampling`: rows of logits or probabilities, parameters of rows, seeds and offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.spec import FLOATS
from quire.definition.tensors import check_tensor, check_tensors, refuse_grad

INTS = (torch.int32, torch.int64)
# Half and all of the range of 64-bit integers.
_HALF, _WHOLE = 1 << 63, 1 << 64


def check_rows(x: Tensor, name: str, dims: int = 2) -> None:
    """Refuse what is not float [rows, vocab] or, with 3 dims, [rows, tokens, vocab]."""
    check_tensors(**{name: x})
    refuse_grad(**{name: x})
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}: it must be float32, bfloat16 or float16")
    check_tensor(x, name, (None,) * dims, x.dtype, x.device)
    check(x.shape[-1] > 0, f"{name}.shape", list(x.shape), "at least one token")
    check(x.shape[-1] < 1 << 30, f"{name}.shape", list(x.shape), "fewer than 2**30 tokens")


def parameter(
    value: float | Tensor | None,
    name: str,
    rows: int,
    device: torch.device,
    low: float | None = None,
    whole: bool = False,
) -> tuple[Tensor | None, float]:
    """A parameter as (tensor with one value per row, 1), or as (None, number for all rows). As in FlashInfer, a tensor
    of integers is accepted for any parameter but the temperature; it is converted to floats unless `whole`.
    """
    if isinstance(value, Tensor):
        integers = value.dtype in INTS
        kind = integers if whole else value.is_floating_point() or (integers and name != "temperature")
        check(kind, f"{name}.dtype", value.dtype, "torch.int32 or torch.int64" if whole else "a floating-point type")
        _check_per_row(value, name, rows)
        check_tensor(value, name, (None,), value.dtype, device)
        return (value if whole or not integers else value.float()).contiguous(), 1
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    check(number, name, value, f"{'an integer' if whole else 'a number'}, or a tensor with one for each row")
    check(low is None or value >= low, name, value, lambda: f"at least {low}")  # type: ignore[operator]
    finite = name != "temperature" or value != float("inf")
    check(value == value and finite, name, value, "a finite number" if not finite else "a number")
    return None, min(value, 1 << 30) if whole else float(value)  # type: ignore[arg-type, type-var, return-value]


def _check_per_row(value: Tensor, name: str, rows: int) -> None:
    """Refuse a tensor that has not one value per row. Programs and FlashInfer's tests match the text of such
    errors, so these have FlashInfer's key phrases.
    """
    if value.ndim > 1:
        raise ValueError(f"{name}: Expected a 1D tensor or scalar, a number; got a {value.ndim}D tensor")
    if value.ndim == 0:
        wanted = "a 1D tensor of shape (batch_size,) or scalar, a number"
        raise ValueError(f"{name}: Expected {wanted}; got a 0-dimensional tensor")
    if len(value) != rows:
        got = f"{name} has {len(value)} values for {rows} rows"
        raise ValueError(f"Sampling parameter tensor batch size mismatch, {got}")


def random_state(
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    generator: torch.Generator | None,
    outputs: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Seed and offset as tensors, int64 [1] or [outputs], or as numbers. Without a seed, one is drawn on the device."""
    pairs: list[tuple[Tensor | None, int]] = []
    if seed is None:
        check(offset is None, "offset", offset, "None without a seed")
        fits = generator is None or generator.device.type == device.type
        check(fits, "generator.device", None if generator is None else str(generator.device), lambda: str(device))
        seed = torch.randint(-_HALF, _HALF - 1, (1,), dtype=torch.int64, device=device, generator=generator)
    for name, value in (("seed", seed), ("offset", 0 if offset is None else offset)):
        if isinstance(value, Tensor):
            wide = value.dtype in (torch.int64, torch.uint64)
            check(wide, f"{name}.dtype", value.dtype, "torch.int64 or torch.uint64")
            check(value.ndim == 1 and len(value) in (1, outputs), f"{name}.shape", list(value.shape),
                  lambda: f"[1] or [{outputs}], one for each output")  # fmt: skip
            check_tensor(value, name, (None,), value.dtype, device)
            pairs.append((value.contiguous().view(torch.int64), 0))
        else:
            whole = isinstance(value, int) and not isinstance(value, bool) and -_HALF <= value < _WHOLE
            check(whole, name, value, "an integer from -2**63 to 2**64 - 1, or a tensor")
            pairs.append((None, (value + _HALF) % _WHOLE - _HALF))
    return pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]
