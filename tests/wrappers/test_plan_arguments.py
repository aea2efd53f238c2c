"""Each argument of every `plan` arrives in the planned layer or tables, in its own place and in no other."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from inspect import signature
from typing import Any

import pytest
import torch

import quire
from quire.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from quire.mla import BatchMLAPagedAttentionWrapper
from quire.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from quire.wrappers.mla_decode import BatchDecodeMlaWithPagedKVCacheWrapper

F16, BF16 = torch.float16, torch.bfloat16
F32, F8 = torch.float32, torch.float8_e4m3fn


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan_of(outer: Any) -> Any:
    """The method that plans: wrappers of a shared prefix have its older name alone."""
    return getattr(outer, "plan", None) or outer.begin_forward


def planned(make: Any, given: dict[str, Any]) -> dict[str, Any]:
    """All that a plan says: the settings of its layer, those of masks by their own names, and its tables. Of a wrapper
    that uses several others, the names of each begin with its number.
    """
    outer = make()
    plan_of(outer)(**given)
    wrappers = getattr(outer, "_wrappers", (outer,))
    if len(wrappers) == 1:
        return settings(wrappers[0].planned)
    return {f"{i}.{name}": x for i, wrapper in enumerate(wrappers) for name, x in settings(wrapper.planned).items()}


def settings(plan: Any) -> dict[str, Any]:
    layer = {name: x for name, x in asdict(plan.spec).items() if name not in ("text", "_hash")}
    mask = layer.pop("mask")
    pages = None if not hasattr(plan.kv, "page_size") else plan.kv.page_size
    tables = {"qo": plan.qo.indptr.tolist(), "kv": plan.kv.indptr.tolist(), "lengths": plan.kv.lengths().tolist()}
    tables["indices"] = plan.kv.indices.tolist() if pages else None
    return {**layer, **mask, "page_size": pages, "max_q_len": plan.max_q_len, **tables}


def both(changes: dict[str, Any], *without: str) -> dict[str, Any]:
    """Changes that a plan of two wrappers makes in both."""
    return {
        name: (value, {f"{i}.{key}": x for i in (0, 1) for key, x in expected.items()})
        for name, (value, expected) in changes.items()
        if name not in without
    }


def part(changes: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: changes[name] for name in names}


# For each argument of a plan: another value, and what then changes, by its name in `planned`. Sizes of heads change the
# default of the scale as well, so that all plans give one.
HEADS: dict[str, Any] = {
    "num_qo_heads": (8, {"num_qo_heads": 8}),
    "num_kv_heads": (4, {"num_kv_heads": 4}),
    "sm_scale": (0.25, {"sm_scale": 0.25}),
    "logits_soft_cap": (3.0, {"logits_soft_cap": 3.0}),
}
LAYER = HEADS | {
    "head_dim_vo": (32, {"head_dim_vo": 32}),
    "pos_encoding_mode": ("ALIBI", {"pos_encoding": "ALIBI"}),
    "window_left": (7, {"window_left": 7}),
    "rope_scale": (2.0, {"rope_scale": 2.0}),
    "rope_theta": (5e5, {"rope_theta": 5e5}),
    "q_data_type": ("bfloat16", {"q_dtype": BF16, "kv_dtype": BF16, "o_dtype": BF16}),
    "kv_data_type": ("float8_e4m3fn", {"kv_dtype": F8}),
    "o_data_type": ("float32", {"o_dtype": F32}),
    "fixed_split_size": (512, {"batch_invariant": True}),
    "disable_split_kv": (True, {"batch_invariant": True}),
    "alibi_slopes": ([0.5, 0.25, 0.125, 0.0625], {"slopes": (0.5, 0.25, 0.125, 0.0625)}),
}
PREFILL = LAYER | {
    "head_dim_qk": (128, {"head_dim_qk": 128}),
    "causal": (True, {"causal": True}),
    "window_right": (3, {"window_right": 3}),
    "custom_mask": (torch.ones(3 * 7 + 2 * 16, dtype=torch.bool), {"custom_mask": True}),
    "packed_custom_mask": (torch.ones(7, dtype=torch.uint8), {"custom_mask": True}),
    "token_pos_in_items_ptr": (ints(*range(20)), {"items": True, "causal": True}),
    "max_token_per_sequence": (9, {"max_q_len": 9}),
    "qo_indptr": (ints(0, 2, 5), {"qo": [0, 2, 5]}),
}
TABLES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "sm_scale": 0.5}
PAGED = TABLES | {"page_size": 16}
DEFAULT_SCALE = {name: x for name, x in PAGED.items() if name != "sm_scale"}
DECODE_GIVEN = PAGED | {
    "head_dim": 64, "head_dim_vo": 64, "indptr": ints(0, 1, 2), "indices": ints(3, 5), "last_page_len": ints(7, 16),
}  # fmt: skip
DECODE_ROWS = LAYER | {
    "head_dim": (128, {"head_dim_qk": 128}),
    "data_type": ("bfloat16", {"q_dtype": BF16, "kv_dtype": BF16, "o_dtype": BF16}),
    "is_causal": (False, {"causal": False}),
    "q_len_per_req": (2, {"qo": [0, 2, 4], "max_q_len": 2}),
    "page_size": (32, {"page_size": 32}),
    "indptr": (ints(0, 0, 2), {"kv": [0, 0, 2], "lengths": [0, 32]}),
    "indices": (ints(4, 6), {"indices": [4, 6]}),
    "last_page_len": (ints(5, 6), {"lengths": [5, 6]}),
}
PREFILL_GIVEN = PAGED | {
    "head_dim_qk": 64, "head_dim_vo": 64, "qo_indptr": ints(0, 3, 5), "paged_kv_indptr": ints(0, 1, 2),
    "paged_kv_indices": ints(3, 5), "paged_kv_last_page_len": ints(7, 16),
}  # fmt: skip
PREFILL_ROWS = PREFILL | {
    "page_size": (32, {"page_size": 32}),
    "paged_kv_indptr": (ints(0, 0, 2), {"kv": [0, 0, 2], "lengths": [0, 32]}),
    "paged_kv_indices": (ints(4, 6), {"indices": [4, 6]}),
    "paged_kv_last_page_len": (ints(5, 6), {"lengths": [5, 6]}),
}
LATENT: dict[str, Any] = {"sm_scale": 0.5, "page_size": 16}
HINTS = "a hint of FlashInfer's: kernels read the tables"
COPIES = "how tables are copied"
ITEMS = "data of items, which count with token_pos_in_items_ptr"
INERT = {
    "non_blocking": COPIES, "block_tables": HINTS, "seq_lens": HINTS, "seq_lens_q": HINTS, "max_sequence_kv": HINTS,
    "use_fp16_qk_reduction": HINTS, "prefix_len_ptr": ITEMS, "token_pos_in_items_len": ITEMS,
    "max_item_len_ptr": ITEMS,
}  # fmt: skip
BLOCK_TABLES_LACK = ("pos_encoding_mode", "rope_scale", "rope_theta", "fixed_split_size", "disable_split_kv")
REFUSED = "refused: its other values are not supported"
BUFFER = torch.empty(1 << 20, dtype=torch.uint8)
WRAPPERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "decode": (
        lambda: quire.BatchDecodeWithPagedKVCacheWrapper(BUFFER),
        DECODE_GIVEN,
        DECODE_ROWS,
        {"non_blocking": COPIES, "block_tables": HINTS, "seq_lens": HINTS, "window_right": REFUSED,
         "shared_prefix": "tests/wrappers/test_shared_prefix.py"},
    ),
    "prefill": (
        lambda: quire.BatchPrefillWithPagedKVCacheWrapper(BUFFER),
        PREFILL_GIVEN,
        PREFILL_ROWS,
        INERT,
    ),
    "ragged": (
        lambda: quire.BatchPrefillWithRaggedKVCacheWrapper(BUFFER),
        TABLES | {"head_dim_qk": 64, "head_dim_vo": 64, "qo_indptr": ints(0, 3, 5), "kv_indptr": ints(0, 7, 23)},
        PREFILL | {"kv_indptr": (ints(0, 6, 20), {"kv": [0, 6, 20], "lengths": [6, 14]})},
        {name: why for name, why in INERT.items() if name != "block_tables"}
        | {"v_indptr": REFUSED, "o_indptr": REFUSED},
    ),
    "mixed": (
        lambda: quire.BatchAttention(device="cpu"),
        PAGED | {"head_dim_qk": 64, "head_dim_vo": 64, "q_data_type": F16, "kv_data_type": F16,
                 "qo_indptr": ints(0, 3, 5), "kv_indptr": ints(0, 1, 2), "kv_indices": ints(3, 5, 8),
                 "kv_len_arr": ints(7, 16)},
        HEADS | {
            "head_dim_qk": (128, {"head_dim_qk": 128}),
            "head_dim_vo": (32, {"head_dim_vo": 32}),
            "causal": (True, {"causal": True}),
            "kv_data_type": (F8, {"kv_dtype": F8}),
            "page_size": (32, {"page_size": 32}),
            "qo_indptr": (ints(0, 2, 5), {"qo": [0, 2, 5]}),
            "kv_indptr": (ints(0, 2, 3), {"indices": [3, 8]}),
            "kv_indices": (ints(4, 6, 8), {"indices": [4, 6]}),
            "kv_len_arr": (ints(5, 6), {"lengths": [5, 6]}),
        },
        {"use_profiler": REFUSED, "q_data_type": "changes with kv_data_type: the other wrappers have it"},
    ),
    "block tables": (
        lambda: quire.BlockTableAttention(BUFFER),
        PAGED | {"head_dim_qk": 64, "head_dim_vo": 64, "q_data_type": F16, "seq_lens": ints(7, 16),
                 "block_tables": ints(3, 0, 5, 0).view(2, 2)},
        {name: row for name, row in LAYER.items() if name not in BLOCK_TABLES_LACK} | {
            "head_dim_qk": (128, {"head_dim_qk": 128}),
            "causal": (False, {"causal": False}),
            "window_right": (3, {"window_right": 3}),
            "alibi_slopes": ([0.5, 0.25, 0.125, 0.0625],
                             {"slopes": (0.5, 0.25, 0.125, 0.0625), "pos_encoding": "ALIBI"}),
            "qo_indptr": (ints(0, 2, 5), {"qo": [0, 2, 5], "max_q_len": 0}),
            "q_len_per_req": (2, {"qo": [0, 2, 4], "max_q_len": 2}),
            "page_size": (32, {"page_size": 32}),
            "block_tables": (ints(4, 0, 6, 0).view(2, 2), {"indices": [4, 6, 0, 0]}),
            "seq_lens": (ints(5, 6), {"lengths": [5, 6]}),
        },
        {"max_q_len": "counts with qo_indptr: tests/face/test_block_tables.py"},
    ),
    "mla": (
        lambda: BatchMLAPagedAttentionWrapper(BUFFER),
        LATENT | {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "causal": False, "q_data_type": BF16,
                  "kv_data_type": BF16, "qo_indptr": ints(0, 3, 5), "kv_indptr": ints(0, 1, 2),
                  "kv_indices": ints(3, 5, 8), "kv_len_arr": ints(7, 16)},
        {
            "num_heads": (32, {"num_qo_heads": 32}),
            "head_dim_ckv": (256, {"head_dim_qk": 320, "head_dim_vo": 256}),
            "head_dim_kpe": (0, {"head_dim_qk": 512, "latent": False}),
            "sm_scale": (0.25, {"sm_scale": 0.25}),
            "causal": (True, {"causal": True}),
            "kv_data_type": (F8, {"kv_dtype": F8}),
            "output_dtype": (F32, {"o_dtype": F32}),
            "page_size": (32, {"page_size": 32}),
            "qo_indptr": (ints(0, 2, 5), {"qo": [0, 2, 5]}),
            "kv_indptr": (ints(0, 2, 3), {"indices": [3, 8]}),
            "kv_indices": (ints(4, 6, 8), {"indices": [4, 6]}),
            "kv_len_arr": (ints(5, 6), {"lengths": [5, 6]}),
        },
        {
            **dict.fromkeys(("metadata", "cum_seq_lens_q", "block_tables", "seq_lens"), "other forms of the tables"),
            **dict.fromkeys(("max_q_len", "query_layout", "kv_cache_layout", "enable_pdl"), HINTS),
            **dict.fromkeys(("use_profiler", "output_scale", "scale_mode", "skip_softmax"), REFUSED),
            **dict.fromkeys(("lse_mode", "use_sinks"), "what runs may ask for: tests/face/test_mla.py"),
            "q_data_type": "changes with kv_data_type: the other wrappers have it",
        },
    ),
    "mla decode": (
        lambda: BatchDecodeMlaWithPagedKVCacheWrapper(BUFFER),
        LATENT | {"num_qo_heads": 16, "head_dim_compressed_kv": 512, "data_type": BF16, "indptr": ints(0, 1, 2),
                  "indices": ints(3, 5), "last_page_len": ints(7, 16)},
        {
            "num_qo_heads": (32, {"num_qo_heads": 32}),
            "head_dim_compressed_kv": (256, {"head_dim_qk": 320, "head_dim_vo": 256}),
            "sm_scale": (0.25, {"sm_scale": 0.25}),
            "window_left": (7, {"window_left": 7}),
            "logits_soft_cap": (3.0, {"logits_soft_cap": 3.0}),
            "data_type": (F16, {"q_dtype": F16, "kv_dtype": F16, "o_dtype": F16}),
            "page_size": (32, {"page_size": 32}),
            "indptr": (ints(0, 0, 2), {"kv": [0, 0, 2], "lengths": [0, 32]}),
            "indices": (ints(4, 6), {"indices": [4, 6]}),
            "last_page_len": (ints(5, 6), {"lengths": [5, 6]}),
        },
        {"rope_scale": HINTS, "rope_theta": HINTS, "q_data_type": "changes with data_type: the other wrappers have it"},
    ),
    "sink": (
        lambda: quire.BatchAttentionWithAttentionSinkWrapper(BUFFER),
        PREFILL_GIVEN,
        PREFILL_ROWS,
        INERT,
    ),
    "cascade": (
        lambda: MultiLevelCascadeAttentionWrapper(2, BUFFER),
        PAGED | {"head_dim": 64, "qo_indptr_arr": [ints(0, 5), ints(0, 3, 5)],
                 "paged_kv_indptr_arr": [ints(0, 2), ints(0, 1, 2)], "paged_kv_indices_arr": [ints(1, 2), ints(3, 5)],
                 "paged_kv_last_page_len": [ints(9), ints(7, 16)]},
        both(part(LAYER, "num_qo_heads", "num_kv_heads", "sm_scale", "logits_soft_cap", "pos_encoding_mode",
                  "window_left", "rope_scale", "rope_theta", "kv_data_type")) | {
            "head_dim": (128, {f"{i}.head_dim_{x}": 128 for i in (0, 1) for x in ("qk", "vo")}),
            "page_size": (32, {"0.page_size": 32, "0.lengths": [41], "1.page_size": 32}),
            "causal": (True, {"1.causal": True}),
            "q_data_type": ("bfloat16", {f"{i}.{x}_dtype": BF16 for i in (0, 1) for x in ("q", "kv")}),
            "qo_indptr_arr": ([ints(0, 4), ints(0, 2, 4)], {"0.qo": [0, 4], "1.qo": [0, 2, 4]}),
            "paged_kv_indptr_arr": ([ints(0, 1), ints(0, 0, 2)], {
                "0.kv": [0, 1], "0.lengths": [9], "1.kv": [0, 0, 2], "1.lengths": [0, 32]}),
            "paged_kv_indices_arr": ([ints(4, 2), ints(3, 6)], {"0.indices": [4, 2], "1.indices": [3, 6]}),
            "paged_kv_last_page_len": ([ints(8), ints(6, 16)], {"0.lengths": [24], "1.lengths": [6, 16]}),
        },
        {"use_fp16_qk_reduction": HINTS},
    ),
    "shared prefix, decode": (
        lambda: BatchDecodeWithSharedPrefixPagedKVCacheWrapper(BUFFER),
        DEFAULT_SCALE | {"head_dim": 64, "unique_kv_indptr": ints(0, 1, 2), "unique_kv_indices": ints(3, 5),
                         "unique_kv_last_page_len": ints(7, 16)},
        part(HEADS, "num_qo_heads", "num_kv_heads") | {
            "head_dim": (256, {"head_dim_qk": 256, "head_dim_vo": 256, "sm_scale": 1 / 16}),
            "page_size": (32, {"page_size": 32}),
            "data_type": ("bfloat16", {"q_dtype": BF16, "kv_dtype": BF16}),
            "unique_kv_indptr": (ints(0, 0, 2), {"kv": [0, 0, 2], "lengths": [0, 32]}),
            "unique_kv_indices": (ints(4, 6), {"indices": [4, 6]}),
            "unique_kv_last_page_len": (ints(5, 6), {"lengths": [5, 6]}),
        },
        {},
    ),
    "shared prefix, prefill": (
        lambda: BatchPrefillWithSharedPrefixPagedKVCacheWrapper(BUFFER),
        DEFAULT_SCALE | {"head_dim": 64, "qo_indptr": ints(0, 3, 5), "paged_kv_indptr": ints(0, 1, 2),
                         "paged_kv_indices": ints(3, 5), "paged_kv_last_page_len": ints(7, 16)},
        part(PREFILL_ROWS, "num_qo_heads", "num_kv_heads", "page_size", "qo_indptr", "paged_kv_indptr",
             "paged_kv_indices", "paged_kv_last_page_len") | {
            "head_dim": (256, {"head_dim_qk": 256, "head_dim_vo": 256, "sm_scale": 1 / 16}),
            "data_type": ("bfloat16", {"q_dtype": BF16, "kv_dtype": BF16}),
        },
        {},
    ),
    "pod": (
        lambda: PODWithPagedKVCacheWrapper(BUFFER),
        {name: x for name, x in DECODE_GIVEN.items() if name != "head_dim_vo"},
        part(DECODE_ROWS, "num_qo_heads", "num_kv_heads", "sm_scale", "pos_encoding_mode", "window_left", "rope_scale",
             "rope_theta", "q_data_type", "kv_data_type", "data_type", "page_size", "indptr", "indices",
             "last_page_len") | {"head_dim": (128, {"head_dim_qk": 128, "head_dim_vo": 128})},
        {"non_blocking": COPIES},
    ),
    "batch pod": (
        lambda: BatchPODWithPagedKVCacheWrapper(BUFFER),
        PAGED | {"head_dim": 64, "qo_indptr_p": ints(0, 3, 5), "kv_indptr_p": ints(0, 1, 2), "kv_indices_p": ints(3, 5),
                 "last_page_len_p": ints(7, 16), "qo_indptr_d": ints(0, 1), "kv_indptr_d": ints(0, 2),
                 "kv_indices_d": ints(1, 2), "last_page_len_d": ints(9)},
        both(part(LAYER, "num_qo_heads", "num_kv_heads", "sm_scale", "pos_encoding_mode", "window_left", "rope_scale",
                  "rope_theta", "q_data_type", "kv_data_type")) | {
            "head_dim": (128, {f"{i}.head_dim_{x}": 128 for i in (0, 1) for x in ("qk", "vo")}),
            "data_type": ("bfloat16", {f"{i}.{x}_dtype": BF16 for i in (0, 1) for x in ("q", "kv", "o")}),
            "page_size": (32, {"0.page_size": 32, "1.page_size": 32, "1.lengths": [41]}),
            "qo_indptr_p": (ints(0, 2, 5), {"0.qo": [0, 2, 5]}),
            "kv_indptr_p": (ints(0, 0, 2), {"0.kv": [0, 0, 2], "0.lengths": [0, 32]}),
            "kv_indices_p": (ints(4, 6), {"0.indices": [4, 6]}),
            "last_page_len_p": (ints(5, 6), {"0.lengths": [5, 6]}),
            "qo_indptr_d": (ints(0, 2), {"1.qo": [0, 2]}),
            "kv_indptr_d": (ints(0, 1), {"1.kv": [0, 1], "1.lengths": [9]}),
            "kv_indices_d": (ints(4, 6), {"1.indices": [4, 6]}),
            "last_page_len_d": (ints(5), {"1.lengths": [21]}),
        },
        {"non_blocking": COPIES},
    ),
    "block sparse": (
        lambda: quire.BlockSparseAttentionWrapper(BUFFER),
        TABLES | {"head_dim": 64, "M": 4, "N": 6, "R": 2, "C": 3, "indptr": ints(0, 1, 3), "indices": ints(1, 0, 1)},
        part(PREFILL, "num_qo_heads", "num_kv_heads", "sm_scale", "logits_soft_cap", "pos_encoding_mode", "rope_scale",
             "rope_theta", "kv_data_type", "o_data_type", "causal") | {
            "head_dim": (128, {"head_dim_qk": 128, "head_dim_vo": 128}),
            "q_data_type": ("bfloat16", {"q_dtype": BF16, "kv_dtype": BF16}),
            "mask": (torch.ones(3, 2, 3, dtype=torch.bool), {"custom_mask": True}),
            "packed_mask": (torch.ones(3, dtype=torch.uint8), {"custom_mask": True}),
            "M": (3, {"qo": [0, 2, 3]}),
            "R": (3, {"qo": [0, 3, 4]}),
            "C": (2, {"page_size": 2, "lengths": [2, 4]}),
            "indptr": (ints(0, 2, 3), {"kv": [0, 2, 3], "lengths": [6, 3]}),
            "indices": (ints(0, 0, 1), {"indices": [0, 0, 1]}),
        },
        {"use_fp16_qk_reduction": HINTS, "non_blocking": COPIES, "N": "bounds the indices"}
        | dict.fromkeys(("block_mask", "kv_block_lens", "q2k_indices", "q2k_num", "kv_splits", "use_clc", "q_scale",
                         "k_scale", "v_scale"), REFUSED),
    ),
    "variable block sparse": (
        lambda: quire.VariableBlockSparseAttentionWrapper(BUFFER),
        TABLES | {"head_dim": 64, "block_row_sz": ints(1, 3, 1, 3).view(2, 2),
                  "block_col_sz": ints(2, 4, 2, 4).view(2, 2),
                  "block_mask_map": torch.eye(2, dtype=torch.bool).expand(2, 2, 2)},
        part(PREFILL, "sm_scale", "logits_soft_cap", "rope_scale", "rope_theta", "q_data_type", "kv_data_type",
             "causal") | {
            "head_dim": (128, {"head_dim_qk": 128, "head_dim_vo": 128}),
            "num_qo_heads": (8, {"num_qo_heads": 4}),
            "pos_encoding_mode": ("ROPE_LLAMA", {"pos_encoding": "ROPE_LLAMA"}),
            "block_mask_map": (torch.eye(2, dtype=torch.bool).flip(0).expand(2, 2, 2), {
                "indices": [2, 3, 4, 5, 0, 1, 8, 9, 10, 11, 6, 7], "kv": [0, 4, 6, 10, 12], "lengths": [4, 2, 4, 2]}),
            "block_row_sz": (ints(2, 2, 2, 2).view(2, 2), {"qo": [0, 2, 4, 6, 8]}),
            "block_col_sz": (ints(3, 3, 3, 3).view(2, 2), {"kv": [0, 3, 6, 9, 12], "lengths": [3, 3, 3, 3]}),
        },
        {"use_fp16_qk_reduction": HINTS, "non_blocking": COPIES, "num_kv_heads": "that of block_mask_map"},
    ),
}  # fmt: skip


def test_wrappers_that_plan_all_have_rows():
    """Each class of the face that plans, except those of the deprecated names of another."""
    faces = [
        import_module(f"quire.{name}") for name in ("attention", "cascade", "decode", "mla", "pod", "prefill", "sparse")
    ]
    classes = {x for face in faces for name in face.__all__ if isinstance(x := getattr(face, name), type)}
    planning = {x for x in classes if hasattr(x, "plan") or hasattr(x, "begin_forward")}
    tested = {type(make()) for make, *_ in WRAPPERS.values()}
    assert {x.__name__ for x in planning - tested} == {"CUDAGraphBatchDecodeWithPagedKVCacheWrapper"}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_plan_every_argument_has_a_row(kind):
    make, _, changes, ignored = WRAPPERS[kind]
    assert not changes.keys() & ignored.keys()
    assert changes.keys() | ignored.keys() == set(signature(plan_of(make())).parameters)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, row in WRAPPERS.items() for name in row[2]])
def test_plan_one_argument_changed_arrives_in_its_place_alone(kind, name):
    make, given, changes, _ = WRAPPERS[kind]
    value, expected = changes[name]
    more = {}
    if name == "token_pos_in_items_ptr":
        more = {"prefix_len_ptr": ints(2, 2), "token_pos_in_items_len": 10}
    before, after = planned(make, given), planned(make, {**given, name: value, **more})
    assert {key: x for key, x in after.items() if x != before[key]} == expected
