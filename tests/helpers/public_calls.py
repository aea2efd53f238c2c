"""Every public call with small tensors that fit, for tests that put something else in an argument's place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import quire
from quire.cache import copy_blocks, swap_blocks
from quire.cascade import variable_length_merge_states
from quire.sparse import convert_bsr_mask_layout
from quire.steps import store

F32 = torch.float32
HEADS, KV_HEADS = 4, 2
DIM, PAGE = 16, 4
LAYER = (HEADS, KV_HEADS, DIM, PAGE)


@dataclass
class PublicCall:
    """A function and its arguments by name.

    Attributes:
        optional: arguments that may be None.
        any_dtype: tensors of which other dtypes are taken, too.
        inner: what messages about dtypes and gradients call an argument where a call hands it on to another operation,
            a regular expression.
        differentiable: arguments whose gradients would be lost; they are refused where they require grad.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    optional: tuple[str, ...] = ()
    any_dtype: tuple[str, ...] = ()
    inner: dict[str, str] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tables(device: str) -> dict[str, torch.Tensor]:
    """Two requests of 7 and 2 tokens, in 3 of 4 pages."""
    made = {"indptr": ints(0, 2, 3), "indices": ints(2, 0, 3), "last_page_len": ints(3, 2)}
    return {name: x.to(device) for name, x in made.items()}


def kv_tables(device: str, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: x for name, x in tables(device).items()}


def cache(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, 4, PAGE, KV_HEADS, DIM, device=device)
    return k, v


def rows(tokens: int, heads: int, device: str, dim: int = DIM) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, device=device)


def results(tokens: int, device: str) -> dict[str, torch.Tensor]:
    empty = torch.full((tokens, HEADS, DIM), torch.nan, device=device)
    return {"out": empty, "lse": torch.full((tokens, HEADS), torch.nan, device=device)}


def extras(tokens: int, device: str) -> dict[str, torch.Tensor]:
    """What else runs take: results, and weights of a layer."""
    weights = {"sinks": torch.randn(HEADS, device=device), "k_scale": torch.rand(KV_HEADS, device=device) + 0.5}
    return results(tokens, device) | weights | {"v_scale": torch.rand(KV_HEADS, device=device) + 0.5}


OPTIONAL = ("out", "lse", "sinks", "q_scale", "k_scale", "v_scale", "scale_q", "scale_k", "scale_v")
OF_CACHE = {"paged_kv_cache": "[kv]"}


def decoder(device: str, **options: Any) -> Any:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device), **options)
    wrapper.plan(**tables(device), **layer())
    return wrapper


def layer(**changes: Any) -> dict[str, Any]:
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
    return {**sizes, "q_data_type": F32, **changes}


def of_prefill(**changes: Any) -> dict[str, Any]:
    given = layer(**changes)
    given["head_dim_qk"] = given.pop("head_dim")
    return given


def prefiller(device: str, wrapper: Any = None) -> Any:
    wrapper = wrapper or quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device))
    wrapper.plan(ints(0, 3, 5).to(device), *tables(device).values(), *LAYER, q_data_type=F32, causal=True)
    return wrapper


