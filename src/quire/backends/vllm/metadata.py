"""The metadata of a step, which all attention layers read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.backends.vllm.protocols import LayerImpl, ModelInput, VllmConfig, VllmModelRunner
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.checks import as_dtype, check
from quire.definition.pages import PageTable
from quire.definition.spec import FLOATS, FLOATS8
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.steps import Heads, fp8_dtype, plan

PAD_SLOT_ID = -1
HEAD_SIZES = [*range(8, 257, 8), 512]


@dataclass
class PerLayerParameters:
    """Parameters that may differ between layers; window_left counts the keys to the left that a query sees, -1: all."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def get_per_layer_parameters(vllm_config: VllmConfig) -> dict[str, PerLayerParameters]:
    """The parameters of all attention layers, by name.

    Raises:
        ValueError: the impl of an attention layer is not a `FlashInferImpl`.
    """
    params = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "impl"):
            # Other layers have no impl of attention.
            continue
        impl = layer.impl
        if not isinstance(impl, LayerImpl):
            raise ValueError(f"attention of layer {name!r} is a {type(impl).__name__}: FlashInferImpl is needed")
        window_left = -1 if impl.sliding_window is None else impl.sliding_window[0]
        params[name] = PerLayerParameters(window_left, impl.logits_soft_cap, impl.scale)
    return params


def infer_global_hyperparameters(per_layer_params: dict[str, PerLayerParameters]) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises:
        ValueError: there are no layers, or their parameters differ.
    """
    if not per_layer_params:
        raise ValueError("per_layer_params is empty: no attention layer was found in the model")
    (first, shared), *rest = per_layer_params.items()
    for name, params in rest:
        if params != shared:
            raise ValueError(f"layers differ: {first!r} has {shared}, {name!r} has {params}")
    return shared


def shared_or_neutral(per_layer_params: dict[str, PerLayerParameters], head_dim: int) -> PerLayerParameters:
    """The parameters to plan with: those that all layers share, or neutral ones. Each layer passes its own parameters
    to its runs, so layers that differ do not need separate plans.
    """
    if all(params == next(iter(per_layer_params.values())) for params in per_layer_params.values()):
        return infer_global_hyperparameters(per_layer_params)
    return PerLayerParameters(-1, None, head_dim**-0.5)


def model_fields(runner: VllmModelRunner, params: PerLayerParameters) -> dict[str, Any]:
    """The fields of `FlashInferMetadata` that depend on the model, its runner and the parameters to plan with."""
    model, parallel = runner.model_config, runner.parallel_config
    return {
        "enable_kv_scales_calculation": False,
        "num_qo_heads": model.get_num_attention_heads(parallel),
        "num_kv_heads": model.get_num_kv_heads(parallel),
        "head_dim": model.get_head_size(),
        "data_type": cache_dtype(runner.kv_cache_dtype, model.dtype),
        "q_data_type": model.dtype,
        "device": runner.device,
        **vars(params),
    }


def cache_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype for vLLM's name of a cache dtype; ValueError for a dtype that attention does not support."""
    if kv_cache_dtype == "auto":
        return model_dtype
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype.startswith("fp8"):
        return fp8_dtype(kv_cache_dtype)
    dtype = as_dtype(kv_cache_dtype, "kv_cache_dtype")
    allowed = "auto, float32, bfloat16, float16, fp8, fp8_e4m3 or fp8_e5m2"
    check(dtype in FLOATS + FLOATS8, "kv_cache_dtype", kv_cache_dtype, allowed)
    return dtype


