"""How the work of a layer is cut, which all kernels of the family are compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of tiles, blocks and work units.

    Attributes:
        heads: KV heads; packed ones count as one.
        group: query rows of a query token: the query heads of one of `heads`.
        rows: query rows of a tile; 0: all of a request.
        block_n: keys in a block.
        unit_size: keys in a work unit, which is one block or several.
        packed_heads: 1, or 2 KV heads whose keys and values are loaded together and computed as one tile.
    """

    heads: int
    group: int
    rows: int
    block_n: int
    unit_size: int
    packed_heads: int = 1