def attention(device: str) -> dict[str, PublicCall]:
    empty = torch.empty(0, device=device)
    qo_indptr = {"qo_indptr": ints(0, 3, 5).to(device)}
    runs = {"optional": OPTIONAL, "inner": OF_CACHE, "differentiable": ("q", "paged_kv_cache", "out", "lse")}
    calls = {
        "decode.plan": PublicCall(
            quire.BatchDecodeWithPagedKVCacheWrapper(empty).plan, tables(device) | layer()
        ),
        "decode.run": PublicCall(
            decoder(device).run,
            {"q": rows(2, HEADS, device), "paged_kv_cache": cache(device)} | extras(2, device), **runs,
        ),
        "prefill.plan": PublicCall(
            quire.BatchPrefillWithPagedKVCacheWrapper(empty).plan,
            qo_indptr | kv_tables(device, "paged_kv_") | of_prefill()
            | {"custom_mask": torch.ones(25, dtype=torch.bool, device=device)},
            optional=("custom_mask",),
        ),
        "prefill.plan, packed": PublicCall(
            quire.BatchPrefillWithPagedKVCacheWrapper(empty).plan,
            qo_indptr | kv_tables(device, "paged_kv_") | of_prefill()
            | {"packed_custom_mask": torch.full((4,), 255, dtype=torch.uint8, device=device)},
            optional=("packed_custom_mask",),
        ),
        "prefill.plan, items": PublicCall(
            quire.BatchPrefillWithPagedKVCacheWrapper(empty).plan,
            qo_indptr | kv_tables(device, "paged_kv_") | of_prefill(token_pos_in_items_len=3)
            | {"prefix_len_ptr": ints(5, 1).to(device), "token_pos_in_items_ptr": torch.zeros(6).int().to(device)},
        ),
        "prefill.run": PublicCall(
            prefiller(device).run,
            {"q": rows(5, HEADS, device), "paged_kv_cache": cache(device)} | extras(5, device), **runs,
        ),
    }  # fmt: skip
    ragged = quire.BatchPrefillWithRaggedKVCacheWrapper(empty)
    plan = qo_indptr | {"kv_indptr": ints(0, 7, 9).to(device)} | of_prefill()
    plan.pop("page_size")
    calls["ragged.plan"] = PublicCall(quire.BatchPrefillWithRaggedKVCacheWrapper(empty).plan, plan)
    ragged.plan(**plan)
    qkv = {"q": rows(5, HEADS, device), "k": rows(9, KV_HEADS, device), "v": rows(9, KV_HEADS, device)}
    every = {"optional": OPTIONAL, "differentiable": ("q", "k", "v", "out", "lse")}
    calls["ragged.run"] = PublicCall(ragged.run, qkv | extras(5, device), **every)
    mask = {"custom_mask": torch.ones(5, 9, dtype=torch.bool, device=device)}
    single = {"optional": ("custom_mask", "scale_k", "v_scale"), "differentiable": ("q", "k", "v")}
    scales = {"scale_k": torch.rand(KV_HEADS, device=device) + 0.5, "v_scale": torch.rand(1, device=device) + 0.5}
    calls["single_prefill"] = PublicCall(quire.single_prefill_with_kv_cache, qkv | mask | scales, **single)
    one = {"q": rows(1, HEADS, device)[0], "k": qkv["k"], "v": qkv["v"]}
    calls["single_decode"] = PublicCall(quire.single_decode_with_kv_cache, one, differentiable=("q", "k", "v"))

    batch, kv = quire.BatchAttention(device=device), kv_tables(device, "kv_")
    kv.pop("kv_last_page_len")
    given = qo_indptr | kv | {"kv_len_arr": ints(7, 2).to(device)}
    sizes = of_prefill(head_dim_vo=DIM, kv_data_type=F32)
    batch.plan(**given, **sizes)
    calls["batch.plan"] = PublicCall(quire.BatchAttention(device=device).plan, given | sizes)
    calls["batch.run"] = PublicCall(
        batch.run, {"q": rows(5, HEADS, device), "kv_cache": cache(device)} | results(5, device), optional=OPTIONAL,
        inner={"kv_cache": "[kv]"}, differentiable=("q", "kv_cache", "out", "lse"),
    )  # fmt: skip
    with_sink = prefiller(device, quire.BatchAttentionWithAttentionSinkWrapper(empty))
    calls["sink.run"] = PublicCall(
        with_sink.run,
        {"q": rows(5, HEADS, device), "paged_kv_cache": cache(device), "sink": torch.randn(HEADS, device=device)},
        optional=("sink",), inner={"sink": "sinks"} | OF_CACHE, differentiable=("q", "paged_kv_cache"),
    )  # fmt: skip
    return calls


