"""From what vLLM knows of a step to the launches of its attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from quire.definition.checks import check
from quire.integrations.vllm.launches import DECODE_ROWS, AttentionLaunch, Wrappers

# The fewest tokens of a prefix, and the fewest requests that share it, for which the prefix is read once for all of
# them. A shorter prefix stays in the L2 cache, and merging two results takes longer than reading it again.
_MIN_PREFIX, _MIN_REQUESTS = 256, 8
# The most requests of the launches that warm up. Kernels are compiled anew for every doubling of the batch size beyond.
_WARM_UP_REQUESTS = 32


@dataclass
class QuireMetadata(AttentionMetadata):
    """A step, for the layers of a group. The names of its first fields are those of vLLM's own backends.

    Attributes:
        launches: what computes the step, in this order.
        cascade: a prefix that all requests share is computed by the first launch, and what follows it by the second.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    launches: list[AttentionLaunch] = field(default_factory=list)
    cascade: bool = False


class QuireMetadataBuilder(AttentionMetadataBuilder[QuireMetadata]):
    """Prepares the steps of a group of layers with equal caches.

    Block table, lengths and offsets are vLLM's own tensors, which kernels read where they are. So a step costs no
    launch and no copy, nothing waits for the device, and a CUDA graph sees later steps.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    # Launches read vLLM's tensors, so that the next step of a draft model needs no new metadata.
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.block_size: int = kv_cache_spec.block_size
        self._wrappers = Wrappers(device, bool(envs.VLLM_BATCH_INVARIANT))
        # Whether a step has been built.
        self._is_warm = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> QuireMetadata:
        """The metadata of a step.

        Args:
            common_prefix_len: tokens that all requests share, where `use_cascade_attention` wants to know; or 0.
            fast_build: accepted.

        Raises:
            ValueError: requests of one batch of which some are causal and others are not.
        """
        m = common_attn_metadata
        metadata = self._metadata(m)
        if common_prefix_len > 0:
            metadata.launches, metadata.cascade = self._cascade(common_prefix_len, metadata), True
            return metadata
        decodes, longest = self._num_decodes(m), metadata.max_query_len
        if not self._is_warm:
            metadata.launches += self._warm_up(metadata, m)
            self._is_warm = True
        if decodes == m.num_reqs:
            metadata.launches.append(self._launch("decode", metadata, 0, m.num_reqs, longest))
            return metadata
        # A launch clears the rows that are not its own. So decodes, which are given their rows alone, come last.
        metadata.launches.append(self._launch("extend", metadata, decodes, m.num_reqs, longest))
        if decodes:
            end = int(m.query_start_loc_cpu[decodes])
            metadata.launches.append(self._launch("decode", metadata, 0, decodes, self.reorder_batch_threshold, end))
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> QuireMetadata:
        """The metadata of a step that is captured. Where graphs of mixed batches are wanted, the lengths of queries are
        not known: other batches of as many tokens replay the graph.
        """
        # vLLM derives builders from this one that replace `build` alone. The launches of a first step are not captured.
        is_warm, self._is_warm = self._is_warm, True
        metadata = self.build(0, common_attn_metadata)
        self._is_warm = is_warm
        num_reqs = common_attn_metadata.num_reqs
        mixed = self.vllm_config.compilation_config.cudagraph_mode.mixed_mode()
        if mixed is not None and mixed.name == "FULL":
            launch = self._launch("extend", metadata, 0, num_reqs, None)
        else:
            launch = self._launch("decode", metadata, 0, num_reqs, metadata.max_query_len)
        metadata.launches = [launch]
        return metadata

    def update_draft_decode_metadata(self, metadata: QuireMetadata) -> None:
        """Nothing: launches read vLLM's tensors where they are."""

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether a shared prefix is computed once for all requests: if it is long, several requests share it, and the
        layers have neither ALiBi nor windows (vLLM 0.26, with `disable_cascade_attn=False`).
        """
        if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
            return False
        return common_prefix_len >= _MIN_PREFIX and len(query_lens) >= _MIN_REQUESTS

    def _metadata(self, m: Any) -> QuireMetadata:
        check(isinstance(m.causal, bool), "causal", type(m.causal).__name__, "a bool, the same for all requests")
        # In chunked attention, max_query_len is a NumPy scalar.
        return QuireMetadata(
            m.num_actual_tokens, int(m.max_query_len), m.query_start_loc, m.max_seq_len, m.seq_lens,
            m.block_table_tensor, m.slot_mapping, m.causal,
        )  # fmt: skip

    def _num_decodes(self, m: Any) -> int:
        """The number of requests, from the first on, that have as few query tokens as decodes."""
        threshold = self.reorder_batch_threshold
        if m.max_query_len <= threshold:
            return int(m.num_reqs)
        offsets = m.query_start_loc_cpu.numpy()
        longer = offsets[1 : m.num_reqs + 1] - offsets[: m.num_reqs] > threshold
        return int(longer.argmax())

    def _warm_up(self, metadata: QuireMetadata, m: Any) -> list[AttentionLaunch]:
        """Launches for a few requests of the first step, planned as for prompts of several lengths. They compile the
        kernels before the first prompt: vLLM's own warm-up steps have prompts of two tokens or none. The launches of
        the step itself come later, and overwrite the output.
        """
        end, lengths = min(m.num_reqs, _WARM_UP_REQUESTS), (2, 4, 8, 16, 32, DECODE_ROWS)
        longer = [length for length in lengths if length >= m.max_query_len]
        return [self._launch("extend", metadata, 0, end, length) for length in (None, *longer)]

    def _launch(
        self, role: str, metadata: QuireMetadata, start: int, end: int, max_q_len: int | None, tokens: int | None = None
    ) -> AttentionLaunch:
        """The launch for requests `start` to `end`, of the first `tokens` tokens or of all."""
        tables = metadata.block_table[start:end], metadata.seq_lens[start:end]
        offsets = metadata.query_start_loc[start : end + 1]
        return AttentionLaunch(self._wrappers, role, tables, offsets, max_q_len, tokens, causal=metadata.causal)

    def _cascade(self, prefix: int, metadata: QuireMetadata) -> list[AttentionLaunch]:
        """The launches for a shared prefix, as of one request with all query tokens, and for what follows it."""
        pages, offsets = prefix // self.block_size, metadata.query_start_loc
        lengths = metadata.seq_lens[:1] * 0 + prefix
        whole = offsets[:: offsets.shape[0] - 1].contiguous()
        shared = metadata.block_table[:1, :pages], lengths
        rest = metadata.block_table[:, pages:], metadata.seq_lens - prefix
        return [
            AttentionLaunch(self._wrappers, "prefix", shared, whole, None, causal=False),
            AttentionLaunch(self._wrappers, "suffix", rest, offsets, metadata.max_query_len, causal=metadata.causal),
        ]
