"""Attention over dense keys and values: torch's baselines, cuDNN and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pad_sequence

from quire.bench.batches import Batch, slots
from quire.bench.cells import Cell

# A function of q, k and v, [requests, heads, tokens, head_dim].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def decode(batch: Batch, max_bytes: int, latent: bool = False) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A function that gathers the pages of k and v and decodes, with an output shaped like q.

    Unequal lengths are padded and masked. In a latent cache, values are the first 512 elements of keys.

    Returns:
        the function, or None if torch has no such attention (fp8) or the dense copies exceed `max_bytes`.
    """
    spec, table = batch.spec, batch.kv
    lengths = table.lengths()
    longest = int(lengths.max())
    elements = table.batch_size * longest * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo)
    if spec.kv_dtype.itemsize == 1 or elements * spec.kv_dtype.itemsize > max_bytes:
        return None
    filled = slots(table)
    # Padding repeats the first token: empty slots hold NaN, which no mask hides (0 * NaN is NaN).
    dense = pad_sequence(filled.split(lengths.tolist()), batch_first=True, padding_value=int(filled[0]))
    mask = None
    if int(lengths.min()) < longest:
        mask = (torch.arange(longest, device=lengths.device) < lengths[:, None])[:, None, None]
    # Query heads that share a KV head become its query rows. With enable_gqa torch would expand keys and values to all
    # query heads on the CPU, which takes four times as long, and on CUDA if there is a mask.
    q = batch.q.unflatten(1, (spec.num_kv_heads, -1))

    def run(k: Tensor, v: Tensor) -> Tensor:
        keys = k.flatten(0, 1)[dense].transpose(1, 2)
        values = keys[..., :512] if latent else v.flatten(0, 1)[dense].transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(*batch.q.shape[:2], -1)

    return run


def is_dense(cell: Cell) -> bool:
    """Whether `prefill` can compute a cell: whole prompts of one length, and no fp8, which torch has not."""
    return cell.whole and not cell.latent and cell.spec.kv_dtype.itemsize > 1


def prefill(cell: Cell, batch: Batch, attention: Attention) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that prefills whole prompts of one length over ragged rows k and v, whose output is
    [requests, tokens, num_qo_heads, head_dim]. No tensor is copied: the views differ in shape and strides alone.
    """

    def view(x: Tensor) -> Tensor:
        return x.view(cell.batch, cell.kv_len, *x.shape[1:]).transpose(1, 2)

    q = view(batch.q)
    return lambda k, v: attention(q, view(k), view(v)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the kernel that torch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with cuDNN's kernel; RuntimeError where it has none."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


def flex(length: int, device: torch.device) -> Attention:
    """FlexAttention with a causal mask for prompts of one length, to be compiled at its first call."""
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    # After eight shapes torch.compile would stop compiling, and compute calls more slowly.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)