def latent(device: str) -> dict[str, PublicCall]:
    empty, kv = torch.empty(0, device=device), kv_tables(device, "kv_")
    kv.pop("kv_last_page_len")
    flat = {"qo_indptr": ints(0, 3, 5).to(device)} | kv | {"kv_len_arr": ints(7, 2).to(device)}
    dense = {"cum_seq_lens_q": ints(0, 3, 5).to(device), "seq_lens": ints(7, 2).to(device)}
    dense["block_tables"] = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    layer = {"num_heads": HEADS, "head_dim_ckv": 128, "head_dim_kpe": 64, "page_size": PAGE, "causal": True}
    layer |= {"sm_scale": 0.1, "q_data_type": F32, "kv_data_type": F32}
    wrapper = quire.BatchMLAPagedAttentionWrapper(empty)
    wrapper.plan(**flat, **layer)
    given = {"q_nope": rows(5, HEADS, device, 128), "q_pe": rows(5, HEADS, device, 64)}
    given |= {"ckv_cache": rows(4, PAGE, device, 128), "kpe_cache": rows(4, PAGE, device, 64)}
    into = {"out": torch.empty(5, HEADS, 128, device=device), "lse": torch.empty(5, HEADS, device=device)}
    of_decode = quire.BatchDecodeMlaWithPagedKVCacheWrapper(empty)
    sizes = {"num_qo_heads": HEADS, "head_dim_compressed_kv": 128, "page_size": PAGE, "sm_scale": 0.1}
    of_decode.plan(**tables(device), **sizes, data_type=F32)
    one = {"q_nope": rows(2, HEADS, device, 128), "q_pe": rows(2, HEADS, device, 64)}
    one |= {"paged_ckv_cache": given["ckv_cache"], "paged_kpe_cache": given["kpe_cache"]}
    one |= {"out": torch.empty(2, HEADS, 128, device=device), "lse": torch.empty(2, HEADS, device=device)}
    inner = {"paged_ckv_cache": "ckv_cache", "paged_kpe_cache": "kpe_cache"}
    return {
        "mla_decode.plan": PublicCall(of_decode.plan, tables(device) | sizes | {"data_type": F32}),
        "mla_decode.run": PublicCall(of_decode.run, one, OPTIONAL, inner=inner, differentiable=tuple(one)),
        "mla.plan": PublicCall(quire.BatchMLAPagedAttentionWrapper(empty).plan, flat | layer),
        "mla.plan, dense": PublicCall(quire.BatchMLAPagedAttentionWrapper(empty).plan, dense | layer),
        "mla.run": PublicCall(wrapper.run, given | into, optional=OPTIONAL, differentiable=(*given, *into)),
    }


def merging(device: str) -> dict[str, PublicCall]:
    v, s = rows(5, HEADS, device), torch.randn(5, HEADS, device=device)
    two = {"v_a": v, "s_a": s, "v_b": v + 1, "s_b": s + 1}
    onto = {"v": v.clone(), "s": s.clone(), "v_other": v + 1, "s_other": s + 1}
    some = torch.tensor([True, False, True, True, False], device=device)
    many = {"v": torch.stack([v, v + 1], 1), "s": torch.stack([s, s + 1], 1)}
    ragged = {"v": v, "s": s, "indptr": ints(0, 2, 2, 5).to(device)}
    return {
        "merge_state": PublicCall(quire.merge_state, two, any_dtype=("s_a", "s_b"), differentiable=tuple(two)),
        "merge_state_in_place": PublicCall(
            quire.merge_state_in_place, onto | {"mask": some}, ("mask",), ("s_other",), differentiable=tuple(onto)
        ),
        "merge_states": PublicCall(quire.merge_states, many, any_dtype=("s",), differentiable=("v", "s")),
        "variable_length_merge_states": PublicCall(
            variable_length_merge_states, ragged, any_dtype=("s",), differentiable=("v", "s")
        ),
    }


