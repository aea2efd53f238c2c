"""The classes of SGLang that its plug-ins see: those of the package where it can be imported, else stand-ins.

The stand-ins have the attributes and the behaviour of SGLang 0.5.23 as far as an attention backend depends on them. Its
pools divide keys by their scales in place and do not saturate them, which a backend must not rely on.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_MODULES = {
    "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend",),
    "sglang.srt.layers.attention.attention_registry": ("ATTENTION_BACKENDS", "register_attention_backend"),
    "sglang.srt.layers.radix_attention": ("AttentionType", "RadixAttention"),
    "sglang.srt.mem_cache.base_swa_memory_pool": ("BaseSWAKVPool",),
    "sglang.srt.mem_cache.memory_pool": ("KVWriteLoc", "MHATokenToKVPool", "MLATokenToKVPool"),
    "sglang.srt.mem_cache.swa_memory_pool": ("SWAKVPool",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch", "ForwardMode"),
    "sglang.srt.server_args": (
        "ATTENTION_BACKEND_CHOICES",
        "add_attention_backend_choices",
        "add_deterministic_attention_backend_choices",
    ),
}


class ForwardMode(IntEnum):
    """The kinds of forward passes."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_extend(self):
        return self.name in ("EXTEND", "MIXED", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND")

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self):
        return self.is_decode() or self.is_idle()

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self == ForwardMode.DRAFT_EXTEND_V2

    def is_dllm_extend(self):
        return self == ForwardMode.DLLM_EXTEND


class AttentionBackend:
    """The base of backends."""

    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class AttentionType(Enum):
    """What tokens of a layer see each other."""

    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    """A layer; by its arguments."""

    def __init__(
        self,
        num_heads,
        head_dim,
        scaling,
        num_kv_heads,
        layer_id,
        logit_cap=0.0,
        v_head_dim=-1,
        sliding_window_size=-1,
        is_cross_attention=False,
        pos_encoding_mode="NONE",
        logit_capping_method="tanh",
        attn_type=AttentionType.DECODER,
        use_irope=False,
    ):
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.head_dim, self.qk_head_dim = head_dim, head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.use_irope, self.attn_type = is_cross_attention, use_irope, attn_type
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        self.pos_encoding_mode, self.logit_capping_method = pos_encoding_mode, logit_capping_method
        self.xai_temperature_len = -1


@dataclass
class KVWriteLoc:
    """Where keys are written."""

    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    physical: bool = False

    def __post_init__(self):
        if self.swa_loc is not None:
            self.swa_loc = self.swa_loc[: len(self.loc)]

    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc, forward_batch.out_cache_loc_is_physical)


class _Pool:
    use_hnd = False

    def __init__(self, size, page_size, dtype, device):
        self.size, self.page_size = size, page_size
        self.dtype, self.device = dtype, device
        self.store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype

    def get_kv_cache_quant_method(self):
        return SimpleNamespace(name="unquantized")

    def get_kv_buffer(self, layer_id):
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def _new(self, heads, dim):
        return torch.zeros(self.size + self.page_size, heads, dim, dtype=self.store_dtype, device=self.device)


class MHATokenToKVPool(_Pool):
    """A pool with a slot per token; slot 0 takes what fills up batches."""

    def __init__(
        self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver, v_head_dim=None, **_
    ):
        super().__init__(size, page_size, dtype, device)
        self.k_buffer = [self._new(head_num, head_dim) for _ in range(layer_num)]
        self.v_buffer = [self._new(head_num, v_head_dim or head_dim) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id):
        return self.k_buffer[layer_id].view(self.dtype)

    def get_value_buffer(self, layer_id):
        return self.v_buffer[layer_id].view(self.dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None):
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        if cache_k.dtype != self.dtype:
            for x, scale in ((cache_k, k_scale), (cache_v, v_scale)):
                if scale is not None:
                    x.div_(scale)
            cache_k, cache_v = cache_k.to(self.dtype), cache_v.to(self.dtype)
        loc = getattr(loc_info, "loc", loc_info)
        self.k_buffer[layer_id][loc] = cache_k.view(self.store_dtype)
        self.v_buffer[layer_id][loc] = cache_v.view(self.store_dtype)


