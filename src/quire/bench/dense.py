"""The baseline in plain torch: gather pages into dense keys and values, then call `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quire.bench.batches import Batch, slots


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
