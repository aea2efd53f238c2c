"""Triton's kernels compile for every architecture without spilling registers. No GPU is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers.architectures import every_architecture
from quire.definition import attention_spec


@every_architecture
def test_kernels_compile_for_every_architecture(target):
    from helpers.triton_compile import compile_attend

    spec = attention_spec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, q_dtype=torch.bfloat16)
    for layer, rows in ((spec, 4), (spec, 4000), (spec.replace(kv_dtype=torch.float8_e4m3fn), 4)):
        usage = compile_attend(layer, target, rows, split=rows < 100)
        assert usage.shared <= usage.limit
        assert usage.spills <= 128, usage.spills


@pytest.mark.slow
@every_architecture
def test_latent_kernels_compile_for_every_architecture(target):
    from helpers.triton_compile import compile_attend

    spec = attention_spec(
        num_qo_heads=128, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, q_dtype=torch.bfloat16, latent=True
    )
    few, fp8 = spec.replace(num_qo_heads=16), spec.replace(kv_dtype=torch.float8_e4m3fn)
    for layer, rows, split in ((few, 16, True), (spec, 128, True), (fp8, 128, True)):
        usage = compile_attend(layer, target, rows, split=split)
        assert usage.shared <= usage.limit
        assert usage.spills <= 512, usage.spills  # between the loops over keys, which have all registers


@every_architecture
def test_appending_compiles_for_every_architecture(target):
    from helpers.triton_compile import compile_kernel
    from quire.kernels.triton.append import append_tokens, write_tokens, write_tokens_quantized

    tables = dict.fromkeys(("requests", "positions", "indptr", "indices"), "*i32")
    for dtype in ("*bf16", "*u8"):
        rows = dict.fromkeys(("k_cache", "v_cache", "key", "value"), dtype)
        overlapping = target in ("sm_90", "sm_100", "sm_120")  # launches of the one that models' steps call
        for kernel, given in ((append_tokens, tables), (write_tokens, {"slots": "*i64", "pdl": overlapping})):
            usage = compile_kernel(kernel, target, {**rows, **given, "block": 1024})
            assert usage.shared <= usage.limit
            assert usage.spills == 0, usage.spills
    cache = "*fp8e4nv" if target in ("sm_89", "sm_90", "sm_100", "sm_120") else "*u8"
    rows = {"k_cache": cache, "v_cache": cache, "key": "*bf16", "value": "*bf16", "slots": "*i64", "block": 1024}
    for scale in (None, "*fp32"):
        scales = {
            "k_scale": scale,
            "v_scale": scale,
            "k_divisor": "fp32",
            "v_divisor": "fp32",
            "k_step": 0,
            "v_step": 1,
        }
        usage = compile_kernel(write_tokens_quantized, target, {**rows, **scales, "mantissa": 3, "pdl": overlapping})
        assert usage.shared <= usage.limit
        assert usage.spills == 0, usage.spills


@every_architecture
def test_merging_compiles_for_every_architecture(target):
    from helpers.triton_compile import compile_kernel
    from quire.kernels.triton.merge import merge_rows

    v, s = "*bf16", "*fp32"
    two = {"v": v, "v_other": v, "out": v, "s": s, "s_other": s, "lse": s, "mask": "*u8"}
    many = {**two, "v_other": None, "s_other": None, "mask": None}
    for given in (two, many):
        for dim in (64, 128, 512):
            usage = compile_kernel(merge_rows, target, {**given, "block_rows": 2048 // dim, "block_dim": dim})
            assert usage.shared <= usage.limit
            assert usage.spills == 0, usage.spills


@every_architecture
def test_rotary_kernels_compile_for_every_architecture(target):
    from helpers.triton_compile import compile_kernel
    from quire.kernels.triton.rope import rope_config, rotate_heads

    def part(dtype):
        return ("*bf16", f"*{dtype}", *["i32"] * 5)

    computed = {"positions": "*i32", "indptr": "*i32", "inv_freq": "*i64", "cache": None, "table": None, "v": None}
    computed |= {"q": part("bf16"), "k": part("bf16"), "q_rest": None, "k_rest": None, "q_scale": 1.0, "k_scale": 1.0}
    rests = {"q_rest": part("bf16"), "k_rest": part("bf16")}
    cached = {**computed, **rests, "positions": "*i64", "indptr": None, "inv_freq": None, "cache": "*fp32"}
    quantized = {**cached, **dict.fromkeys(("q", "q_rest", "k", "k_rest", "v"), part("u8"))}
    quantized |= {"table": ("*i32",) * 4 + ("i32",) * 4, "q_scale": "fp32", "k_scale": "fp32"}
    for given, c in (
        (computed, rope_config(64, 0, 32, False)),
        (cached, rope_config(48, 64, 32, True)),
        (quantized, rope_config(32, 512, 128, True, 512, 3)),
        (quantized, rope_config(32, 32, 16, False, 96, 2)),
    ):
        usage = compile_kernel(rotate_heads, target, {**given, "c": c}, num_warps=c.num_warps)
        assert usage.shared <= usage.limit
        assert usage.spills == 0, usage.spills


@every_architecture
def test_packing_compiles_for_every_architecture(target):
    from helpers.triton_compile import compile_kernel
    from quire.kernels.triton.pack import BLOCK, pack_bytes

    given = {"x": "*u8", "bits": "*u8", "indptr": "*i64", "bytes_at": "*i64", "big": True, "block": BLOCK}
    for each in (given, {**given, "indptr": None, "bytes_at": None}):
        assert compile_kernel(pack_bytes, target, each).spills == 0


@pytest.mark.slow
@every_architecture
def test_sampling_compiles_for_every_architecture(target):
    from helpers.triton_compile import compile_kernel
    from quire.kernels.triton import logprobs, sampling, speculative, threshold

    fp32, values = "*fp32", ("temperature_value", "top_p_value", "min_p_value")
    parameters = {"temperature": fp32, "top_k": "*i32", "top_p": fp32, "min_p": fp32, "indices": "*i32"}
    random = {"seed": "*i64", "offset": "*i64", "seed_value": "i64", "offset_value": "i64"}
    scratch = dict.fromkeys(("maxima", "sums", "kept", "found"), fp32) | {"ids": "*i32"}
    given = parameters | random | scratch | dict.fromkeys(values, "fp32")
    draws, states = {"tokens": "*i32", "valid": "*i8", "state": None}, {"tokens": None, "valid": None, "state": fp32}
    none = dict.fromkeys(("indices", "temperature", "min_p", "seed", "offset"))
    for vocab, dtype, outs, logits, joint, greedy in (
        (151_936, torch.float32, draws, True, True, False),
        (262_144, torch.bfloat16, draws, True, False, True),
        (262_144, torch.float32, draws | none, False, False, False),
        (1000, torch.float32, states | none, False, True, False),
    ):
        c = threshold.row_config(vocab, dtype, logits, joint, greedy)
        x = {"x": "*bf16" if dtype == torch.bfloat16 else fp32, "c": c}
        options = threshold.launch_options(target == "gfx942")
        usage = compile_kernel(sampling.select_rows, target, given | outs | x, **options)
        assert usage.spills == 0, (vocab, usage.spills)
    stats = {"x": fp32, "temperature": fp32, "maxima": fp32, "sums": fp32, "temperature_value": "fp32"}
    kernels = {
        threshold.chunk_stats: (stats | {"logits": True, "block": 64}, 4),
        sampling.map_rows: (
            {"x": "*bf16", "out": fp32, "state": fp32, "temperature": fp32, "temperature_value": "fp32"}
            | {"logits": True, "mask": False, "block": sampling.MAP_BLOCK},
            4,
        ),
        logprobs.report_rows: (
            dict.fromkeys(("x", "maxima", "sums", "logprobs", "top_logprobs"), fp32)
            | {"tokens": "*i32", "top_tokens": "*i32", "padded": 4096},
            4,
        ),
        logprobs.penalise_rows: (
            dict.fromkeys(("logits", "out", "repetition", "presence", "frequency"), fp32)
            | dict.fromkeys(("tokens", "slots", "prompt_lens", "lens", "counts"), "*i32")
            | dict.fromkeys(("repetition_value", "presence_value", "frequency_value"), "fp32")
            | {"block": 1024},
            8,
        ),
        speculative.verify_chain: (
            dict.fromkeys(("draft", "target", "sums"), fp32)
            | dict.fromkeys(("token_ids", "out", "accepted", "emitted"), "*i32")
            | random
            | {"padded": 4096},
            8,
        ),
    }
    for kernel, (arguments, num_warps) in kernels.items():
        assert compile_kernel(kernel, target, arguments, num_warps=num_warps).spills == 0, kernel