def composed(device: str) -> dict[str, PublicCall]:
    """Wrappers around wrappers."""
    empty, qo_indptr = torch.empty(0, device=device), ints(0, 3, 5).to(device)
    levels: dict[str, Any] = {"qo_indptr_arr": [qo_indptr] * 2}
    for name, x in tables(device).items():
        levels[f"paged_kv_{name}" + ("" if name == "last_page_len" else "_arr")] = [x] * 2
    multi = quire.MultiLevelCascadeAttentionWrapper(2, empty)
    multi.plan(**levels, **layer())
    shared = {"k_shared": rows(6, KV_HEADS, device), "v_shared": rows(6, KV_HEADS, device)}
    own = {"unique_kv_cache": cache(device)}
    to_shared = {"k_shared": "k", "v_shared": "v", "unique_kv_cache": "[kv]"}
    decode = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(empty)
    prefill = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(empty)
    begin = kv_tables(device, "unique_kv_")
    sizes = layer(data_type=F32)
    sizes.pop("q_data_type")
    decode.begin_forward(**begin, **sizes)
    rest = {"qo_indptr": qo_indptr} | kv_tables(device, "paged_kv_")
    prefill.begin_forward(**rest, **sizes)
    floats = ("q", "k_shared", "v_shared", "unique_kv_cache")
    calls = {
        "cascade.plan": PublicCall(
            quire.MultiLevelCascadeAttentionWrapper(2, empty).plan,
            levels | layer(),
            inner={name: name.removesuffix("_arr") for name in levels},
        ),
        "cascade.run": PublicCall(
            multi.run, {"q": rows(5, HEADS, device), "paged_kv_cache": cache(device)}, inner=OF_CACHE,
            differentiable=("q", "paged_kv_cache"),
        ),
        "shared prefix.begin_forward": PublicCall(decode.begin_forward, begin | sizes),
        "shared prefix.forward": PublicCall(
            decode.forward, {"q": rows(2, HEADS, device)} | shared | own, inner=to_shared, differentiable=floats
        ),
        "shared prefix of prefill.begin_forward": PublicCall(prefill.begin_forward, rest | sizes),
        "shared prefix of prefill.forward": PublicCall(
            prefill.forward, {"q": rows(5, HEADS, device)} | shared | own, inner=to_shared, differentiable=floats
        ),
    }  # fmt: skip
    pod, both = quire.PODWithPagedKVCacheWrapper(empty), quire.BatchPODWithPagedKVCacheWrapper(empty)
    pod.plan(**tables(device), **layer())
    two = {}
    for end in ("_p", "_d"):
        two |= {"qo_indptr" + end: qo_indptr}
        two |= {f"kv_{name}{end}": x for name, x in tables(device).items()}
    two = {name.replace("kv_last", "last"): x for name, x in two.items()}
    both.plan(**two, **layer())
    qkv = {"q_p": rows(5, HEADS, device), "k_p": rows(9, KV_HEADS, device), "v_p": rows(9, KV_HEADS, device)}
    inner = {"q_p": "q", "k_p": "k", "v_p": "v", "q_d": "q", "paged_kv_cache_d": "[kv]", "paged_kv_cache_p": "[kv]"}
    decodes = {"q_d": rows(2, HEADS, device), "paged_kv_cache_d": cache(device)}
    calls["pod.plan"] = PublicCall(quire.PODWithPagedKVCacheWrapper(empty).plan, tables(device) | layer())
    calls["pod.run"] = PublicCall(pod.run, qkv | decodes, inner=inner, differentiable=(*qkv, *decodes))
    calls["batch pod.plan"] = PublicCall(quire.BatchPODWithPagedKVCacheWrapper(empty).plan, two | layer())
    given = {"q_p": rows(5, HEADS, device), "paged_kv_cache_p": cache(device), "q_d": rows(5, HEADS, device)}
    given["paged_kv_cache_d"] = cache(device)
    calls["batch pod.run"] = PublicCall(both.run, given, inner=inner, differentiable=tuple(given))
    return calls


def sparse(device: str) -> dict[str, PublicCall]:
    empty = torch.empty(0, device=device)
    fixed, variable = quire.BlockSparseAttentionWrapper(empty), quire.VariableBlockSparseAttentionWrapper(empty)
    matrix = {"indptr": ints(0, 2, 3).to(device), "indices": ints(0, 2, 1).to(device), "M": 4, "N": 12, "R": 2, "C": 4}
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "q_data_type": F32}
    mask = {"mask": torch.ones(3, 2, 4, dtype=torch.bool, device=device)}
    fixed.plan(**matrix, **heads, o_data_type=F32)
    blocks = {"block_mask_map": torch.ones(KV_HEADS, 2, 3, dtype=torch.bool, device=device)}
    blocks |= {"block_row_sz": torch.full((KV_HEADS, 2), 2, device=device)}
    blocks |= {"block_col_sz": torch.full((KV_HEADS, 3), 4, device=device)}
    variable.plan(**blocks, **heads)
    qkv = {"q": rows(4, HEADS, device), "k": rows(12, KV_HEADS, device), "v": rows(12, KV_HEADS, device)}
    by_head = {name: x.transpose(0, 1).contiguous() for name, x in qkv.items()}
    floats = ("q", "k", "v")
    return {
        "sparse.plan": PublicCall(
            quire.BlockSparseAttentionWrapper(empty).plan, matrix | heads | mask, optional=("mask",)
        ),
        "sparse.run": PublicCall(
            fixed.run, qkv | results(4, device), optional=OPTIONAL, differentiable=(*floats, "out", "lse")
        ),
        "variable sparse.plan": PublicCall(
            quire.VariableBlockSparseAttentionWrapper(empty).plan, blocks | heads, any_dtype=("block_mask_map",)
        ),
        "variable sparse.run": PublicCall(variable.run, by_head, differentiable=floats),
        "convert_bsr_mask_layout": PublicCall(
            convert_bsr_mask_layout, {**mask, "indptr": matrix["indptr"]}, any_dtype=("mask", "indptr")
        ),
    }


