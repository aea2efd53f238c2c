"""The end of a tile: normalising its state, and writing its rows of out and lse."""

from __future__ import annotations

from collections import namedtuple

import triton
from triton import language as tl

from quire.kernels.triton.softmax import add_sink

# Output rows, with strides in elements, and their float32 lse, [tokens, heads].
OutputRows = namedtuple("OutputRows", "out lse stride_token stride_head")


@triton.jit
def write_rows(acc, m, l, output, layer, token, head, h, valid, c: tl.constexpr):
    """Write the states of rows of query heads `head` and KV head h. A row that saw no key gets 0 and an lse of -inf."""
    dv = tl.arange(0, c.block_dv)[None, :]
    if c.sinks:
        acc, m, l = add_sink(acc, m, l, tl.load(layer.sinks + head, valid, 0.0))
    acc = acc * (layer.v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    if c.v_scales:
        acc *= tl.load(layer.v_scales + h)
    at = token[:, None].to(tl.int64) * output.stride_token + head[:, None].to(tl.int64) * output.stride_head + dv
    tl.store(output.out + at, acc, valid[:, None] & (dv < c.head_dim_vo))
    if c.lse:
        at = token * (c.heads * c.group) + head
        tl.store(output.lse + at, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), valid)


@triton.jit
def clear_padding(output, q_end, tokens, c: tl.constexpr):
    """Write 0 and an lse of -inf to the rows after q_end, which belong to no request, spread over all programs."""
    dv = tl.arange(0, c.block_dv)[None, :]
    head = tl.arange(0, c.block_heads)
    valid = head < c.heads * c.group
    for token in range(q_end + tl.program_id(0), tokens, tl.num_programs(0)):
        zero = tl.full([c.block_heads, c.block_dv], 0.0, tl.float32)
        at = tl.full([1], 1, tl.int64) * token * output.stride_token + head.to(tl.int64) * output.stride_head
        tl.store(output.out + at[:, None] + dv, zero, valid[:, None] & (dv < c.head_dim_vo))
        if c.lse:
            tl.store(output.lse + token * (c.heads * c.group) + head, float("-inf"), valid)
