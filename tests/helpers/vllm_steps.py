"""Steps of a vLLM that calls the plug-in: a cache, requests with their blocks, and the metadata of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from helpers.vllm_modules import vllm_modules
from quire.definition import AttentionSpec, oracle
from quire.steps import fp8_dtype, quantize

with vllm_modules():
    from quire.integrations.vllm.backend import VllmAttentionBackend


def config(spec_tokens: int = 0, mixed_mode: str = "PIECEWISE") -> Any:
    """What the builder reads of vLLM's configuration."""
    mode = SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name=mixed_mode))
    speculative = SimpleNamespace(num_speculative_tokens=spec_tokens, parallel_drafting=False) if spec_tokens else None
    return SimpleNamespace(
        speculative_config=speculative,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        use_v2_model_runner=True,
    )


@dataclass
class Sequence:
    """A request: its blocks, and its keys and values as the cache holds them, with their scales applied."""

    blocks: list[int]
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return len(self.k)


@dataclass
class Steps:
    """One attention layer and its cache.

    Args:
        layout: the order in memory of vLLM's layouts: NHD, HND, or "layers" for NHD with another layer between blocks.
        scales: k_scale and v_scale of an fp8 cache.
        measured: the scales are measured by vLLM, and stay on the device.
    """

    spec: AttentionSpec
    block_size: int = 16
    layout: str = "NHD"
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    num_blocks: int = 64
    max_blocks: int = 12
    scales: tuple[float, float] = (1.0, 1.0)
    measured: bool = False
    spec_tokens: int = 0
    mixed_mode: str = "PIECEWISE"
    sinks: Tensor | None = None
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.spec
        fp8 = self.kv_cache_dtype.startswith("fp8")
        self.dtype = fp8_dtype(self.kv_cache_dtype) if fp8 else s.q_dtype
        self.cache = self._new_cache(torch.uint8 if fp8 else s.q_dtype)
        self.free = torch.randperm(self.num_blocks - 1).add(1).tolist()  # block 0 is the null block
        window = None if s.mask.window_left < 0 else s.mask.window_left + 1
        self.impl = VllmAttentionBackend.get_impl_cls()(
            s.num_qo_heads, s.head_dim_qk, s.sm_scale, s.num_kv_heads, list(s.slopes) or None, window,
            self.kv_cache_dtype, s.logits_soft_cap or None, "decoder", None, sinks=self.sinks,
        )  # fmt: skip
        k_scale, v_scale = self.scales
        self.layer = SimpleNamespace(
            _k_scale_float=k_scale, _v_scale_float=v_scale, _k_scale=torch.tensor(k_scale, device=self.device),
            _v_scale=torch.tensor(v_scale, device=self.device), calculate_kv_scales=self.measured,
        )  # fmt: skip
        if self.measured:  # what is on the host is older
            self.layer._k_scale_float = self.layer._v_scale_float = 1.0
        self.builder = VllmAttentionBackend.get_builder_cls()(
            SimpleNamespace(block_size=self.block_size), ["layer"], config(self.spec_tokens, self.mixed_mode),
            torch.device(self.device),
        )  # fmt: skip

    def _new_cache(self, dtype: torch.dtype) -> Tensor:
        s, layers = self.spec, 2 if self.layout == "layers" else 1
        shape = (self.num_blocks, layers, self.block_size, s.num_kv_heads, 2 * s.head_dim_qk)
        if self.layout == "HND":
            shape = (self.num_blocks, layers, s.num_kv_heads, self.block_size, 2 * s.head_dim_qk)
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        whole.fill_(0x7F if dtype == torch.uint8 else torch.nan)
        # Freed blocks are replaced by the null block, which vLLM never writes to, and makes as zeros.
        whole[0] = 0
        cache = whole[:, -1]
        return cache if self.layout == "HND" else cache.transpose(1, 2)

    def start(self, count: int, shared: Sequence | None = None, shared_blocks: int = 0) -> list[Sequence]:
        """New requests, which may have the first blocks of another one already (prefix caching)."""
        s = self.spec
        for _ in range(count):
            length = shared_blocks * self.block_size
            k, v = (torch.zeros(0, s.num_kv_heads, s.head_dim_qk, dtype=torch.float64) for _ in "kv")
            blocks: list[int] = []
            if shared is not None:
                blocks, k, v = shared.blocks[:shared_blocks], shared.k[:length], shared.v[:length]
            self.sequences.append(Sequence(list(blocks), k, v))
        return self.sequences[-count:]

    def metadata(self, q_lens: list[int], pad_reqs: int = 0, pad_tokens: int = 0, slots: Tensor | None = None) -> Any:
        """CommonAttentionMetadata of a step after its tokens were counted. Padding is that of full CUDA graphs."""
        count = len(q_lens) + pad_reqs
        offsets = torch.tensor([0, *q_lens, *[0] * pad_reqs]).cumsum(0).int()
        lengths = torch.tensor([*(x.length for x in self.sequences), *[0] * (count - len(self.sequences))]).int()
        table = torch.zeros(count + 3, self.max_blocks, dtype=torch.int32)
        window = self.spec.mask.window_left
        for row, x, q_len in zip(table, self.sequences, q_lens, strict=False):
            row[: len(x.blocks)] = torch.tensor(x.blocks, dtype=torch.int32)
            if window >= 0:  # vLLM frees blocks that no later token sees
                row[: max(x.length - q_len - window, 0) // self.block_size] = 0
        return SimpleNamespace(
            query_start_loc=offsets.to(self.device), query_start_loc_cpu=offsets, seq_lens=lengths.to(self.device),
            num_reqs=count, num_actual_tokens=sum(q_lens) + pad_tokens, max_query_len=max(q_lens),
            max_seq_len=int(lengths.max()), block_table_tensor=table.to(self.device)[:count], slot_mapping=slots,
            causal=self.spec.mask.causal,
        )  # fmt: skip

    def write(self, q_lens: list[int], pad_tokens: int = 0) -> Tensor:
        """Append random keys and values to the requests, in blocks that they may have to take. Returns the slots."""
        keys, values, slots = [], [], []
        for x, count in zip(self.sequences, q_lens, strict=True):
            while len(x.blocks) * self.block_size < x.length + count:
                x.blocks.append(self.free.pop())
            positions = range(x.length, x.length + count)
            slots += [x.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in positions]
            new = [torch.randn(count, *x.k.shape[1:]).to(self.spec.q_dtype) for _ in "kv"]
            keys.append(new[0])
            values.append(new[1])
            stored = [
                quantize(y, self.dtype, scale).double() * scale for y, scale in zip(new, self.scales, strict=True)
            ]
            x.k, x.v = torch.cat([x.k, stored[0]]), torch.cat([x.v, stored[1]])
        shape = (pad_tokens, *keys[0].shape[1:])
        key, value = (torch.cat([*rows, torch.full(shape, torch.nan).to(rows[0])]) for rows in (keys, values))
        mapping = torch.tensor([*slots, *[-1] * pad_tokens], device=self.device)
        self.impl.do_kv_cache_update(self.layer, key.to(self.device), value.to(self.device), self.cache, mapping)
        return mapping

    def queries(self, q_lens: list[int], pad_tokens: int = 0) -> Tensor:
        """Random queries, as rows of a wider matrix like those that a projection of q, k and v makes."""
        s = self.spec
        wide = torch.randn(sum(q_lens) + pad_tokens, (s.num_qo_heads + 2) * s.head_dim_qk).to(s.q_dtype)
        return wide.to(self.device)[:, : s.num_qo_heads * s.head_dim_qk].unflatten(1, (s.num_qo_heads, s.head_dim_qk))

    def exact(self, q: Tensor, q_lens: list[int]) -> Tensor:
        """The oracle's output of the step, in float64."""
        spec = self.spec.replace(q_dtype=torch.float32, kv_dtype=torch.float32)
        if not spec.mask.causal:
            spec = spec.replace(window_right=spec.mask.window_left)
        outs, start = [], 0
        for x, count in zip(self.sequences, q_lens, strict=True):
            rows = q[start : start + count].cpu()
            sinks = None if self.sinks is None else self.sinks.cpu()
            outs.append(oracle.attend(rows, x.k, x.v, spec, sinks=sinks)[0])
            start += count
        return torch.cat(outs)

    def step(self, q_lens: list[int], pad_reqs: int = 0, pad_tokens: int = 0, prefix: int = 0) -> tuple[Tensor, Tensor]:
        """Compute a step by the plug-in and by the oracle."""
        slots = self.write(q_lens, pad_tokens)
        metadata = self.builder.build(prefix, self.metadata(q_lens, pad_reqs, pad_tokens, slots))
        q = self.queries(q_lens, pad_tokens)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
        assert self.impl.forward(self.layer, q, q, q, self.cache, metadata, out) is out
        return out.cpu()[: sum(q_lens)], self.exact(q, q_lens)
