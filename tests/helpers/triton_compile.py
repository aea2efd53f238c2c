"""Compiles the Triton kernels without a GPU, and says what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from quire.definition import AttentionSpec
from quire.kernels.hopper.decode import host as decode_host
from quire.kernels.hopper.mla import host as mla_host
from quire.kernels.hopper.prefill import host as prefill_host
from quire.kernels.triton import kernel
from quire.kernels.triton.config import Machine, choose_block_m, make_config, tune

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_89": (GPUTarget("cuda", 89, 32), 99 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@dataclass
class Usage:
    registers: int
    spills: int
    shared: int
    limit: int
    asm: dict


def compile_attend(spec: AttentionSpec, name: str, rows: int, page_size: int = 16, split: bool = True) -> Usage:
    """The attention kernel for requests of about `rows` query rows."""
    target, limit = TARGETS[name]
    native = name in ("sm_89", "sm_90", "sm_100", "sm_120")
    machine = Machine(num_sms=132, shared_memory=limit, fp8=native, hip=target.backend == "hip", wgmma=name == "sm_90")
    tuning = tune(spec, choose_block_m(spec, rows, machine), page_size > 0, limit)
    c = make_config(spec, page_size, tuning, split, 64, (False, False, False, True, False, False, spec.latent), machine)
    q, kv = _NAMES[spec.q_dtype], _NAMES[spec.kv_dtype] if native or spec.kv_dtype.itemsize > 1 else "u8"
    pointers = {
        "q": q, "k": kv, "v": kv, "out": q, "partials": "fp32", "lse": "fp32", "arrivals": "i32", "qo_indptr": "i32",
        "kv_indptr": "i32", "last_page_len": "i32", "indices": "i32",
        "q_pe": q if c.latent else None, "k_pe": kv if c.latent else None,
        "mask_bits": "u8" if spec.mask.custom_mask else None, "mask_indptr": "i32" if spec.mask.custom_mask else None,
        "prefix_lens": "u32" if spec.mask.items else None, "item_positions": "u16" if spec.mask.items else None,
        "sinks": "fp32" if c.sinks else None, "slopes": "fp32" if c.alibi else None,
        "inv_freq": "i64" if c.rope else None, "q_scales": None, "k_scales": None, "v_scales": None,
    }  # fmt: skip
    given = {name: None if dtype is None else f"*{dtype}" for name, dtype in pointers.items()}
    given |= {"c": c, "sm_scale": "fp32", "v_scale": "fp32", "pe_scale": "fp32", "soft_cap": "fp32"}
    return compile_kernel(kernel.attend, name, given, num_warps=tuning.num_warps, num_stages=tuning.num_stages)


def compile_decode(spec: AttentionSpec, max_q_len: int = 1, page_size: int = 16) -> Usage:
    """The decode kernel for Hopper, as wide as it gets: with lse and a far cache."""
    c = decode_host.config(spec, page_size, 64, max_q_len, (False,) * 3 + (True, True, False))
    q, kv = _NAMES[spec.q_dtype], _NAMES[spec.kv_dtype]
    pointers = {
        "q": q, "k": kv, "v": kv, "out": q, "lse": "fp32", "sinks": "fp32" if spec.sinks else None,
        "partials": None if c.schedule.whole_tiles else "i32",
        "qo_indptr": "i32", "kv_indptr": "i32", "last_page_len": "i32", "indices": "i32",
        "mask_bits": "u8" if spec.mask.custom_mask else None, "mask_indptr": "i32" if spec.mask.custom_mask else None,
        "q_pe": None, "k_pe": None, "q_scale": None, "k_scale": None, "v_scale": None,
    }  # fmt: skip
    given = {name: None if dtype is None else f"*{dtype}" for name, dtype in pointers.items()}
    given |= {"c": c, "scale": "fp32", "v_gain": "fp32", "cap": "fp32"}
    registers = decode_host.tune(spec, max_q_len).registers
    return compile_kernel(
        decode_host.decode, "sm_90", given, num_warps=4, maxnreg=registers, enable_fp_fusion=not c.split_group
    )


def compile_latent(
    spec: AttentionSpec, max_q_len: int = 1, page_size: int = 16, far: bool = True, many_rows: bool = False
) -> Usage:
    """Compile an MLA kernel of the Hopper family for sm_90: decode's or, if many_rows, prefill's."""
    c = mla_host.config(spec, page_size, 64, max_q_len, (False,) * 3 + (True, far, True, False), many_rows)
    number = _NAMES[spec.q_dtype]
    pointers = dict.fromkeys(("q", "q_pe", "k", "v", "k_pe", "out"), number) | {"partials": "fp32", "lse": "fp32"}
    pointers |= dict.fromkeys(("arrivals", "qo_indptr", "kv_indptr", "last_page_len", "indices"), "i32")
    given = {name: f"*{dtype}" for name, dtype in pointers.items()}
    given |= {"sinks": "*fp32" if spec.sinks else None, "q_scale": None, "k_scale": None, "v_scale": None}
    given |= {"c": c, "scale": "fp32", "v_gain": "fp32"}
    kernel = mla_host.prefill_latent if many_rows else mla_host.decode_latent
    return compile_kernel(kernel, "sm_90", given, num_warps=4, maxnreg=mla_host.REGISTERS)


def compile_prefill(spec: AttentionSpec, page_size: int = 16) -> tuple[prefill_host.PrefillConfig, Usage]:
    """Compile the prefill kernel of the Hopper family for sm_90, with pages of 8 tokens and more loaded by TMA; and
    what it is compiled for.
    """
    copied = spec.kv_dtype.itemsize == 1 or page_size in range(1, 8) or spec.mask.custom_mask or spec.mask.items
    block_n = prefill_host.block_size(spec)
    box = 0 if copied else min(page_size or block_n, block_n)
    c = prefill_host.config(spec, page_size, box, (False,) * 3 + (True, False, False, False))
    number = _NAMES[spec.q_dtype]
    given = {"q": f"*{number}", "out": f"*{_NAMES[spec.o_dtype]}"} | dict.fromkeys("kv", f"*{_NAMES[spec.kv_dtype]}")
    if box:
        for x, width in (("k", c.part), ("v", c.dim)):
            layout = gl.NVMMASharedLayout.get_default_for([box, width], gl.bfloat16)
            given[x] = f"tensordesc<{number}[{box},{width}],{layout!r}>"
    given |= dict.fromkeys(("counter", "qo_indptr", "kv_indptr", "last_page_len", "indices"), "*i32")
    given |= {"lse": "*fp32", "partials": "*fp32" if c.scheduler.split else None, "q_pe": None, "k_pe": None}
    given |= {"sinks": "*fp32" if spec.sinks else None}
    mask = spec.mask
    given |= {"mask_bits": "*u8" if mask.custom_mask else None, "mask_indptr": "*i32" if mask.custom_mask else None}
    given |= {"prefix_lens": "*u32" if mask.items else None, "item_positions": "*u16" if mask.items else None}
    given |= {"slopes": "*fp32" if c.alibi else None, "q_scale": None, "k_scale": None, "v_scale": None}
    given |= {"c": c, "scale": "fp32", "v_gain": "fp32", "cap": "fp32"}
    return c, compile_kernel(prefill_host.prefill, "sm_90", given, num_warps=4, enable_fp_fusion=c.scheduler.split)


def disassemble(usage: Usage) -> str:
    """The machine instructions of a kernel for an NVIDIA GPU."""
    return _run_tool("nvdisasm", usage.asm["cubin"])


# How strides and sizes end.
MULTIPLES = ("_token", "_head", "_page", "_state", "_row", "_column", "_expert", "_features", "vocab")


def compile_kernel(kernel, name: str, given: dict, **options) -> Usage:
    """A kernel whose arguments have these types ("*fp16", "fp32"), or, if not strings, these values; the rest are i32.
    Pointers, `MULTIPLES`, and all numbers in tuples are multiples of 16.
    """
    target, limit = TARGETS[name]
    constants, attributes = {}, {}

    def type_of(path: tuple[int, ...], kind, argument: str):
        if isinstance(kind, tuple):
            return tuple(type_of((*path, i), each, argument) for i, each in enumerate(kind))
        if not isinstance(kind, str):
            constants[path] = kind
            return "constexpr"
        if len(path) > 1 or kind.startswith("*") or argument.endswith(MULTIPLES):
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    signature = {a: type_of((i,), given.get(a, "i32"), a) for i, a in enumerate(kernel.arg_names)}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(source(kernel, signature, constants, attributes), target=target, options=options)
    registers, spills = _resources(compiled.asm["cubin"]) if target.backend == "cuda" else _amd(compiled.asm["amdgcn"])
    return Usage(registers, spills, compiled.metadata.shared, limit, compiled.asm)


def _run_tool(name: str, cubin: bytes, *options: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    text = _run_tool("cuobjdump", cubin, "--dump-resource-usage")
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def _amd(text: str) -> tuple[int, int]:
    return int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]), int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
