"""Products of rows and the matrices of their experts, in a mixture of experts, or of their segments: torch on the CPU,
Triton on a GPU, and torch where an expert has many rows on a GPU for which it has a grouped product.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.ops import on_triton, operation

# With more rows per expert than this, on average, torch multiplies if it can.
_MANY = 64


@torch.library.custom_op("quire::group_by_expert", mutates_args=())
def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows by their experts, without changing the order of an expert's rows.

    Args:
        experts: integers [rows], the expert of each row, from 0 to num_experts - 1.

    Returns:
        order int32 [rows]: the row at each place of the sorted order.
        position int32 [rows]: the place of each row, so that order[position[i]] is i.
        ends int32 [num_experts]: the end of each expert's places, where those of the next one begin.
    """
    if not on_triton(experts.device):
        order = experts.argsort(stable=True)
        ends = experts.bincount(minlength=num_experts).cumsum(0)
        return order.int(), order.argsort().int(), ends.int()
    from quire.kernels.triton.grouped_gemm import sort_by_group

    order, position, ends = _groups(experts, num_experts)
    sort_by_group(experts, order, position, ends)
    return order, position, ends


@group_by_expert.register_fake
def _groups(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    # A traced len(experts) would become a constant.
    order = torch.empty_like(experts, dtype=torch.int32)
    return order, torch.empty_like(order), experts.new_empty(num_experts, dtype=torch.int32)


@torch.library.custom_op("quire::grouped_gemm", mutates_args=())
def grouped_gemm(x: Tensor, order: Tensor | None, ends: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """`torch.nn.functional.linear` of each row and the matrix of its expert, rows being sorted by expert.

    Args:
        x: float16, bfloat16 or float32 [tokens, in_features]. With `order`, each token has as many rows, one after
            another, as it has experts; without, x has the sorted rows themselves.
        order, ends: as `group_by_expert` returns them.
        weight: [num_experts, out_features, in_features] of the dtype of x; [num_experts, in_features, out_features] if
            `transposed`.

    Returns:
        [rows, out_features], added up in float32.
    """
    num_rows = len(x if order is None else order)
    top_k = num_rows // max(len(x), 1)
    matrices = weight.mT if transposed else weight
    if not on_triton(x.device):
        rows, splits = x if order is None else x[order // top_k], ends.diff(prepend=ends.new_zeros(1)).tolist()
        return torch.cat([part @ matrix.T for part, matrix in zip(rows.split(splits), matrices, strict=True)])
    if num_rows > _MANY * len(weight) and _torch_multiplies(x, weight):
        return F.grouped_mm(x if order is None else x[order // top_k], matrices.mT, offs=ends)
    from quire.kernels.triton.grouped_gemm import grouped_gemm as grouped_gemm_on_gpu

    out = _products(x, order, ends, weight, transposed)
    grouped_gemm_on_gpu(out, x if x.stride(-1) == 1 else x.contiguous(), order, ends, matrices, top_k)
    return out


@grouped_gemm.register_fake
def _products(x: Tensor, order: Tensor | None, ends: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    rows = x if order is None else order
    return x.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])


@operation("segment_gemm", "out")
def segment_gemm(
    out: Tensor, x: Tensor, ends: Tensor, weight: Tensor, weight_indices: Tensor | None, transposed: bool
) -> None:
    """The product of each segment of rows and its matrix.

    Args:
        out: [rows, out_features] of the dtype of x, of which the rows of segments are written. The last dimension is
            contiguous, as is that of x.
        x: float16, bfloat16 or float32 [rows, in_features].
        ends: int32 [segments], the end of each segment, where the next one begins; at most the number of rows.
        weight: [num_weights, out_features, in_features] of the dtype of x; [num_weights, in_features, out_features] if
            `transposed`.
        weight_indices: int32 or int64 [segments], the matrix of each segment; None: its own number. On a GPU, the
            nearest index is taken where there is no such matrix.
    """
    matrices = weight.mT if transposed else weight
    if on_triton(x.device):
        if min(len(x), len(ends)) > 0:
            from quire.kernels.triton.grouped_gemm import grouped_gemm as grouped_gemm_on_gpu

            grouped_gemm_on_gpu(out, x, None, ends, matrices, 1, weight_indices)
        return
    indices = range(len(ends)) if weight_indices is None else weight_indices.tolist()
    for index, (start, end) in zip(indices, pairwise([0, *ends.tolist()]), strict=True):
        if start < end:
            torch.mm(x[start:end], matrices[index].T, out=out[start:end])


def _torch_multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a grouped product for these tensors that does not wait for the device."""
    if x.dtype != torch.bfloat16 or not (x.is_cuda and _is_hopper(x.device) and hasattr(F, "grouped_mm")):
        return False
    return x.data_ptr() % 16 == weight.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in weight.shape[1:])


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
