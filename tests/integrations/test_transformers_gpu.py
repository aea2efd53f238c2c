"""Quire's attention and mask functions for Transformers on a GPU: 16-bit kernels, no waiting, CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from helpers.dense_attention import expected, network, padded, seen_by
from quire.integrations.transformers import attention, mask

pytestmark = pytest.mark.gpu
MODULE = SimpleNamespace(layer_idx=0, is_causal=True)
CONFIG = SimpleNamespace(num_key_value_heads=2, sliding_window=64)


def tensors(batch, q_len, kv_len, dtype=torch.bfloat16, dim=128):
    return [
        torch.randn(batch, heads, n, dim, dtype=dtype, device="cuda")
        for heads, n in ((8, q_len), (2, kv_len), (2, kv_len))
    ]


def made(batch, q_len, kv_len, window=None, padding=None, q_offset=None):
    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    offset = kv_len - q_len if q_offset is None else q_offset
    given = {"mask_function": function, "attention_mask": padding, "local_size": window, "q_offset": offset}
    return mask(batch, q_len, kv_len, config=CONFIG, device="cuda", **given)


@contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (8, 300), (200, 300), (300, 300)])
@pytest.mark.parametrize("dim", [64, 128, 80])
def test_attention_16_bit_kernels_match_the_oracle(dim, q_len, kv_len, side, window):
    q, k, v = tensors(3, q_len, kv_len, dim=dim)
    padding = padded(3, kv_len, side, "cuda").bool()
    if side == "left":
        padding[1, : kv_len - q_len] = False
    sinks = torch.randn(8, device="cuda")
    given = made(3, q_len, kv_len, window, padding)
    out, _ = attention(MODULE, q, k, v, given, s_aux=sinks, softcap=20.0, sliding_window=window)
    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    seen = seen_by(function, 3, q_len, kv_len, padding)
    want, rows = expected(q, k, v, seen, dim**-0.5, 20.0, sinks), padding[:, -q_len:]
    assert out.isfinite().all()
    assert (out.double() - want)[rows].norm() <= 4e-3 * want[rows].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inference", [False, True])
def test_attention_and_masks_never_wait_for_the_device(dtype, inference):
    """Neither the first layer of a mask nor later ones, nor what becomes of masks of the caller."""
    padding = {n: padded(3, n, "left", "cuda").bool() for n in (96, 97)}
    offset = torch.tensor(90, device="cuda")
    seen = torch.rand(3, 1, 6, 96, device="cuda") < 0.5
    offsets = torch.tensor([0, 7, 18], dtype=torch.int32, device="cuda")
    new = {q_len: tensors(3, q_len, 96, dtype) for q_len in (1, 6, 96)}
    longer, packed = tensors(3, 1, 97, dtype), tensors(3, 6, 6, dtype)

    def step():
        for window in (None, 64):
            for q_len, (q, k, v) in new.items():
                for given in (padding[96], None):
                    masks = [made(3, q_len, 96, window, given)]
                    if q_len == 6:
                        masks.append(made(3, q_len, 96, window, given, q_offset=offset))
                    for made_mask in masks:
                        for _layer in range(2):
                            attention(MODULE, q, k, v, made_mask, sliding_window=window)
            attention(MODULE, *longer, made(3, 1, 97, window, padding[97]))
        attention(MODULE, *new[6], seen)
        attention(MODULE, *packed, None, cu_seq_lens_q=offsets)

    with torch.inference_mode(inference):
        step()  # compiles the kernels
        with no_waiting():
            step()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("length", [1, 4])
def test_forward_decode_steps_never_wait_for_the_device(name, length):
    model = network(name, "cuda")
    model.set_attn_implementation("quire")
    tokens, masks = torch.randint(1, 90, (2, 9), device="cuda"), padded(2, 30, "left", "cuda")
    with torch.no_grad():
        cache = model(tokens, attention_mask=masks[:, :9]).past_key_values
        for i in range(3):
            given = masks[:, : 9 + (i + 1) * length]
            positions = given.cumsum(1)[:, -length:] - 1
            options = {"attention_mask": given, "position_ids": positions, "past_key_values": cache}
            if i < 2:  # the first steps compile kernels
                model(tokens[:, :length], **options)
            else:
                with no_waiting():
                    model(tokens[:, :length], **options)


@pytest.mark.parametrize("q_len", [1, 40])
def test_attention_a_captured_graph_reads_changed_masks_and_later_calls_work(q_len):
    """Two layers and their mask, with a cache that has room for more tokens, as static caches have."""
    length, room = 40, 64
    q, k, v = tensors(2, q_len, room)
    padding = torch.zeros(2, room, dtype=torch.bool, device="cuda")
    offset = torch.zeros((), dtype=torch.int64, device="cuda")
    outs = [torch.empty(2, q_len, 8, 128, dtype=q.dtype, device="cuda") for _ in range(2)]

    def step():
        given = made(2, q_len, room, padding=padding, q_offset=offset)
        for layer, out in enumerate(outs):
            out.copy_(attention(MODULE, q, k + layer, v, given)[0])

    def check(tokens):
        seen = seen_by(causal_mask_function, 2, q_len, tokens, padding[:, :tokens])
        for layer, out in enumerate(outs):
            want = expected(q, k[:, :, :tokens] + layer, v[:, :, :tokens], seen, 128**-0.5)
            assert (out.double() - want).norm() <= 4e-3 * want.norm()

    def change(tokens):
        padding.zero_()[:, :tokens] = True
        padding[1, : torch.randint(tokens - q_len + 1, ()).item()] = False
        offset.fill_(tokens - q_len)
        q.normal_()

    change(length)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    for tokens in (length, length + 9, room):
        change(tokens)
        graph.replay()
        check(tokens)
        step()
        check(tokens)


def test_mask_with_a_hole_for_several_tokens_fails_on_the_device_with_a_reason():
    code = """
import torch
from quire.integrations.transformers import mask
padding = torch.ones(2, 9, dtype=torch.bool, device="cuda")
padding[1, 4] = False
mask(2, 5, 9, q_offset=4, attention_mask=padding, device="cuda")
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "a row of attention_mask hides tokens between others" in done.stderr + done.stdout
