"""What a user of torch does about pages: gather them into dense keys and values for `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quire.bench.batches import Batch, slots


def decode(batch: Batch, most: int, latent: bool = False) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Gathering and decoding in one, from pages k and v to an output like q; lengths that differ are padded and masked.
    In a latent cache, values are the first 512 elements of keys.

    None where torch has no such attention (fp8), or the dense copies would take more than `most` bytes.
    """
    spec, table = batch.spec, batch.kv
    lengths = table.lengths()
    longest = int(lengths.max())
    numbers = table.batch_size * longest * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo)
    if spec.kv_dtype.itemsize == 1 or numbers * spec.kv_dtype.itemsize > most:
        return None
    own = slots(table)
    # Padding repeats a token: what no token has is NaN, which a mask does not hide (0 * NaN).
    dense = pad_sequence(own.split(lengths.tolist()), batch_first=True, padding_value=int(own[0]))
    mask = None
    if int(lengths.min()) < longest:
        mask = (torch.arange(longest, device=lengths.device) < lengths[:, None])[:, None, None]
    # Heads that share keys become rows of one: with enable_gqa, keys and values are written out for all heads on the
    # CPU, which takes four times as long, and on CUDA where there is a mask.
    q = batch.q.unflatten(1, (spec.num_kv_heads, -1))

    def run(k: Tensor, v: Tensor) -> Tensor:
        keys = k.flatten(0, 1)[dense].transpose(1, 2)
        values = keys[..., :512] if latent else v.flatten(0, 1)[dense].transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(*batch.q.shape[:2], -1)

    return run
