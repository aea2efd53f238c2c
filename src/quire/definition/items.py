"""Prompts of several items: a prefix, then items that do not see each other (multi-item scoring).

Each token after the prefix has a position in its item, counted from 1; the delimiter before an item has position 0. In
addition to causality, a token at position n > 0 of its item sees the prefix and the last n keys up to its own. A
delimiter sees the prefix alone. Tokens of the prefix are subject to causality alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.definition.masks import PackedMask
from quire.definition.pages import as_int32


@dataclass(frozen=True, eq=False)
class Items:
    """The items of a batch's prompts.

    Attributes:
        prefix_lens: uint32 or int32 [batch_size], the tokens in each prefix.
        positions: uint16 or int32 [batch_size * length], each request's positions in items, padded to `length`. The
            last request's padding may be omitted, and is then filled with zeros.
        length: positions per request; 0, which only a single request may have, stands for all positions.

    Int64 tensors are converted to int32.

    Raises:
        ValueError: another dtype or shape, or fewer positions than the requests before the last one need.
    """

    prefix_lens: Tensor
    positions: Tensor
    length: int

    def __post_init__(self) -> None:
        self.__dict__.update(prefix_lens=as_int32(self.prefix_lens), positions=as_int32(self.positions))
        for name, x in (("prefix_len_ptr", self.prefix_lens), ("token_pos_in_items_ptr", self.positions)):
            if x.ndim != 1 or x.dtype not in (torch.uint16, torch.uint32, torch.int32):
                raise ValueError(
                    f"{name} is {x.dtype} of shape {list(x.shape)}: a uint16, uint32, int32 or int64 vector"
                )
        batch_size, count = len(self.prefix_lens), len(self.positions)
        if batch_size == 1 and self.length == 0:
            object.__setattr__(self, "length", count)
        if self.length < min(batch_size, count, 1):
            raise ValueError(f"token_pos_in_items_len = {self.length} is not supported: 1 or more for several requests")
        if count < (batch_size - 1) * self.length:
            raise ValueError(
                f"token_pos_in_items_ptr has {count} entries: at least (batch size - 1) * token_pos_in_items_len = "
                f"{(batch_size - 1) * self.length} are needed"
            )
        missing = batch_size * self.length - count
        if missing > 0:
            # torch has few operations for uint16.
            signed = torch.int16 if self.positions.itemsize == 2 else torch.int32
            padded = pad(self.positions.view(signed), (0, missing)).view(self.positions.dtype)
            object.__setattr__(self, "positions", padded)

    def mask(self, b: int, q_len: int, kv_len: int) -> Tensor:
        """Which keys the items let each query of request b see, before causality: bool [q_len, kv_len]."""
        prefix = int(self.prefix_lens[b])
        in_items = self.positions[b * self.length : (b + 1) * self.length].long()
        query = torch.arange(kv_len - q_len, kv_len, device=in_items.device)
        index = query - prefix
        valid = (index >= 0) & (index < self.length)
        in_item = torch.zeros_like(index)
        in_item[valid] = in_items[index[valid]]
        query, in_item = query[:, None], in_item[:, None]
        key = torch.arange(kv_len, device=query.device)[None, :]
        return (query < prefix) | (key < prefix) | (key > query - in_item)

    def packed(self, q_lens: Tensor, kv_lens: Tensor) -> PackedMask:
        """The masks of `mask`, packed, for kernels without items. Reads the lengths on the host."""
        sizes = zip(q_lens.tolist(), kv_lens.tolist(), strict=True)
        masks = [self.mask(b, q_len, kv_len).flatten() for b, (q_len, kv_len) in enumerate(sizes)]
        bits = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device=q_lens.device)
        return PackedMask.from_bool(bits, q_lens, kv_lens)
