"""SGLang's pools of keys and values: reading a layer's as pages, and writing new ones."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from quire.steps import quantize, store


class Pools:
    """The pool of a model runner, which may keep the keys of layers with windows in slots of their own.

    Args:
        pool: SGLang's token_to_kv_pool.
        page_size: tokens in a page, whose slots are consecutive.
        dtype: that of the keys and values.
    """

    def __init__(self, pool: Any, page_size: int, dtype: torch.dtype) -> None:
        self.pool, self.page_size = pool, page_size
        self.dtype = dtype
        self.has_windows = isinstance(pool, BaseSWAKVPool)

    def is_window_layer(self, layer_id: int) -> bool:
        """Whether a layer's keys lie in the slots of windows."""
        return bool(self.has_windows and self.pool.layers_mapping[layer_id][1])

    @property
    def slot_map(self) -> Tensor:
        """int64 [slots], the slot of windows for each slot of the pool.

        Raises:
            ValueError: SGLang has not set it.
        """
        slot_map: Tensor | None = self.pool.full_to_swa_index_mapping
        if slot_map is None:
            raise ValueError("token_to_kv_pool.full_to_swa_index_mapping is None: windows have no slots")
        return slot_map

    def window_slots(self, batch: Any) -> Tensor | None:
        """The slots of windows for a step's new tokens, for the layers of the step; None without such slots."""
        slots = batch.out_cache_loc
        if not self.has_windows or slots is None:
            return None
        found: Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        return found

    def pages(self, layer: Any) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, [pages, page_size, num_kv_heads, head_dim].

        Raises:
            ValueError: the pool is of another dtype or layout, or of other heads than the layer.
        """
        k, v = self.pool.get_kv_buffer(layer.layer_id)
        for name, x, dim in (("keys", k, layer.qk_head_dim), ("values", v, layer.v_head_dim)):
            if x.ndim != 3 or x.shape[1:] != (layer.tp_k_head_num, dim) or x.dtype != self.dtype:
                found, needed = f"{x.dtype} {list(x.shape)}", f"{self.dtype} [slots, {layer.tp_k_head_num}, {dim}]"
                raise ValueError(f"the pool's {name} of layer {layer.layer_id} are {found}: {needed} is needed")
        return self._as_pages(k), self._as_pages(v)

    def _as_pages(self, x: Tensor) -> Tensor:
        count = x.shape[0] // self.page_size
        return x[: count * self.page_size].unflatten(0, (count, self.page_size))

    def write(self, layer: Any, batch: Any, window_slots: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Write a step's new keys and values, [tokens, num_kv_heads, head_dim], to the slots of the step.

        In an fp8 pool they are divided by the layer's scales and saturated. SGLang's pools would divide k and v in
        place, although attention still reads them, and would turn values that are too large into NaN.
        """
        if self.dtype.itemsize == 1:
            k_scale, v_scale = scales(layer, self.dtype)
            pages = self.pages(layer)
            if pages[0].data_ptr() != pages[1].data_ptr():
                slots = batch.out_cache_loc
                if window_slots is not None and self.is_window_layer(layer.layer_id):
                    # A layer may be given fewer tokens than the step was planned for, which pad it.
                    slots = window_slots[: len(k)]
                store(pages, k, v, slots, k_scale, v_scale)
                return
            # Latent keys contain the values, and are written once.
            k = quantize(k, self.dtype, k_scale)
        self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch, swa_loc=window_slots), k, v)


def scales(layer: Any, kv_dtype: torch.dtype) -> tuple[float, float]:
    """The factors of a layer's stored keys and values: 1 unless they are fp8 and the checkpoint has scales.

    Raises:
        ValueError: the scales are on the device alone.
    """
    if kv_dtype.itemsize > 1:
        return 1.0, 1.0
    numbers = []
    for name in ("k_scale", "v_scale"):
        number = getattr(layer, f"{name}_float")
        if number is None and getattr(layer, name) is not None:
            raise ValueError(f"layer {layer.layer_id} has {name}, but {name}_float is None: it would have to be read")
        numbers.append(1.0 if number is None else float(number))
    return numbers[0], numbers[1]
