"""The metadata of a step, built from the sequence groups of vLLM's scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.backends.vllm.metadata import (
    PAD_SLOT_ID,
    FlashInferMetadata,
    PerLayerParameters,
    get_per_layer_parameters,
    model_fields,
    shared_or_neutral,
)
from quire.backends.vllm.protocols import InputBuilder, PlaceholderMap, SequenceGroup
from quire.steps import StepTables, upload


class FlashInferMetadataBuilder:
    """Builds the metadata of each step: `prepare`, then `build`.

    Tables are copied to the device from pinned memory, and no Python loop visits tokens. The block table of a sequence
    covers all its tokens, including those outside a sliding window, since `advance_step` indexes it by position.
    """

    def __init__(self, input_builder: InputBuilder) -> None:
        self.input_builder = input_builder
        self.runner = input_builder.runner
        self.sliding_window = input_builder.sliding_window
        self.block_size = input_builder.block_size
        self.global_hyperparameters: PerLayerParameters | None = None
        self.vllm_config = self.runner.vllm_config

    def prepare(self) -> None:
        """Clear the lists of the previous step.

        Raises:
            ValueError: the model has no attention layers, or one whose impl is not a FlashInferImpl.
        """
        self.context_lens: list[int] = []
        self.query_lens: list[int] = []
        self.lengths: list[int] = []
        self.pages: list[array[int]] = []
        self.block_tables: list[array[int]] = []
        self.prefill_seq_lens: list[int] = []
        self.multimodal_placeholder_maps: dict[str, PlaceholderMap] = {}
        self.num_prefills = self.num_prefill_tokens = self.num_decode_tokens = 0
        # The number of sequences without a block table.
        self.profiled = 0
        if self.global_hyperparameters is None:
            head_dim = self.runner.model_config.get_head_size()
            self.global_hyperparameters = shared_or_neutral(get_per_layer_parameters(self.vllm_config), head_dim)

    def build(
        self, seq_lens: Sequence[int], query_lens: Sequence[int], cuda_graph_pad_size: int, batch_size: int
    ) -> FlashInferMetadata:
        """The metadata of the sequences in `input_builder.inter_data_list`, prompts first.

        Args:
            seq_lens: the lengths of the sequences, and one entry for each request of padding.
            query_lens: the numbers of new tokens of the sequences.
            cuda_graph_pad_size: the number of requests of padding; -1: the step does not use a graph.
            batch_size: the number of new tokens and of requests of padding, if the step uses a graph.

        Raises:
            ValueError: counts contradict each other, a sequence has fewer pages than its tokens need, a page is outside
                the cache, or the batch is larger than `runner.graph_block_tables`.
        """
        for group in self.input_builder.inter_data_list:
            self._add_seq_group(group, self.input_builder.chunked_prefill_enabled)
        padding = max(cuda_graph_pad_size, 0)
        self._check(seq_lens, query_lens, cuda_graph_pad_size, batch_size)
        decode_query_len = max(self.query_lens[self.num_prefills :], default=1)
        assert self.global_hyperparameters is not None
        starts = np.fromiter(accumulate(seq_lens, initial=0), dtype=np.int32)
        metadata = FlashInferMetadata(
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens + padding,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            multi_modal_placeholder_index_maps={k: m.index_map() for k, m in self.multimodal_placeholder_maps.items()},
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            decode_query_len=decode_query_len,
            use_cuda_graph=cuda_graph_pad_size != -1,
            seq_start_loc=upload(starts, self.runner.device),
            page_size=self.block_size,
            is_profile_run=self.profiled > 0,
            **model_fields(self.runner, self.global_hyperparameters),
        )
        if self.profiled:
            self._set_profile_tables(metadata)
        else:
            self._set_tables(metadata, padding)
        return metadata

    def _add_seq_group(self, inter_data: SequenceGroup, chunked_prefill_enabled: bool) -> None:
        """Add the sequences of a request to the lists of the step."""
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
                cached = array("i", inter_data.computed_block_nums or ())
                self.block_tables.append(cached + pages[len(cached) :])
            else:
                needed = chunked_prefill_enabled or not inter_data.is_prompt
                self.block_tables.append(pages if needed else array("i"))

    def _update_paged_kv_tensors(self, block_table: Sequence[int], seq_len: int) -> array[int]:
        """Add the pages of a sequence of seq_len tokens to the lists of the step."""
        # This converts in C, and later steps only copy memory.
        pages = array("i", block_table)
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
            capacity = len(self.runner.graph_block_tables)
            raise ValueError(
                f"{count + padding} sequences, with padding, are more than graphs were made for: {capacity}"
            )

    def _set_profile_tables(self, metadata: FlashInferMetadata) -> None:
        """Set the tables of a profile run, whose keys and values are not stored."""
        device = self.runner.device
        indptr = np.fromiter(accumulate(self.query_lens, initial=0), dtype=np.int32)
        metadata.query_start_loc = upload(indptr, device)
        metadata.slot_mapping = torch.full((int(indptr[-1]),), PAD_SLOT_ID, dtype=torch.int64, device=device)
        metadata.seq_lens_tensor = upload(np.array(self.prefill_seq_lens, dtype=np.int32), device)

    def _set_tables(self, metadata: FlashInferMetadata, padding: int) -> None:
        """Set the tables of sequences that have pages."""
        count = len(self.query_lens)
        # A runner may lack a cache_config, whose size bounds page ids.
        cache = getattr(self.runner, "cache_config", None)
        num_pages, device = getattr(cache, "num_gpu_blocks", None), self.runner.device
        tables = StepTables.from_host(
            self.pages, self.lengths, self.query_lens, self.block_size, num_pages, device, pad_to=count + padding
        )
        self._skip_hidden(metadata, tables.slots)
        # advance_step may fill this number of further entries.
        spare = sum(map(len, self.pages)) - len(tables.pages.indices)
        metadata.slot_mapping = pad(tables.slots, (0, padding), value=PAD_SLOT_ID) if padding else tables.slots
        metadata.query_start_loc, metadata.seq_lens_tensor = tables.qo_indptr, tables.lengths
        metadata.paged_kv_indptr, metadata.paged_kv_last_page_len = tables.pages.indptr, tables.pages.last_page_len
        metadata.paged_kv_indices = pad(tables.pages.indices, (0, spare)) if spare else tables.pages.indices
        metadata.block_table_bound = tables.pages.indptr.diff()
        metadata.block_tables = upload(self._padded(metadata.use_cuda_graph, count + padding), device)

    def _skip_hidden(self, metadata: FlashInferMetadata, slots: Tensor) -> None:
        """Set the slot of prompt tokens that no later step sees through the sliding window to -1. Tokens of the same
        prompt still see them, so prefill then reads the new rows instead of pages, which is correct only if no prompt
        has a context. The cache must hold finite values in the unused slots.
        """
        if self.sliding_window is None or any(self.context_lens[: self.num_prefills]):
            return
        if metadata.window_left is None or not 0 <= metadata.window_left < self.sliding_window:
            # A layer has a wider window.
            return
        start = 0
        for count in self.query_lens[: self.num_prefills]:
            if count > self.sliding_window:
                slots[start : start + count - self.sliding_window] = PAD_SLOT_ID
                metadata.prefill_over_rows = True
            start += count

    def _padded(self, captured: bool, rows: int) -> np.ndarray:
        """The block tables in one matrix, padded with -1; for graphs in the matrix of the runner."""
        width = max(map(len, self.block_tables), default=0)
        matrix = self.runner.graph_block_tables[:rows] if captured else np.empty((rows, width), dtype=np.int32)
        matrix.fill(-1)
        for row, own in zip(matrix, self.block_tables, strict=False):
            row[: len(own)] = own[: len(row)]
        return matrix