def storing(device: str) -> dict[str, PublicCall]:
    """Nothing of these is refused where it requires grad."""
    places = {"batch_indices": ints(0, 0, 1).to(device), "positions": ints(5, 6, 1).to(device)}
    new = {"append_key": rows(3, KV_HEADS, device), "append_value": rows(3, KV_HEADS, device)}
    where = kv_tables(device, "kv_")
    parts = {"append_ckv": rows(3, 128, device)[..., 0], "append_kpe": rows(3, 64, device)[..., 0]}
    parts = {name: x.contiguous() for name, x in parts.items()}
    latents = {"ckv_cache": rows(4, PAGE, device, 128), "kpe_cache": rows(4, PAGE, device, 64)}
    pool = quire.PagedKVCache(1, KV_HEADS, DIM, PAGE, 4, device, F32)
    pool.begin_forward(3)
    pages = {"src_kv_cache": rows(4, PAGE, device), "dst_kv_cache": rows(4, PAGE, device)}
    to = torch.tensor([[0, 1], [2, 3]])
    return {
        "append_paged_kv_cache": PublicCall(
            quire.append_paged_kv_cache, new | places | {"paged_kv_cache": cache(device)} | where,
            inner={"paged_kv_cache": "append_key"},
        ),
        "append_paged_mla_kv_cache": PublicCall(
            quire.append_paged_mla_kv_cache, parts | places | latents | where, inner={"ckv_cache": "kpe_cache"}
        ),
        "get_batch_indices_positions": PublicCall(
            quire.get_batch_indices_positions,
            {"append_indptr": ints(0, 2, 3).to(device), "seq_lens": ints(7, 2).to(device), "nnz": 3} | places,
            optional=("batch_indices", "positions"), any_dtype=("seq_lens",),
        ),
        "get_seq_lens": PublicCall(
            quire.get_seq_lens, {k: x for k, x in where.items() if k != "kv_indices"} | {"page_size": PAGE}
        ),
        "PagedKVCache.append": PublicCall(
            pool.append, {"layer": 0, "key": rows(3, KV_HEADS, device), "value": rows(3, KV_HEADS, device)}
        ),
        "store": PublicCall(
            store,
            {"cache": cache(device), "key": rows(3, KV_HEADS, device), "value": rows(3, KV_HEADS, device)}
            | {"slots": torch.tensor([0, 5, 6], device=device)},
            inner={"cache": "key|v_cache"},
        ),
        "swap_blocks": PublicCall(swap_blocks, pages | {"src_to_dst": to}, inner={"src_kv_cache": "caches"} | {
            "dst_kv_cache": "caches"}),
        "copy_blocks": PublicCall(
            copy_blocks, {"kv_caches": [rows(4, PAGE, device)], "src_to_dists": to}, any_dtype=("kv_caches",)
        ),
    }  # fmt: skip


