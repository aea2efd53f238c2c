"""How far a result may be from its definition in float64 when all arithmetic is in float32 and it is rounded once."""

from __future__ import annotations

import torch

from helpers.interpret import INTERPRETED


def rounding_bound(expected, dtype):
    """The largest error of each element of `expected`, float64, in its rounding to `dtype`: half the distance between
    two numbers of that dtype, also of those near 0.
    """
    limits = torch.finfo(dtype)
    # Triton's interpreter truncates what it stores as bfloat16 instead of rounding it.
    steps = 1 if INTERPRETED and dtype == torch.bfloat16 else 0.5
    return 1.001 * steps * limits.eps * (expected.abs() + limits.smallest_normal)


def check_rounded(result, expected, dtype, precision, terms=None):
    """Check that `result` is of `dtype`, and is `expected` up to float32 arithmetic and one rounding.

    `terms`, if given, are what was multiplied or added up and may cancel: `precision`, of float32 arithmetic, is
    relative to them, and else to `expected`. Errors are compared by their norms, so that arithmetic is as exact as
    `precision` says, and element by element, so that each one is rounded and not truncated.
    """
    assert result.dtype == dtype
    assert result.shape == expected.shape
    terms, rounding = expected if terms is None else terms, rounding_bound(expected, dtype)
    error = (result.cpu() - expected).abs()
    assert error.norm() <= precision * terms.norm() + rounding.norm()
    assert bool((error <= precision * terms.abs().max() + rounding).all())


def check_fp8(result, expected, scale, arithmetic=0.0):
    """Check that each element of `result`, of an fp8 dtype, is that of `expected` / `scale`, rounded once; or the
    largest finite number of that dtype, where the quotient is beyond it. `arithmetic`: the largest error of each
    element of `expected` before it is divided, besides an error of 2**-10 after it.
    """
    largest = torch.finfo(result.dtype).max
    quotient = (expected / scale).clamp(-largest, largest)
    bound = rounding_bound(quotient, result.dtype) + arithmetic / scale + 2.0**-10
    assert bool(((result.cpu().double() - quotient).abs() <= bound).all())
