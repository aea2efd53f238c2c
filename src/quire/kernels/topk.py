"""The largest elements of short rows, such as the experts that a router chooses: torch on the CPU, Triton on a GPU, and
torch where rows are long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.spec import FLOATS
from quire.kernels.ops import on_triton

# The most elements of a row, which one program holds in registers.
_MAX_ELEMENTS = 1024
# The most elements that a program chooses, as it finds them one after another.
_MAX_K = 32


@torch.library.custom_op("quire::topk", mutates_args=())
def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` along the last dimension.

    Args:
        x: [..., size], of any dtype that torch's takes.
        k: the number of elements to choose, at most size.

    Returns:
        values, of the dtype of x, and indices, int64: [..., k], the largest first, NaN counting as the largest. Of
        equal elements any may be chosen.

    Raises:
        RuntimeError: k is larger than size.
    """
    short = x.ndim > 0 and 0 < k <= min(_MAX_K, x.shape[-1]) and x.numel() > 0 and x.shape[-1] <= _MAX_ELEMENTS
    if not (on_triton(x.device) and short and x.dtype in FLOATS):
        values, indices = x.topk(k)
        return values, indices
    from quire.kernels.triton.topk import topk as topk_on_gpu

    values, indices = _largest(x, k)
    topk_on_gpu(x.reshape(-1, x.shape[-1]), values, indices)
    return values, indices


@topk.register_fake
def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = x.new_empty(*x.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)
