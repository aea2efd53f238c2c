"""The buffers that callers give wrappers: workspaces, and the tables of CUDA graphs."""

from __future__ import annotations

from torch import Tensor

from quire.definition.checks import check
from quire.definition.pages import table


def check_workspace(buffer: Tensor | None, name: str) -> None:
    """Refuse a workspace that is no tensor, or whose address is not a multiple of 16."""
    if buffer is None:
        return
    if not isinstance(buffer, Tensor):
        raise ValueError(f"{name} is a {type(buffer).__name__}: a tensor is needed")
    if buffer.numel() and buffer.data_ptr() % 16:
        raise ValueError(f"{name} must be 16-byte aligned")


def check_buffers(mode: str, batch_from: str, **buffers: Tensor | None) -> None:
    """Refuse buffers of a CUDA-graph wrapper that cannot hold its plans' tables: an int32 vector each, those named
    "indptr" one longer than the batch and those named "last_page_len" as long.

    Args:
        mode: what FlashInfer's messages call a CUDA graph in this wrapper.
        batch_from: the name of the buffer whose length gives the batch size.
    """
    for name, x in buffers.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} should be a torch.Tensor in {mode} mode")
        check(table(x, name) is x, f"{name}.dtype", x.dtype, "torch.int32, which kernels read")
        check(x.is_contiguous(), f"{name}.stride()", x.stride(), "contiguous")
    sizes = {name: len(x) - ("indptr" in name) for name, x in buffers.items() if x is not None}
    for name, size in sizes.items():
        if size != sizes[batch_from] and "indices" not in name:
            wanted = "batch_size + 1" if "indptr" in name else "batch_size"
            noun = "size" if mode == "cudagraph" else "length"
            raise ValueError(f"The {noun} of {name} should be {wanted}: the batch has {sizes[batch_from]} requests")


def fitting(buffer: Tensor | None, values: Tensor, name: str) -> Tensor:
    """The buffer that a CUDA-graph wrapper was given for a table; it must hold the table, and be of its dtype."""
    if buffer is None:
        raise ValueError(f"{name} is needed with use_cuda_graph=True")
    check(buffer.dtype == values.dtype, f"{name}.dtype", buffer.dtype, f"{values.dtype}, which kernels read")
    if len(values) > len(buffer):
        raise ValueError(f"{name} holds {len(buffer)} entries: this plan needs {len(values)}")
    return buffer


def fixed_batch(buffer: Tensor | None, name: str, batch_size: int, extra: int = 0) -> None:
    """Refuse a batch of another size than the buffers of a CUDA-graph wrapper were made for."""
    if buffer is None:
        raise ValueError(f"{name} is needed with use_cuda_graph=True")
    fixed = len(buffer) - extra
    if batch_size != fixed:
        raise ValueError(f"the batch has {batch_size} requests: {name} was made for {fixed}, and a CUDA graph is fixed")