class MLATokenToKVPool(_Pool):
    """A pool of latent keys, whose first elements are the values."""

    def __init__(
        self, size, page_size, dtype, kv_lora_rank, qk_rope_head_dim, layer_num, device, enable_memory_saver, **_
    ):
        super().__init__(size, page_size, dtype, device)
        self.kv_lora_rank = kv_lora_rank
        self.kv_buffer = [self._new(1, kv_lora_rank + qk_rope_head_dim) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id):
        return self.kv_buffer[layer_id].view(self.dtype)

    def get_value_buffer(self, layer_id):
        return self.kv_buffer[layer_id][..., : self.kv_lora_rank].view(self.dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v):
        loc = getattr(loc_info, "loc", loc_info)
        self.kv_buffer[layer.layer_id][loc] = cache_k.to(self.dtype).view(self.store_dtype)


class BaseSWAKVPool:
    """A pool whose layers with windows have slots of their own."""


class SWAKVPool(BaseSWAKVPool):
    """Two pools: of layers without windows and of layers with."""

    use_hnd = False

    def __init__(
        self,
        size,
        size_swa,
        page_size,
        dtype,
        head_num,
        head_dim,
        swa_attention_layer_ids,
        full_attention_layer_ids,
        device,
        **_,
    ):
        of = (page_size, dtype, head_num, head_dim)
        self.dtype = dtype
        self.full_kv_pool = MHATokenToKVPool(size, *of, len(full_attention_layer_ids), device, False)
        self.swa_kv_pool = MHATokenToKVPool(size_swa, *of, len(swa_attention_layer_ids), device, False)
        self.layers_mapping = {layer: (i, False) for i, layer in enumerate(full_attention_layer_ids)}
        self.layers_mapping |= {layer: (i, True) for i, layer in enumerate(swa_attention_layer_ids)}
        self.full_to_swa_index_mapping = None

    def register_mapping(self, mapping):
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]

    def get_kv_cache_quant_method(self):
        return SimpleNamespace(name="unquantized")

    def get_kv_buffer(self, layer_id):
        i, windows = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windows else self.full_kv_pool).get_kv_buffer(i)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        i, windows = self.layers_mapping[layer.layer_id]
        pool, loc = (self.swa_kv_pool, loc_info.swa_loc) if windows else (self.full_kv_pool, loc_info.loc)
        pool.set_kv_buffer(None, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override=i)


class ForwardBatch(SimpleNamespace):
    """The tables of a forward pass, as far as attention reads them."""

    def __init__(self, **fields):
        names = ("seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens", "extend_seq_lens_cpu")
        names += ("extend_prefix_lens_cpu", "spec_info", "mm_inputs")
        super().__init__(**{**dict.fromkeys(names), "out_cache_loc_is_physical": False, **fields})


ATTENTION_BACKENDS: dict[str, Any] = {}
ATTENTION_BACKEND_CHOICES: list[str] = ["triton", "fa3"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
add_deterministic_attention_backend_choices = [].extend


def register_attention_backend(name):
    def register(make):
        ATTENTION_BACKENDS[name] = make
        return make

    return register


@contextmanager
def importable() -> Iterator[None]:
    """SGLang's modules, or stand-ins in their place for as long as this lasts."""
    if IS_REAL:
        yield
        return
    added = {}
    for path, names in _MODULES.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            added.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        for name in names:
            setattr(added[path], name, globals()[name])
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


IS_REAL = importlib.util.find_spec("sglang") is not None

with importable():
    found = {name: getattr(importlib.import_module(path), name) for path, names in _MODULES.items() for name in names}
    from quire.integrations.sglang.backend import SGLangAttentionBackend  # noqa: F401

SGLANG = SimpleNamespace(**found)