@dataclass
class FlashInferMetadata:
    """The metadata of a step. In all tensors, prefills come first and decodes after them.

    Attributes:
        num_prefills, num_prefill_tokens, num_decode_tokens: the number of prefill requests, of their new tokens, and of
            the new tokens of decode requests.
        slot_mapping: int64 [tokens], the slot of each new token, page * page_size + offset; -1: not stored.
        multi_modal_placeholder_index_maps, enable_kv_scales_calculation: fields that only vLLM reads.
        max_prefill_seq_len: the length of the longest prefill request.
        decode_query_len: new tokens of each decode request.
        use_cuda_graph: whether the step is padded for a captured graph.
        prefill_wrapper, decode_wrapper: set by `FlashInferState.begin_forward`.
        seq_start_loc, query_start_loc: int32 [requests + 1], cumulative lengths and cumulative numbers of new tokens.
        block_tables: int32 [at least requests, pages], padded with -1; `advance_step` reads it.
        seq_lens_tensor, block_table_bound: int32 [requests], lengths, and numbers of pages that they fill.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: as in `quire.definition.PageTable`.
        num_qo_heads, num_kv_heads, head_dim, q_data_type: of the layers; page_size, data_type: of the cache.
        device: the device of the wrappers; tables on another device are moved to it.
        is_profile_run: there is no cache, and prefill attends to the new tokens only.
        window_left, logits_soft_cap, sm_scale: the planned parameters; `FlashInferImpl` passes its own to each run.
        prefill_over_rows: some new tokens are not stored, and prefill, without a context, reads the new rows instead.

    Raises:
        ValueError: the head_dim is not supported.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Tensor
    multi_modal_placeholder_index_maps: dict[str, Any] | None
    enable_kv_scales_calculation: bool
    max_prefill_seq_len: int
    decode_query_len: int | None = 1
    use_cuda_graph: bool = True
    prefill_wrapper: BatchPrefillWithPagedKVCacheWrapper | None = None
    decode_wrapper: BatchDecodeWithPagedKVCacheWrapper | None = None
    seq_start_loc: Tensor | None = None
    query_start_loc: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens_tensor: Tensor | None = None
    block_table_bound: Tensor | None = None
    paged_kv_indptr: Tensor | None = None
    paged_kv_indices: Tensor | None = None
    paged_kv_last_page_len: Tensor | None = None
    num_qo_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    page_size: int | None = None
    data_type: torch.dtype | None = None
    q_data_type: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_profile_run: bool = False
    window_left: int | None = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    prefill_over_rows: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is not None and self.head_dim not in HEAD_SIZES:
            raise ValueError(f"head_dim = {self.head_dim} is not supported: multiples of 8 up to 256, and 512 are")

    @property
    def prefill_metadata(self) -> FlashInferMetadata | None:
        """This metadata if the step has prefills, else None."""
        return self if self.num_prefills else None

    @property
    def decode_metadata(self) -> FlashInferMetadata | None:
        """This metadata if the step has decodes, else None."""
        return self if self.num_decode_tokens else None

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """The fields by name, not copied, without `skip_fields` and without wrappers, which belong to this process."""
        skipped = {"prefill_wrapper", "decode_wrapper", *(skip_fields or ())}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}

    def begin_forward(self) -> None:
        """Plan the wrappers for this step; a profile run needs no plan.

        Raises:
            ValueError: a table is missing, or tables contradict each other.
            RuntimeError: a wrapper is missing.
        """
        if self.is_profile_run:
            return
        p = self.num_prefills
        if self.num_prefills:
            qo_indptr = self._on_device("query_start_loc")[: p + 1]
            wrapper = self._wrapper("prefill_wrapper")
            plan(wrapper, self._pages(0, p), **self._layer(), qo_indptr=qo_indptr, causal=True)
        if self.num_decode_tokens:
            pages, length = self._pages(p, None), self.decode_query_len or 1
            if pages.batch_size * length != self.num_decode_tokens:
                each = f"{pages.batch_size} requests of decode_query_len = {length} tokens"
                raise ValueError(f"num_decode_tokens = {self.num_decode_tokens}: the tables have {each}")
            plan(self._wrapper("decode_wrapper"), pages, **self._layer(), q_len_per_req=length)

    @cached_property
    def rows_wrapper(self) -> BatchPrefillWithRaggedKVCacheWrapper:
        """A wrapper planned for prefill over the new rows only, which reads no pages."""
        layer = self._layer()
        heads: Heads = layer["heads"]
        indptr = self._on_device("query_start_loc")[: self.num_prefills + 1]
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8, device=self.device))
        counts = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk)
        wrapper.plan(indptr, indptr, *counts, causal=True, q_data_type=layer["q_dtype"])
        return wrapper

    def advance_step(
        self,
        model_input: ModelInput,
        sampled_token_ids: Tensor | None,
        block_size: int,
        num_seqs: int,
        num_queries: int,
        turn_prefills_into_decodes: bool = False,
    ) -> None:
        """Advance every request by one decoded token, in place, without waiting for the device. `begin_forward` plans
        the new step.

        Args:
            model_input: receives the sampled tokens and their positions.
            sampled_token_ids: num_queries tokens, in any shape.
            num_seqs, num_queries: requests with and without padding. Padding gets token 0 at position 0, slot -1 and no
                pages.
            turn_prefills_into_decodes: prefill requests become decode requests.

        Raises:
            ValueError: counts contradict each other, or a table is missing. On the host, also a request that outgrows
                its pages; on a device, its new key and value are not stored.
        """
        self._check_advance(model_input, sampled_token_ids, num_seqs, num_queries, turn_prefills_into_decodes)
        lengths = self._on_device("seq_lens_tensor")[:num_queries]
        block_tables = self._on_device("block_tables")[:num_seqs]
        grown = lengths.new_zeros(num_seqs)
        grown[:num_queries] = lengths + 1
        if not grown.is_cpu:
            # The bound keeps the tables of other requests valid.
            grown.clamp_(max=block_tables.shape[1] * block_size)
        pages = PageTable.from_block_tables(block_tables, grown, block_size)
        indptr, last = self._on_device("paged_kv_indptr"), self._on_device("paged_kv_last_page_len")
        indices, bound = self._on_device("paged_kv_indices"), self._on_device("block_table_bound")

        if turn_prefills_into_decodes:
            self.num_decode_tokens += self.num_prefills
            self.num_prefills = self.num_prefill_tokens = self.max_prefill_seq_len = 0
            self.slot_mapping = self.slot_mapping[:num_seqs]
        page = (lengths // block_size).long()
        block = block_tables[:num_queries].gather(1, page.clamp(max=block_tables.shape[1] - 1)[:, None])[:, 0]
        slots = block.long() * block_size + lengths % block_size
        self.slot_mapping[:num_queries] = slots.where((block >= 0) & (page < block_tables.shape[1]), PAD_SLOT_ID)
        self.slot_mapping[num_queries:num_seqs] = PAD_SLOT_ID
        model_input.input_positions[:num_queries] = lengths
        model_input.input_positions[num_queries:num_seqs] = 0
        assert sampled_token_ids is not None
        model_input.input_tokens[:num_queries] = sampled_token_ids.flatten()
        model_input.input_tokens[num_queries:num_seqs] = 0
        lengths += 1
        bound[:num_seqs] = pages.indptr.diff()
        indptr[: num_seqs + 1] = pages.indptr
        last[:num_seqs] = pages.last_page_len
        entries = min(len(indices), len(pages.indices))
        indices[:entries] = pages.indices[:entries]

    def _check_advance(
        self, model_input: ModelInput, sampled: Tensor | None, num_seqs: int, num_queries: int, with_prefills: bool
    ) -> None:
        """Refuse arguments of `advance_step` that contradict this step."""
        decodes = self.num_decode_tokens + self.num_prefills if with_prefills else self.num_decode_tokens
        if self.decode_query_len != 1:
            raise ValueError(f"decode_query_len = {self.decode_query_len}: only steps of one token can be advanced")
        if self.num_prefills and not with_prefills:
            raise ValueError(f"num_prefills = {self.num_prefills}: only decodes advance, or turn_prefills_into_decodes")
        if num_seqs != decodes:
            raise ValueError(f"num_seqs = {num_seqs}: the step has {decodes} requests")
        if not 0 < num_queries <= num_seqs or (num_queries < num_seqs and not self.use_cuda_graph):
            allowed = (
                f"1 to num_seqs = {num_seqs}" if self.use_cuda_graph else f"num_seqs = {num_seqs}, without a graph"
            )
            raise ValueError(f"num_queries = {num_queries}: it must be {allowed}")
        if sampled is None or sampled.numel() != num_queries:
            count = None if sampled is None else sampled.numel()
            raise ValueError(f"sampled_token_ids has {count} tokens: num_queries = {num_queries} are needed")
        sizes = {
            "input_tokens": (model_input.input_tokens, num_seqs),
            "input_positions": (model_input.input_positions, num_seqs),
            "slot_mapping": (self.slot_mapping, num_seqs),
            "seq_lens_tensor": (self.seq_lens_tensor, num_queries),
            "block_tables": (self.block_tables, num_seqs),
            "block_table_bound": (self.block_table_bound, num_seqs),
            "paged_kv_indptr": (self.paged_kv_indptr, num_seqs + 1),
            "paged_kv_last_page_len": (self.paged_kv_last_page_len, num_seqs),
        }
        for name, (x, needed) in sizes.items():
            if x is None or len(x) < needed:
                raise ValueError(f"{name} has {None if x is None else len(x)} entries: {needed} are needed")

    def _on_device(self, name: str) -> Tensor:
        """A table, moved to the device if it is not there yet."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise ValueError(f"{name} is missing")
        if values.device != self.device:
            values = values.to(self.device, non_blocking=True)
            setattr(self, name, values)
        return values

    def _pages(self, start: int, end: int | None) -> PageTable:
        """The page table of requests start to end."""
        indptr, last = self._on_device("paged_kv_indptr"), self._on_device("paged_kv_last_page_len")
        if self.page_size is None:
            raise ValueError("page_size is missing")
        indptr = indptr[start:] if end is None else indptr[start : end + 1]
        return PageTable(indptr, self._on_device("paged_kv_indices"), last[start:end], self.page_size)

    def _wrapper(self, name: str) -> Any:
        wrapper = getattr(self, name)
        if wrapper is None:
            raise RuntimeError(f"{name} is missing: FlashInferState.begin_forward sets it")
        return wrapper

    def _layer(self) -> dict[str, Any]:
        """The arguments of `quire.steps.plan` that describe the layers."""
        values: list[Any] = []
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "q_data_type", "data_type"):
            values.append(getattr(self, name))
            if values[-1] is None:
                raise ValueError(f"{name} is missing")
        num_qo_heads, num_kv_heads, head_dim, q_dtype, kv_dtype = values
        return {
            "heads": Heads(num_qo_heads, num_kv_heads, head_dim, head_dim),
            "q_dtype": q_dtype,
            "kv_dtype": kv_dtype,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
        }
