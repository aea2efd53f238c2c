"""The shipped model through pymllm's backend, with a `ForwardBatch` for each step and attention over slots.

A step is EXTEND, DECODE or MIXED, depending on its chunks. Prompts without a cached prefix read the new keys as ragged
rows, and chunks after a prefix read the pool. On a GPU, decodes replay graphs that are captured once for each power of
two of requests.

    python examples/backends/pymllm.py --page-size 1 --window 20
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
from common import arguments, compare
from token_pool import TokenRunner

from quire.backends.pymllm import FlashInferAttnBackend, ForwardBatch, ForwardMode


class PymllmRunner(TokenRunner):
    """Calls the backend as pymllm's model runner does."""

    args: Any

    def make_backend(self) -> FlashInferAttnBackend:
        heads = self.model.layers[0].heads
        return FlashInferAttnBackend(
            num_heads=heads.num_qo_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim_qk,
            kv_cache_dtype=self.model.dtype,
            q_dtype=self.model.dtype,
            max_context_len=self.width,
            req_to_token=self.req_to_token,
            device=self.model.device,
            max_req_pool_size=self.max_reqs,
            sliding_window_size=self.args.window if self.args.window >= 0 else None,
        )

    def make_batch(self, mode: str, **fields: Any) -> ForwardBatch:
        return ForwardBatch(ForwardMode[mode], token_to_kv_pool=self.pool, attn_backend=self.backend, **fields)

    def prepare_graph(self, batch: ForwardBatch, in_capture: bool) -> None:
        rows, lengths, mode = batch.req_pool_indices, batch.seq_lens, batch.forward_mode
        bs = batch.batch_size
        if in_capture:
            self.backend.init_forward_metadata_capture_cuda_graph(bs, bs, rows, lengths, mode)
        else:
            host = {"seq_lens_sum": batch.seq_lens_sum, "seq_lens_cpu": batch.seq_lens_cpu}
            self.backend.init_forward_metadata_replay_cuda_graph(bs, rows, lengths, forward_mode=mode, **host)


def main(argv: Sequence[str] | None = None) -> int:
    return compare(PymllmRunner, arguments(__doc__, argv))


if __name__ == "__main__":
    sys.exit(main())
