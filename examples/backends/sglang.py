"""The shipped model through SGLang's backend, which is made from a model runner and reads SGLang's batches.

SGLang is not needed: this file has objects with the attributes that the backend reads of SGLang's model runner, forward
modes and batches. A step is EXTEND, DECODE or MIXED, depending on its chunks. On a GPU, decodes replay graphs that are
captured once for each power of two of requests; captures and replays are planned by one method.

    python examples/backends/sglang.py --page-size 16 --dtype bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
from common import arguments, compare
from token_pool import KVPool, TokenRunner
from torch import Tensor

from quire.backends.sglang import FlashInferAttnBackend


class ForwardMode(IntEnum):
    """The modes of SGLang that this driver uses."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()

    def is_idle(self) -> bool:
        return False

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    is_decode_or_idle = is_decode


class MHATokenToKVPool(KVPool):
    """A pool whose arguments are layers and scales, as in SGLang."""

    def set_kv_buffer(  # type: ignore[override]
        self, layer: Any, loc: Tensor, k: Tensor, v: Tensor, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        super().set_kv_buffer(layer.layer_id, loc, k, v)


class SGLangRunner(TokenRunner):
    """Calls the backend as SGLang's model runner does."""

    args: Any

    def make_backend(self) -> FlashInferAttnBackend:
        heads = self.model.layers[0].heads
        config = SimpleNamespace(
            num_attention_heads=heads.num_qo_heads,
            get_num_kv_heads=lambda tensor_parallel_size: heads.num_kv_heads // tensor_parallel_size,
            head_dim=heads.head_dim_qk,
            v_head_dim=heads.head_dim_vo,
            context_len=self.width,
            is_encoder_decoder=False,
        )
        model_runner = SimpleNamespace(
            device=self.model.device,
            dtype=self.model.dtype,
            kv_cache_dtype=self.model.dtype,
            sliding_window_size=self.args.window if self.args.window >= 0 else None,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token, size=self.max_reqs),
            token_to_kv_pool=MHATokenToKVPool(self.caches),
            model_config=config,
            tp_size=1,
        )
        return FlashInferAttnBackend(model_runner)

    def make_batch(self, mode: str, **fields: Any) -> Any:
        return SimpleNamespace(forward_mode=ForwardMode[mode], spec_info=None, **fields)

    def prepare_graph(self, batch: Any, in_capture: bool) -> None:
        self.backend.init_forward_metadata_out_graph(batch, in_capture)


def main(argv: Sequence[str] | None = None) -> int:
    return compare(SGLangRunner, arguments(__doc__, argv))


if __name__ == "__main__":
    sys.exit(main())
