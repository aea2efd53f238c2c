"""Code that the engine and serving backends share: tables of a step, writes to the cache, plans, buffers of graphs,
products of few tokens, of experts, of adapters and with quantized weights, the choice of experts, the most likely
tokens of logits, and exchanges of GPUs.

A scheduler knows each request's length, its number of new tokens and its pages. `StepTables` turns that into the
tensors that operations read, `store` writes the keys and values of the new tokens, and `plan` plans a wrapper. Scale,
window, soft cap and sinks are arguments of each run, so all layers with equal `Heads` share one plan.
"""

from quire.kernels.code_product import (
    MIDDLE,
    PACKED,
    code_product,
    dequantize,
    grouped_code_product,
    multiplies_codes,
    pack_exponents,
    pack_words,
    unpack_exponents,
    unpack_words,
)
from quire.kernels.exchange import Exchange, add_norm
from quire.kernels.grouped_gemm import group_by_expert, grouped_gemm
from quire.kernels.lora import RANK_PAGE, add_lora, add_lora_embedding, group_by_slot
from quire.kernels.sampling import greedy_rows
from quire.kernels.skinny_gemm import max_skinny_rows
from quire.kernels.topk import topk
from quire.steps.graphs import GraphBuffers
from quire.steps.masks import pack_mask, prefix_window_mask
from quire.steps.plans import Heads, Layer, plan, workspace
from quire.steps.products import product
from quire.steps.storage import fp8_dtype, quantize, store
from quire.steps.tables import StepTables, upload

__all__ = [
    "Exchange",
    "GraphBuffers",
    "Heads",
    "Layer",
    "RANK_PAGE",
    "StepTables",
    "add_lora",
    "add_lora_embedding",
    "add_norm",
    "MIDDLE",
    "PACKED",
    "code_product",
    "dequantize",
    "fp8_dtype",
    "greedy_rows",
    "group_by_expert",
    "group_by_slot",
    "grouped_code_product",
    "grouped_gemm",
    "max_skinny_rows",
    "multiplies_codes",
    "pack_exponents",
    "pack_mask",
    "pack_words",
    "unpack_exponents",
    "unpack_words",
    "plan",
    "prefix_window_mask",
    "product",
    "quantize",
    "store",
    "topk",
    "upload",
    "workspace",
]
