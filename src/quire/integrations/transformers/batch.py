"""From dense keys and values and a mask to what kernels read: rows of keys, and which rows belong to which request.

Keys and values [batch_size, heads, kv_len, head_dim] are not copied. Token t of row b is row b * step + t of a view
[rows, heads, head_dim], in which tokens of other heads lie between the rows of a batch. Requests without query tokens
own the tokens between two rows of the batch, and padding, so that one indptr of ragged keys describes all rows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.quantization import packbits


class PackedBatch(NamedTuple):
    """Which query rows see which rows of keys.

    Attributes:
        qo_indptr: int32 [requests + 1].
        kv_indptr: int32 [requests + 1], offsets in the rows of keys or, if there are any, in `indices`.
        max_q_len: the most query tokens of a request.
        causal: whether query tokens, which are the last tokens of a request, see no later keys.
        window_left: how many keys before itself a query token sees, -1 for all.
        indices: int32, rows of keys; None if a request's keys lie one after another. last_page_len: ones, int32
            [requests], where there are indices: they are pages of one token.
        bits: uint8, the packed custom mask; None if there is none.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    max_q_len: int
    causal: bool
    window_left: int
    indices: Tensor | None = None
    last_page_len: Tensor | None = None
    bits: Tensor | None = None


def key_rows(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows of keys and values, [rows, heads, head_dim] each, and the step from one row of the batch to the next. They
    are views, unless the strides of keys and values differ in more than head_dim.

    Raises:
        ValueError: more than 2**31 - 1 rows.
    """
    step = _row_step(key)
    if step is None or (key.stride() != value.stride() and step != _row_step(value)):
        key, value = key.contiguous(), value.contiguous()
        step = _row_step(key)
    assert step is not None
    batch, _, length, _ = key.shape
    rows = (batch - 1) * step + length
    if rows >= 1 << 31:
        raise ValueError(f"key has shape {list(key.shape)}: batch_size * heads * kv_len must be below 2**31")
    return _rows(key, rows), _rows(value, rows), step


def _row_step(x: Tensor) -> int | None:
    """How many tokens of a head lie between the rows of a batch in memory; None if that is no whole number."""
    batch, _, length, _ = x.shape
    row, _, token, element = x.stride()
    if element != 1:
        return None
    if batch == 1:
        return 0
    if length == 1:
        return 1
    return row // token if token > 0 and row >= length * token and row % token == 0 else None


def _rows(x: Tensor, rows: int) -> Tensor:
    batch, heads, length, dim = x.shape
    row, head, token, _ = x.stride()
    return x.as_strided((rows, heads, dim), (row if length == 1 and batch > 1 else token, head, 1))


def flat_rows(x: Tensor) -> Tensor:
    """[batch_size, heads, length, head_dim] as [batch_size * length, heads, head_dim]: a view where strides allow."""
    if x.shape[2] == 1:
        return x.squeeze(2)
    return x.transpose(1, 2).flatten(0, 1)


def of_indptr(qo_indptr: Tensor, kv_indptr: Tensor, max_q_len: int, causal: bool, window_left: int) -> PackedBatch:
    """Requests that lie one after another, as in `flat_rows`."""
    return PackedBatch(qo_indptr.int(), kv_indptr.int(), max_q_len, causal, window_left)


def of_pages(qo_indptr: Tensor, kv_indptr: Tensor, indices: Tensor, max_q_len: int) -> PackedBatch:
    """Causal requests whose keys are the rows `indices`."""
    kv_indptr = kv_indptr.int()
    return PackedBatch(qo_indptr.int(), kv_indptr, max_q_len, True, -1, indices.int(), torch.ones_like(kv_indptr[1:]))


def maker(
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    step: int,
    causal: bool,
    window_left: int,
    offsets: tuple[Tensor, Tensor] | None = None,
) -> partial[PackedBatch]:
    """The function that makes the batch of a mask, see `quire.integrations.transformers.masks`, with its arguments.

    Args:
        query, key: [batch_size, heads, length, head_dim].
        step: from `key_rows`.
        causal, window_left: of rows without a mask.
        offsets: of packed sequences in all query tokens and in all keys, outside of which a bool mask sees nothing.

    Raises:
        ValueError: the mask is of other rows, or none that can be computed.
    """
    batch, _, q_len, _ = query.shape
    length = key.shape[2]
    if mask is None:
        return partial(_of_no_mask, batch, q_len, length, step, causal, window_left, query.device)
    if mask.dtype == torch.bool:
        fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, q_len, length)
        _refuse(fits, mask, f"one mask for all heads is, [{batch} or 1, 1, {q_len}, {length}]")
        if offsets is not None:
            return partial(_of_bool_within, mask, *offsets, batch, q_len, length, step)
        return partial(_of_bool, mask, batch, q_len, length, step)
    _refuse(mask.dtype == torch.int32 and mask.ndim == 4, mask, "a bool mask is, [batch_size or 1, 1, q_len, kv_len]")
    if q_len == 1 and mask.shape[2:] == (batch + 1, length + 3):
        return partial(_of_table, mask, batch, length, step)
    if is_packed(mask, batch, q_len):
        return partial(_of_packed, mask, q_len)
    ours = (
        f"masks of {batch} rows of {q_len} query tokens and {length} keys are, and this is another layer's, or changed"
    )
    _refuse(q_len > 1 and mask.shape[2:] == (batch, 2), mask, ours)
    return partial(_of_spans, mask, q_len, step)


def is_packed(mask: Tensor | None, batch: int, q_len: int) -> bool:
    """Whether a mask has packed sequences, whose rows are those of `flat_rows`."""
    return mask is not None and mask.dtype == torch.int32 and q_len > 1 and mask.shape[2:] == (1, batch * q_len + 1)


def _refuse(ok: bool, mask: Tensor, supported: str) -> None:
    if not ok:
        kind = f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"
        raise ValueError(f"attention_mask = {kind} is not supported by attn_implementation = 'quire': {supported}")


def _of_no_mask(
    batch: int, q_len: int, length: int, step: int, causal: bool, window_left: int, device: torch.device
) -> PackedBatch:
    spans = torch.zeros((batch, 2), dtype=torch.int32, device=device)
    spans[:, 1] = length
    return _with_gaps(spans, q_len, step)._replace(causal=causal, window_left=window_left)


def _of_bool(mask: Tensor, batch: int, q_len: int, length: int, step: int) -> PackedBatch:
    whole = _of_no_mask(batch, q_len, length, step, False, -1, mask.device)
    area = q_len * length
    # Each row of bits begins with a new byte.
    bits = pad(mask.expand(batch, -1, -1, -1).reshape(batch, area), (0, -area % 8))
    return whole._replace(bits=packbits(bits.flatten(), "little"))


def _of_bool_within(
    mask: Tensor, cu_q: Tensor, cu_k: Tensor, batch: int, q_len: int, length: int, step: int
) -> PackedBatch:
    """As `_of_bool`, but query tokens see only keys of their own sequence."""
    query, key = (
        torch.searchsorted(cu, torch.arange(batch * n, device=cu.device, dtype=cu.dtype), right=True).view(batch, 1, n)
        for cu, n in ((cu_q, q_len), (cu_k, length))
    )
    return _of_bool(mask & (query[..., None] == key[..., None, :]), batch, q_len, length, step)


def _of_spans(mask: Tensor, q_len: int, step: int) -> PackedBatch:
    return _with_gaps(mask[0, 0], q_len, step)._replace(window_left=mask.shape[1] - 2)


def _with_gaps(spans: Tensor, q_len: int, step: int) -> PackedBatch:
    """Causal requests of int32 spans [batch_size, 2]; before each of them, one without query tokens."""
    batch = spans.shape[0]
    row = torch.arange(batch, dtype=torch.int32, device=spans.device)
    edge = torch.arange(2 * batch + 1, dtype=torch.int32, device=spans.device)
    kv_indptr = pad((spans + (row * step)[:, None]).flatten(), (1, 0))
    return PackedBatch(edge // 2 * q_len, kv_indptr, q_len, True, -1)


def _of_table(mask: Tensor, batch: int, length: int, step: int) -> PackedBatch:
    table = mask[0, 0].flatten()
    indices = table[: batch * length]
    last_page_len, qo_indptr, kv_indptr = table[-3 * batch - 2 :].split([batch, batch + 1, batch + 1])
    # Page ids were made for this step.
    own = mask.shape[1] * length
    if batch > 1 and step != own:
        indices = indices + indices // own * (step - own)
    return PackedBatch(qo_indptr, kv_indptr, 1, True, -1, indices, last_page_len)


def _of_packed(mask: Tensor, q_len: int) -> PackedBatch:
    return of_indptr(mask[0, 0, 0], mask[0, 0, 0], q_len, True, mask.shape[1] - 2)
