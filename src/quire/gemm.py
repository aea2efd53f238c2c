"""Products of segments of rows; each segment has a matrix of its own.

Names, parameters and meanings are those of `flashinfer.gemm`. For LoRA adapters see `quire.steps.add_lora`, whose rows
need not be sorted, and which adds its products to those of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.checks import check, is_int
from quire.definition.pages import check_indptr, refuse_first
from quire.definition.tensors import (
    check_floats,
    check_optional,
    check_tensor,
    check_tensors,
    float_output,
    refuse_grad,
)
from quire.kernels.grouped_gemm import segment_gemm

__all__ = ["SegmentGEMMWrapper"]

_BACKENDS = ("auto", "sm80", "sm90")


class SegmentGEMMWrapper:
    """Products ``y[i] = x[i] @ W[i]`` of segments x[i] of rows, whose lengths differ.

    Args:
        float_workspace_buffer: accepted, without effect, as no workspace is needed.
        backend: "auto" or one of FlashInfer's, "sm80" and "sm90", which all mean "auto".

    Raises:
        ValueError: another backend.
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, backend: str = "auto") -> None:
        check_optional(float_workspace_buffer=float_workspace_buffer)
        check(backend in _BACKENDS, "backend", backend, f"one of {', '.join(_BACKENDS)}")

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Accepted, without effect."""

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: Tensor | None = None,
        seg_lens: Tensor | None = None,
        seg_indptr: Tensor | None = None,
        weight_indices: Tensor | None = None,
    ) -> Tensor:
        """Multiply each segment by its matrix, ``weights[weight_indices[i]]``, or ``weights[i]`` without indices.

        Tables are read on the device. Nothing waits for it, so that a CUDA graph may capture the call.

        Args:
            x: float16, bfloat16 or float32 [rows, d_in], the segments one after another.
            weights: of the dtype of x, [num_weights, d_out, d_in] if `weight_column_major`, or else [num_weights, d_in,
                d_out].
            batch_size: the number of segments.
            weight_column_major: the order of the last two dimensions of `weights`.
            out: [rows, d_out] of the dtype of x, where to write. Rows beyond the last segment are not written. None: a
                new tensor, in which they are 0.
            seg_lens: int32 or int64 [batch_size], the rows of each segment. Needed without `seg_indptr`, and otherwise
                ignored.
            seg_indptr: int32 or int64 [batch_size + 1], 0 and the end of each segment.
            weight_indices: int32 or int64 [batch_size], on the device of x.

        Returns:
            `out`. Products are added up in float32 on a GPU, and as torch adds them up on the CPU.

        Raises:
            ValueError: neither seg_lens nor seg_indptr is given, or arguments do not fit together; on the host also
                negative lengths, segments beyond the rows, and indices beyond the weights. On a GPU lengths must not be
                negative, and other tables are taken to mean the nearest row and weight. In grad mode, tensors that
                require grad.
        """
        refuse_grad(x=x, weights=weights, out=out)
        check_floats(x, "x", (None, None))
        check(is_int(batch_size) and batch_size >= 0, "batch_size", batch_size, "a number of segments")
        d_in = x.shape[1]
        shape = (None, None, d_in) if weight_column_major else (None, d_in, None)
        check_tensor(weights, "weights", shape, x.dtype, x.device)
        d_out = weights.shape[1 if weight_column_major else 2]
        out = x.new_zeros(len(x), d_out) if out is None else float_output(out, "out", (len(x), d_out), x)
        ends = _ends(x, batch_size, seg_lens, seg_indptr)
        num_weights = len(weights)
        if weight_indices is None:
            check(
                num_weights >= batch_size, "weights", list(weights.shape), f"a weight for each of {batch_size} segments"
            )
        else:
            _check_table(weight_indices, "weight_indices", batch_size, x)
            check(num_weights > 0 or batch_size == 0, "weights", list(weights.shape), "at least one weight")
            if weight_indices.is_cpu:
                bad = (weight_indices < 0) | (weight_indices >= num_weights)
                refuse_first(bad, "weight_indices", weight_indices, f"0 to {num_weights - 1}, the weights")
        segment_gemm(out, x, ends, weights, weight_indices, not weight_column_major)
        return out

    forward = run


def _check_table(table: Tensor, name: str, size: int, x: Tensor) -> None:
    """Refuse what is not a contiguous vector of `size` integers on the device of x."""
    check_tensors(**{name: table})
    dtype = torch.int32 if table.dtype == torch.int32 else torch.int64
    check_tensor(table, name, (size,), dtype, x.device)


def _ends(x: Tensor, batch_size: int, seg_lens: Tensor | None, seg_indptr: Tensor | None) -> Tensor:
    """The ends of segments, int32 [batch_size], none of which is beyond the rows of x."""
    if seg_indptr is not None:
        _check_table(seg_indptr, "seg_indptr", batch_size + 1, x)
        if seg_indptr.is_cpu:
            check(int(seg_indptr[0]) == 0, "seg_indptr[0]", int(seg_indptr[0]), "0, where the first segment starts")
            check_indptr(seg_indptr, "seg_indptr", len(x), "the rows of x")
        return seg_indptr[1:].clamp(max=len(x)).int()
    if seg_lens is None:
        raise ValueError("seg_lens and seg_indptr are None: one of them must be given")
    _check_table(seg_lens, "seg_lens", batch_size, x)
    if seg_lens.is_cpu:
        refuse_first(seg_lens < 0, "seg_lens", seg_lens, "at least 0")
        check(int(seg_lens.sum()) <= len(x), "seg_lens.sum()", int(seg_lens.sum()), f"at most {len(x)}, the rows of x")
    return seg_lens.cumsum(0).clamp(max=len(x)).int()