def rotating(device: str) -> dict[str, PublicCall]:
    qk = {"q": rows(5, HEADS, device), "k": rows(5, KV_HEADS, device)}
    requests = {"indptr": ints(0, 3, 5).to(device), "offsets": ints(4, 0).to(device)}
    pos_ids = {"pos_ids": ints(4, 5, 6, 0, 1).to(device)}
    calls = {}
    for name in ("apply_rope", "apply_llama31_rope"):
        for end in ("", "_inplace"):
            for middle, where in (("", requests), ("_pos_ids", pos_ids)):
                function = getattr(quire, name + middle + end)
                calls[name + middle + end] = PublicCall(function, clones(qk) | where, differentiable=("q", "k"))
    table = {"cos_sin_cache": torch.randn(16, DIM, device=device)}
    named = {"positions": pos_ids["pos_ids"], "query": qk["q"], "key": qk["k"], "head_size": DIM} | table
    for end in ("", "_inplace"):
        function = getattr(quire, "apply_rope_with_cos_sin_cache" + end)
        calls[function.__name__] = PublicCall(function, clones(named), differentiable=("query", "key"))
    parts = {"q_rope": qk["q"], "k_rope": qk["k"], "q_nope": qk["q"] + 1, "k_nope": qk["k"] + 1}
    for function in (quire.rope.rope_quantize_fp8, quire.rope.mla_rope_quantize_fp8):
        calls[function.__name__] = PublicCall(
            function, parts | table | pos_ids, optional=("q_nope", "k_nope"), differentiable=tuple(parts)
        )
    calls["rope_quantize_fp8_append_paged_kv_cache"] = quantized_append(device)
    return calls


def quantized_append(device: str) -> PublicCall:
    given = {"q_rope": rows(3, HEADS, device), "k_rope": rows(3, KV_HEADS, device), "v": rows(3, KV_HEADS, device)}
    given |= {"q_nope": rows(3, HEADS, device), "k_nope": rows(3, KV_HEADS, device)}
    given |= {"cos_sin_cache": torch.randn(16, DIM, device=device), "pos_ids": ints(5, 6, 1).to(device)}
    pair = [torch.zeros(4, PAGE, KV_HEADS, dim, device=device).to(torch.float8_e4m3fn) for dim in (2 * DIM, DIM)]
    where = kv_tables(device, "kv_")
    where.pop("kv_last_page_len")
    where |= {"batch_indices": ints(0, 0, 1).to(device), "positions": ints(5, 6, 1).to(device)}
    given |= {"paged_kv_cache": tuple(pair), "page_size": PAGE} | where
    return PublicCall(
        quire.rope.rope_quantize_fp8_append_paged_kv_cache, given, ("q_nope", "k_nope"),
        inner={"paged_kv_cache": "[kv]_cache"},
    )  # fmt: skip


def clones(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def others(device: str) -> dict[str, PublicCall]:
    pool = quire.PagedKVCache(1, KV_HEADS, DIM, PAGE, 4, device, F32)
    pool.end_forward(pool.begin_forward(3), 3)
    decode = quire.BatchDecodeWithPagedKVCache(pool, HEADS, KV_HEADS, DIM)
    prefill = quire.BatchPrefillWithRaggedKVCache(HEADS, KV_HEADS, DIM, dtype=F32, device=device)
    qkv = {"query": rows(5, HEADS, device), "key": rows(5, KV_HEADS, device), "value": rows(5, KV_HEADS, device)}
    of_core = {"query": "q", "key": "k", "value": "v"}
    bits = {"x": torch.ones(9, dtype=torch.bool, device=device)}
    return {
        "BatchDecodeWithPagedKVCache.decode": PublicCall(
            decode.decode, {"query": rows(1, HEADS, device)}, inner=of_core, differentiable=("query",)
        ),
        "BatchPrefillWithRaggedKVCache.prefill": PublicCall(
            prefill.prefill, qkv | {"qo_indptr": ints(0, 3, 5).to(device)}, inner=of_core,
            differentiable=("query", "key", "value"),
        ),
        "packbits": PublicCall(quire.packbits, bits, any_dtype=("x",)),
        "segment_packbits": PublicCall(
            quire.segment_packbits, bits | {"indptr": ints(0, 4, 9).to(device)}, any_dtype=("x",)
        ),
    }  # fmt: skip


def all_calls(device: str = "cpu") -> dict[str, PublicCall]:
    from helpers.layer_calls import layers  # which needs PublicCall

    made = [attention(device), latent(device), merging(device), composed(device), sparse(device)]
    made += [storing(device), rotating(device), layers(device), others(device)]
    return {name: call for calls in made for name, call in calls.items()}
