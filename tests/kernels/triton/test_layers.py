"""The kernels of norms and activations compile for every architecture without spilling registers, and without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from helpers.architectures import every_architecture

MANTISSA = {"*fp8e4nv": 3, "*fp8e5": 2}


def stored_as(dtype: str, target: str) -> str:
    """The type of an output as the kernel sees it."""
    return "*u8" if dtype in MANTISSA and target in ("sm_80", "gfx942") else dtype


def check(kernel, target, given, num_warps, spills=0):
    from helpers.triton_compile import compile_kernel

    usage = compile_kernel(kernel, target, given, num_warps=num_warps)
    assert usage.shared <= usage.limit
    assert usage.spills <= spills, usage.spills
    return usage


@every_architecture
def test_norms_compile_for_every_architecture(target):
    from quire.kernels.triton.norm import norm_config, norm_rows

    common = {"x": "*bf16", "residual": None, "weight": "*bf16", "beta": None, "scale": None, "eps": "fp32"}
    common |= {"factor": "fp32", "heads": 1}
    for dim, out, change in (
        (128, "*bf16", {"heads": "i32"}),
        (4096, "*bf16", {"residual": "*bf16"}),
        (5120, "*fp8e4nv", {"residual": "*bf16", "scale": "*fp32"}),
        (16384, "*fp32", {"x": "*fp32", "residual": "*fp32", "weight": "*fp32"}),
        (16384, "*fp32", {"x": "*fp32", "beta": "*fp32", "weight": "*fp32"}),
        (20480, "*bf16", {"residual": "*bf16"}),
        (20480, "*fp8e5", {"beta": "*fp32"}),
    ):
        c = norm_config(dim, 1.0, "beta" in change, MANTISSA.get(out, 0))
        num_warps = min(c.num_warps, 16) if target == "gfx942" else c.num_warps  # whose warps have 64 threads
        usage = check(norm_rows, target, {**common, **change, "out": stored_as(out, target), "c": c}, num_warps)
        if target == "sm_90" and dim == 4096:
            loads = [line for line in usage.asm["ptx"].splitlines() if "ld.global" in line]
            assert len(loads) == 6, "two of each of input, residual and weight"
            assert all(".v4." in line for line in loads), "16 bytes each"


@every_architecture
def test_products_of_one_and_of_few_rows_compile_for_every_architecture(target, monkeypatch):
    from quire.kernels.triton.skinny_gemm import gemv_config, multiply_few, multiply_row, skinny_config

    monkeypatch.setattr(torch.version, "hip", "6" if target == "gfx942" else None)
    cpu = torch.device("cpu")
    # Constants that are cached may be those of another target.
    row = [(multiply_row, gemv_config(size, cpu)) for size in (1000, 1024, 4096, 14336)]
    few = [
        (multiply_few, skinny_config.__wrapped__(size, num_rows, tokens, cpu))
        for size in (1000, 4096)
        for num_rows, tokens in ((4096, 8), (4096, 9), (1024, 16))
    ]
    for kernel, config in row + few:
        c = replace(config, launch_pdl=target in ("sm_90", "sm_100", "sm_120"))
        given = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16", "c": c}
        usage = check(kernel, target, given, c.num_warps)
        if target == "sm_90":
            loads = [line for line in usage.asm["ptx"].splitlines() if "ld.global" in line or "griddep" in line]
            first = loads[: loads.index(next(line for line in loads if "griddep" in line))]
            assert first, "the first loads do not wait for the launch before"
            assert all(".v4." in line for line in first), "16 bytes each"


@every_architecture
def test_topk_compiles_for_every_architecture(target):
    from quire.kernels.triton.topk import choose_largest, topk_config

    for size, k, dtype in ((128, 8, "*fp32"), (1000, 32, "*bf16")):
        c = replace(topk_config(size, k, torch.device("cpu")), launch_pdl=target in ("sm_90", "sm_100", "sm_120"))
        check(choose_largest, target, {"x": dtype, "values": dtype, "indices": "*i64", "c": c}, c.num_warps)


@every_architecture
def test_page_table_copies_compile_for_every_architecture(target):
    from quire.kernels.triton.page_table import copy_pages, page_table_config

    c = page_table_config(300, 131072, torch.device("cpu"))
    c = replace(c, launch_pdl=target in ("sm_90", "sm_100", "sm_120"))
    tables = dict.fromkeys(("indptr", "indices", "last_page_len", "req_to_token"), "*i32")
    for slot_map, page_size in (("*i64", 64), (None, 1)):
        given = {**tables, "rows": "*i64", "lengths": "*i32", "slot_map": slot_map, "page_size": page_size, "c": c}
        check(copy_pages, target, given, c.num_warps)


@every_architecture
def test_grouped_gemm_compiles_for_every_architecture(target):
    from quire.kernels.triton.grouped_gemm import gemm_config, group_config, group_rows, multiply_groups

    overlaps = target in ("sm_90", "sm_100", "sm_120")
    tables = dict.fromkeys(("order", "position", "ends"), "*i32")
    for rows in (8, 65536):
        c = replace(group_config(rows, torch.device("cpu")), launch_pdl=overlaps)
        check(group_rows, target, {"groups": "*i64", **tables, "c": c}, c.num_warps)
    for rows, dtype, order in (
        (8, torch.bfloat16, "*i32"),
        (2048, torch.float16, "*i32"),
        (8192, torch.bfloat16, None),
        (8192, torch.float32, "*i32"),
    ):
        c = replace(gemm_config(rows, 128, dtype, torch.device("cpu")), launch_pdl=overlaps)
        if target == "gfx942":
            c = replace(c, num_stages=2)  # as where torch is of ROCm
        name = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
        given = {"x": name, "order": order, "ends": "*i32", "weight": name, "out": name, "c": c}
        given["weight_indices"] = "*i64" if order is None else None
        for contiguous in ("weight_column", "weight_row"):
            usage = check(multiply_groups, target, {**given, contiguous: 1}, c.num_warps)
            if target == "sm_90":
                ptx = usage.asm["ptx"]
                assert ("wgmma.mma_async" in ptx) == (dtype != torch.float32)
                assert set(re.findall(r"cp\.async\.c[ag].*?, (0x\w+),", ptx)) == {"0x10"}, "16 bytes each"


@every_architecture
def test_products_of_adapters_compile_for_every_architecture(target):
    from quire.kernels.triton.lora import expand, lora_configs, shrink
    from quire.kernels.triton.lora_embedding import add_embeddings, embedding_config

    overlaps = target in ("sm_90", "sm_100", "sm_120")
    tables = dict.fromkeys(("order", "ends", "rank_pages", "num_rank_pages"), "*i32")
    # To fit one more program on a multiprocessor, the compiler may keep a few addresses in memory, which are loaded
    # once for a block of rows, outside the loops over columns and ranks.
    few = 32
    for rows, slots, pages, in_features, part_ends, dtype in (
        (1, 8, 1, 4096, (4096, 5120, 6144), torch.bfloat16),
        (64, 64, 4, 4096, (14336, 28672), torch.bfloat16),
        (64, 8, 1, 14336, (4096,), torch.float16),
        (2048, 8, 16, 14336, (4096,), torch.bfloat16),
        (8192, 32, 16, 4096, (4096, 5120, 6144), torch.bfloat16),
        (8192, 8, 4, 3072, (1024,), torch.float32),
        (16, 8, 4, 1024, (2048, 3072, 4096), torch.float32),
    ):
        configs = lora_configs(rows, slots, pages, in_features, part_ends, dtype, torch.device("cpu"))
        # As where torch is of ROCm.
        stages = {"num_stages": 2} if target == "gfx942" else {}
        c, expand_c = (replace(each, launch_pdl=overlaps) for each in configs)
        name = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
        given = {**tables, "x": name, "a": name, "b": name, "y": name, "h": "*fp32"}
        usage = check(shrink, target, {**given, "c": replace(c, **stages)}, c.num_warps, few)
        expand_usage = check(expand, target, {**given, "c": expand_c}, expand_c.num_warps, few)
        if target == "sm_90":
            assert set(re.findall(r"cp\.async\.c[ag].*?, (0x\w+),", usage.asm["ptx"])) == {"0x10"}, "16 bytes each"
            loads = [
                line for line in expand_usage.asm["ptx"].splitlines() if "ld.global.v" in line or "griddep" in line
            ]
            first = loads[: loads.index(next(line for line in loads if "griddep" in line))]
            assert first, "B and y are loaded before the wait for h"
            assert all(".v4." in line for line in first), "16 bytes each"
    c = replace(embedding_config(4096, torch.device("cpu")), launch_pdl=overlaps)
    given = {**tables, **dict.fromkeys("aby", "*bf16"), "slots": "*i32", "ids": "*i64", "c": c}
    check(add_embeddings, target, given, c.num_warps)


@every_architecture
def test_most_likely_compiles_for_every_architecture(target):
    from quire.kernels.triton.greedy import first_largest_part, greedy_config, largest_of_parts

    for vocab in (1000, 151_936):
        c = greedy_config(vocab, torch.device("cpu"))
        c = replace(c, launch_pdl=target in ("sm_90", "sm_100", "sm_120"))
        parts = {"largest": "*fp32", "places": "*i32", "c": c}
        usage = check(largest_of_parts, target, {"x": "*bf16", **parts}, c.num_warps)
        check(first_largest_part, target, {"tokens": "*i32", "valid": "*i8", "marked": None, **parts}, c.num_warps)
        check(first_largest_part, target, {"tokens": "*i64", "valid": None, "marked": "*i32", **parts}, c.num_warps)
        if target == "sm_90":
            loads = [line for line in usage.asm["ptx"].splitlines() if "ld.global" in line]
            assert all(".v4." in line for line in loads), "16 bytes each"


@every_architecture
def test_activations_compile_for_every_architecture(target):
    from quire.kernels.triton.activation import activate_rows, activation_config

    for kind in ("silu", "gelu", "gelu_tanh"):
        for dim, out in ((64, "*bf16"), (14336, "*fp8e4nv"), (14336, "*fp8e5")):
            c = activation_config(dim, kind, MANTISSA.get(out, 0))
            given = {"x": "*bf16", "scale": "*fp32", "out": stored_as(out, target), "factor": "fp32", "c": c}
            check(activate_rows, target, given, c.num_warps)


@every_architecture
def test_norm_rope_append_compiles_for_every_architecture(target):
    from quire.kernels.triton.qk_norm_rope import norm_rotate_append, qk_config

    tables = ("requests", "positions", "indptr", "indices")
    by_slots = {"slots": "*i64", **dict.fromkeys(tables), "k_scale": None, "v_scale": None}
    by_table = {"slots": None, **dict.fromkeys(tables, "*i32"), "k_scale": "*fp32", "v_scale": "*fp32"}
    bf16 = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "q_out"), "*bf16")
    for dim, rotary_dim, interleave, cache, change in (
        (128, 128, False, "*bf16", by_slots),
        (128, 128, True, "*bf16", by_slots),
        (256, 256, False, "*fp8e4nv", by_table),
        (128, 64, True, "*fp8e5", by_table),
        (64, 64, False, "*bf16", {**by_slots, "q_weight": None, "k_weight": None}),
    ):
        c = qk_config(dim, dim, rotary_dim, 32, interleave, 1.0, MANTISSA.get(cache, 0))
        pages = dict.fromkeys(("k_cache", "v_cache"), stored_as(cache, target))
        numbers = {"cos_sin_cache": "*fp32", "pos_ids": "*i64", "eps": "fp32", "k_factor": "fp32", "v_factor": "fp32"}
        check(norm_rotate_append, target, {**bf16, **pages, **numbers, **change, "c": c}, c.num_warps)
