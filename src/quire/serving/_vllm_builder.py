"""From what vLLM's scheduler says of a step to its metadata; public in `quire.serving.vllm`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.serving._vllm_metadata import (
    PAD_SLOT_ID,
    FlashInferMetadata,
    PerLayerParameters,
    cache_dtype,
    get_per_layer_parameters,
    shared_or_neutral,
)
from quire.serving._vllm_protocols import InputBuilder, PlaceholderMap, SequenceGroup
from quire.serving.base import StepTables, upload


class FlashInferMetadataBuilder:
    """Makes the metadata of steps: `prepare`, then `build`, for each.

    Tables go to the device at once, from pinned memory, and no token is looked at in Python. `block_tables` of a
    sequence are those of all its tokens, also where a window hides some: `advance_step` reads them by position.
    """

    def __init__(self, input_builder: InputBuilder) -> None:
        self.input_builder = input_builder
        self.runner = input_builder.runner
        self.sliding_window = input_builder.sliding_window
        self.block_size = input_builder.block_size
        self.global_hyperparameters: PerLayerParameters | None = None
        self.vllm_config = self.runner.vllm_config

    def prepare(self) -> None:
        """Forget the step before.

        Raises:
            ValueError: the model's layers are missing, or their attention is not computed here.
        """
        self.context_lens: list[int] = []
        self.query_lens: list[int] = []
        self.lengths: list[int] = []
        self.pages: list[array[int]] = []
        self.block_tables: list[array[int]] = []
        self.prefill_seq_lens: list[int] = []
        self.multimodal_placeholder_maps: dict[str, PlaceholderMap] = {}
        self.num_prefills = self.num_prefill_tokens = self.num_decode_tokens = 0
        self.profiled = 0
        if self.global_hyperparameters is None:
            head_dim = self.runner.model_config.get_head_size()
            self.global_hyperparameters = shared_or_neutral(get_per_layer_parameters(self.vllm_config), head_dim)

    def build(
        self, seq_lens: Sequence[int], query_lens: Sequence[int], cuda_graph_pad_size: int, batch_size: int
    ) -> FlashInferMetadata:
        """The metadata of the sequences in `input_builder.inter_data_list`, prompts first.

        Args:
            seq_lens: their lengths, and one for each request of padding.
            query_lens: their new tokens.
            cuda_graph_pad_size: requests of padding; -1: no graph is used.
            batch_size: new tokens and padding, where a graph is used.

        Raises:
            ValueError: counts that contradict each other, fewer pages than tokens, pages beyond the cache, or more
                requests than were made room for in graphs.
        """
        for group in self.input_builder.inter_data_list:
            self._add_seq_group(group, self.input_builder.chunked_prefill_enabled)
        padding = max(cuda_graph_pad_size, 0)
        self._check(seq_lens, query_lens, cuda_graph_pad_size, batch_size)
        decode_query_len = max(self.query_lens[self.num_prefills :], default=1)
        model, parallel = self.runner.model_config, self.runner.parallel_config
        params = self.global_hyperparameters
        assert params is not None
        starts = np.fromiter(accumulate(seq_lens, initial=0), dtype=np.int32)
        metadata = FlashInferMetadata(
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens + padding,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            multi_modal_placeholder_index_maps={k: m.index_map() for k, m in self.multimodal_placeholder_maps.items()},
            enable_kv_scales_calculation=False,
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            decode_query_len=decode_query_len,
            use_cuda_graph=cuda_graph_pad_size != -1,
            seq_start_loc=upload(starts, self.runner.device),
            num_qo_heads=model.get_num_attention_heads(parallel),
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_dim=model.get_head_size(),
            page_size=self.block_size,
            data_type=cache_dtype(self.runner.kv_cache_dtype, model.dtype),
            q_data_type=model.dtype,
            device=self.runner.device,
            is_profile_run=self.profiled > 0,
            window_left=params.window_left,
            logits_soft_cap=params.logits_soft_cap,
            sm_scale=params.sm_scale,
        )
        self._tables_of_profile(metadata) if self.profiled else self._tables(metadata, padding)
        return metadata

    def _add_seq_group(self, inter_data: SequenceGroup, chunked_prefill_enabled: bool) -> None:
        """Take note of a request's sequences."""
        tables = inter_data.block_tables
        profiled = tables is None or all(own is None for own in tables.values())
        for i, seq_id in enumerate(inter_data.seq_ids):
            context, count, total = (
                x[i] for x in (inter_data.context_lens, inter_data.query_lens, inter_data.orig_seq_lens)
            )
            if len(inter_data.input_tokens[i]) != count or context + count != total:
                tokens = len(inter_data.input_tokens[i])
                raise ValueError(
                    f"sequence {seq_id}: {tokens} input tokens, {context} context and {count} query tokens of {total}"
                )
            self.context_lens.append(context)
            self.query_lens.append(count)
            if inter_data.is_prompt:
                if self.num_decode_tokens:
                    raise ValueError(f"sequence {seq_id} is a prompt after sequences that decode: prompts come first")
                self.num_prefills += 1
                self.num_prefill_tokens += count
                self.prefill_seq_lens.append(total)
                for modality, placeholders in (inter_data.multi_modal_placeholder_maps or {}).items():
                    self.multimodal_placeholder_maps.setdefault(modality, type(placeholders)()).extend(placeholders)
            else:
                self.num_decode_tokens += count
            self.profiled += profiled
            pages = self._update_paged_kv_tensors((tables or {}).get(seq_id) or (), total)
            if inter_data.prefix_cache_hit:
                found = array("i", inter_data.computed_block_nums or ())
                self.block_tables.append(found + pages[len(found) :])
            else:
                shown = chunked_prefill_enabled or not inter_data.is_prompt
                self.block_tables.append(pages if shown else array("i"))

    def _update_paged_kv_tensors(self, block_table: Sequence[int], seq_len: int) -> array[int]:
        """Take note of a sequence's pages, the first of which hold so many tokens."""
        pages = array("i", block_table)  # one pass in C; all that follows copies memory
        self.pages.append(pages)
        self.lengths.append(seq_len)
        return pages

    def _check(self, seq_lens: Sequence[int], query_lens: Sequence[int], pad_size: int, batch_size: int) -> None:
        """Refuse arguments of `build` that contradict the sequences."""
        count, padding = len(self.query_lens), max(pad_size, 0)
        decodes = self.query_lens[self.num_prefills :]
        if list(query_lens) != self.query_lens or len(seq_lens) != count + padding:
            what = f"{len(query_lens)} query_lens and {len(seq_lens)} seq_lens"
            raise ValueError(
                f"{what} do not fit {count} sequences of {self.query_lens} tokens and {padding} of padding"
            )
        if len(set(decodes)) > 1:
            raise ValueError(f"query_lens of sequences that decode differ: {decodes}")
        if self.profiled not in (0, count) or (self.profiled and decodes):
            raise ValueError(
                f"{self.profiled} of {count} sequences have no block table: a profile run has prompts alone"
            )
        if pad_size == -1:
            return
        tokens = self.num_prefill_tokens + self.num_decode_tokens
        if batch_size != tokens + padding:
            raise ValueError(f"batch_size = {batch_size}: there are {tokens} tokens and {padding} of padding")
        if decodes and decodes[0] != 1:
            raise ValueError(f"cuda_graph_pad_size = {pad_size}: graphs decode one token, and not {decodes[0]}")
        if count + padding > len(self.runner.graph_block_tables):
            room = len(self.runner.graph_block_tables)
            raise ValueError(f"{count + padding} sequences, with padding, are more than graphs were made for: {room}")

    def _tables_of_profile(self, metadata: FlashInferMetadata) -> None:
        """Tables of prompts that are stored nowhere."""
        device = self.runner.device
        ends = np.fromiter(accumulate(self.query_lens, initial=0), dtype=np.int32)
        metadata.query_start_loc = upload(ends, device)
        metadata.slot_mapping = torch.full((int(ends[-1]),), PAD_SLOT_ID, dtype=torch.int64, device=device)
        metadata.seq_lens_tensor = upload(np.array(self.prefill_seq_lens, dtype=np.int32), device)

    def _tables(self, metadata: FlashInferMetadata, padding: int) -> None:
        """Tables of sequences that have pages."""
        count = len(self.query_lens)
        cache = getattr(self.runner, "cache_config", None)  # only to check page ids
        num_pages, device = getattr(cache, "num_gpu_blocks", None), self.runner.device
        tables = StepTables.from_host(
            self.pages, self.lengths, self.query_lens, self.block_size, num_pages, device, pad_to=count + padding
        )
        self._hide(metadata, tables.slots)
        spare = sum(map(len, self.pages)) - len(tables.pages.indices)  # pages that advance_step may come to need
        metadata.slot_mapping = pad(tables.slots, (0, padding), value=PAD_SLOT_ID) if padding else tables.slots
        metadata.query_start_loc, metadata.seq_lens_tensor = tables.qo_indptr, tables.lengths
        metadata.paged_kv_indptr, metadata.paged_kv_last_page_len = tables.pages.indptr, tables.pages.last_page_len
        metadata.paged_kv_indices = pad(tables.pages.indices, (0, spare)) if spare else tables.pages.indices
        metadata.block_table_bound = tables.pages.indptr.diff()
        metadata.block_tables = upload(self._padded(metadata.use_cuda_graph, count + padding), device)

    def _hide(self, metadata: FlashInferMetadata, slots: Tensor) -> None:
        """Give tokens of prompts that no later token sees no slot. The prompts' own then see rows, not pages; which is
        why all are stored where one has a context. What the cache holds in their places must be finite.
        """
        if self.sliding_window is None or any(self.context_lens[: self.num_prefills]):
            return
        if metadata.window_left is None or not 0 <= metadata.window_left < self.sliding_window:
            return  # some layer sees further
        begin = 0
        for count in self.query_lens[: self.num_prefills]:
            if count > self.sliding_window:
                slots[begin : begin + count - self.sliding_window] = PAD_SLOT_ID
                metadata.prefill_over_rows = True
            begin += count

    def _padded(self, captured: bool, rows: int) -> np.ndarray:
        """The block tables in one matrix, the runner's own for graphs; -1 behind their ends."""
        width = max(map(len, self.block_tables), default=0)
        matrix = self.runner.graph_block_tables[:rows] if captured else np.empty((rows, width), dtype=np.int32)
        matrix.fill(-1)
        for row, own in zip(matrix, self.block_tables, strict=False):
            row[: len(own)] = own[: len(row)]
        return matrix
