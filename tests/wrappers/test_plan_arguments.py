"""Each argument of every `plan` arrives in the planned layer or tables, in its own place and in no other."""

from __future__ import annotations

from dataclasses import asdict
from inspect import signature
from typing import Any

import pytest
import torch

import quire
from quire.mla import BatchMLAPagedAttentionWrapper
from quire.wrappers.mla_decode import BatchDecodeMlaWithPagedKVCacheWrapper

F16, BF16, F32, F8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def planned(make: Any, given: dict[str, Any]) -> dict[str, Any]:
    """All that a plan says: the settings of its layer, those of masks by their own names, and its tables."""
    outer = make()
    outer.plan(**given)
    plan = getattr(outer, "_wrapper", outer).planned
    layer = {name: x for name, x in asdict(plan.spec).items() if name not in ("text", "_hash")}
    mask = layer.pop("mask")
    pages = None if not hasattr(plan.kv, "page_size") else plan.kv.page_size
    tables = {"qo": plan.qo.indptr.tolist(), "kv": plan.kv.indptr.tolist(), "lengths": plan.kv.lengths().tolist()}
    tables["indices"] = plan.kv.indices.tolist() if pages else None
    return {**layer, **mask, "page_size": pages, "max_q_len": plan.max_q_len, **tables}


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
        PAGED | {"head_dim": 64, "head_dim_vo": 64, "indptr": ints(0, 1, 2), "indices": ints(3, 5),
                 "last_page_len": ints(7, 16)},
        LAYER | {
            "head_dim": (128, {"head_dim_qk": 128}),
            "data_type": ("bfloat16", {"q_dtype": BF16, "kv_dtype": BF16, "o_dtype": BF16}),
            "is_causal": (False, {"causal": False}),
            "q_len_per_req": (2, {"qo": [0, 2, 4], "max_q_len": 2}),
            "page_size": (32, {"page_size": 32}),
            "indptr": (ints(0, 0, 2), {"kv": [0, 0, 2], "lengths": [0, 32]}),
            "indices": (ints(4, 6), {"indices": [4, 6]}),
            "last_page_len": (ints(5, 6), {"lengths": [5, 6]}),
        },
        {"non_blocking": COPIES, "block_tables": HINTS, "seq_lens": HINTS, "window_right": REFUSED,
         "shared_prefix": "tests/wrappers/test_shared_prefix.py"},
    ),
    "prefill": (
        lambda: quire.BatchPrefillWithPagedKVCacheWrapper(BUFFER),
        PAGED | {"head_dim_qk": 64, "head_dim_vo": 64, "qo_indptr": ints(0, 3, 5), "paged_kv_indptr": ints(0, 1, 2),
                 "paged_kv_indices": ints(3, 5), "paged_kv_last_page_len": ints(7, 16)},
        PREFILL | {
            "page_size": (32, {"page_size": 32}),
            "paged_kv_indptr": (ints(0, 0, 2), {"kv": [0, 0, 2], "lengths": [0, 32]}),
            "paged_kv_indices": (ints(4, 6), {"indices": [4, 6]}),
            "paged_kv_last_page_len": (ints(5, 6), {"lengths": [5, 6]}),
        },
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
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_plan_every_argument_has_a_row(kind):
    make, _, changes, ignored = WRAPPERS[kind]
    assert not changes.keys() & ignored.keys()
    assert changes.keys() | ignored.keys() == set(signature(make().plan).parameters)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, row in WRAPPERS.items() for name in row[2]])
def test_plan_one_argument_changed_arrives_in_its_place_alone(kind, name):
    make, given, changes, _ = WRAPPERS[kind]
    value, expected = changes[name]
    more = {}
    if name == "token_pos_in_items_ptr":
        more = {"prefix_len_ptr": ints(2, 2), "token_pos_in_items_len": 10}
    before, after = planned(make, given), planned(make, {**given, name: value, **more})
    assert {key: x for key, x in after.items() if x != before[key]} == expected
