"""Attention under block-sparse masks, against dense attention in float64 under the same mask."""

from __future__ import annotations

import math

import pytest
import torch

import quire as flashinfer
from quire.bench.batches import relative_error
from quire.definition import attention_spec
from quire.definition.oracle import attend
from quire.kernels.pack import pack_blocks
from quire.sparse import convert_bsr_mask_layout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
on_each = pytest.mark.parametrize("device", DEVICES)


def dense(q, k, v, mask, sm_scale=None, cap=0.0):
    """[queries, heads, dim] and lse [queries, heads] in float64; mask is [queries, keys], or [heads, queries, keys]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("mhd,nhd->hmn", q, k) * (sm_scale or q.shape[-1] ** -0.5)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return torch.einsum("hmn,nhd->mhd", weights, v.nan_to_num()), lse.T / math.log(2)


def assert_exact(found, exact, dtype=None):
    """Within what computing in dtype, by default that of the output, loses."""
    (out, lse), (exact_out, exact_lse) = found, exact
    dtype = dtype or out.dtype
    assert not out.isnan().any()
    assert relative_error(out, exact_out) < BOUNDS[dtype]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # of half types, the products may be rounded too
    torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)


def workspace(device):
    return torch.empty(0, dtype=torch.uint8, device=device)  # only names the device


class Matrix:
    """A random block-sparse matrix: BSR tables, a mask for each block, and both as dense masks."""

    def __init__(self, M, N, R, C, device="cpu", density=0.4):
        self.sizes = (M, N, R, C)
        there = torch.rand(-(-M // R), N // C, device=device) < density
        self.indptr = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0)).int()
        self.indices = there.nonzero()[:, 1].int()
        self.data = torch.rand(len(self.indices), R, C, device=device) < 0.6
        self.blocks = there.repeat_interleave(R, 0).repeat_interleave(C, 1)[:M]
        self.entries = torch.zeros(there.shape[0] * R, N, dtype=torch.bool, device=device)
        for data, (i, j) in zip(self.data, there.nonzero().tolist(), strict=True):
            self.entries[i * R : i * R + R, j * C : j * C + C] = data
        self.entries = self.entries[:M]

    def packed(self):
        """The masks of rows of blocks, by the definition: columns that are there, row by row."""
        parts = []
        for i, (a, b) in enumerate(zip(self.indptr.tolist(), self.indptr[1:].tolist(), strict=False)):
            _, _, R, C = self.sizes
            columns = (self.indices[a:b, None].long() * C + torch.arange(C, device=self.indices.device)).flatten()
            rows = self.entries[i * R : i * R + R]
            parts.append(flashinfer.packbits(rows[:, columns].flatten(), "little"))
        return torch.cat(parts)


def random_qkv(M, N, heads, dim=64, dtype=torch.float32, device="cpu"):
    return [torch.randn(n, h, dim, device=device).to(dtype) for n, h in zip((M, N, N), (*heads, heads[1]), strict=True)]


def planned(matrix, heads, device="cpu", dtype=torch.float32, dim=64, **options):
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    options = {"q_data_type": dtype, "o_data_type": dtype} | options
    wrapper.plan(matrix.indptr, matrix.indices, *matrix.sizes, *heads, dim, **options)
    return wrapper


@on_each
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (16, 8), (32, 1), (1, 32)])
@pytest.mark.parametrize("form", ["blocks", "mask", "packed"])
def test_block_sparse_run_equals_dense_attention(device, heads, sizes, form, rng):
    R, C = sizes
    N = C * rng.randrange(1, max(2, 64 // C))
    matrix = Matrix(rng.randrange(1, 70), N, R, C, device)  # the last row of blocks may be lower than R
    masks = {"blocks": {}, "mask": {"mask": matrix.data}, "packed": {"packed_mask": matrix.packed()}}[form]
    wrapper = planned(matrix, heads, device, **masks)
    q, k, v = random_qkv(*matrix.sizes[:2], heads, device=device)
    seen = matrix.blocks if form == "blocks" else matrix.entries
    unread = ~matrix.blocks.any(0)
    k[unread], v[unread] = torch.nan, torch.nan  # blocks that nobody has
    exact = dense(q, k.nan_to_num(), v, seen)
    assert_exact(wrapper.run(q, k, v, return_lse=True), exact)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    assert wrapper.run(q, k, v, out=out, lse=lse) is out
    assert_exact((out, lse), exact)


@on_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block_sparse_plan_without_an_output_dtype_gives_float16(device, dtype):
    matrix = Matrix(40, 64, 8, 16, device)
    q, k, v = random_qkv(40, 64, (8, 2), dtype=dtype, device=device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(matrix.indptr, matrix.indices, *matrix.sizes, 8, 2, 64, q_data_type=dtype)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.dtype == torch.float16
    assert_exact((out, lse), dense(q, k, v, matrix.blocks), dtype)
    out, lse = planned(matrix, (8, 2), device, dtype).run(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert_exact((out, lse), dense(q, k, v, matrix.blocks))


@on_each
def test_block_sparse_causal_run_counts_the_keys_of_its_row(device):
    """Query i of q_len sees the first i + 1 + kv_len - q_len of the row's kv_len keys. A mask goes before."""
    matrix = Matrix(29, 40, 6, 4, device)
    seen = matrix.blocks.clone()
    for i in range(29):
        q_len = min(6, 29 - i // 6 * 6)
        rank = matrix.blocks[i].cumsum(0) - 1
        seen[i] &= rank <= i % 6 + int(matrix.blocks[i].sum()) - q_len
    assert int(seen.sum()) < int(matrix.blocks.sum())
    q, k, v = random_qkv(29, 40, (4, 2), device=device)
    run = planned(matrix, (4, 2), device, causal=True).run
    assert_exact(run(q, k, v, return_lse=True), dense(q, k, v, seen))
    run = planned(matrix, (4, 2), device, causal=True, mask=matrix.data).run
    assert_exact(run(q, k, v, return_lse=True), dense(q, k, v, matrix.entries))


@on_each
def test_block_sparse_run_with_scales_per_head_equals_dense_attention(device):
    matrix = Matrix(20, 24, 5, 3, device)
    q, k, v = random_qkv(20, 24, (6, 2), device=device)
    scales = [torch.rand(n, device=device) + 0.5 for n in (6, 2, 2)]
    exact = dense(*(x * scale[:, None] for x, scale in zip((q, k, v), scales, strict=True)), matrix.blocks)
    wrapper = planned(matrix, (6, 2), device)
    assert_exact(wrapper.run(q, k, v, *scales, return_lse=True), exact)
    assert relative_error(wrapper.forward(q, k, v, *scales), exact[0]) < BOUNDS[torch.float32]
    exact = dense(q * 2.0, k * 0.5, v * 3.0, matrix.blocks)
    assert_exact(wrapper.run(q, k, v, 2.0, 0.5, 3.0, return_lse=True), exact)


@on_each
def test_block_sparse_forward_with_other_values_replaces_the_planned_ones(device):
    matrix = Matrix(20, 24, 5, 3, device)
    q, k, v = random_qkv(20, 24, (6, 2), device=device)
    wrapper = planned(matrix, (6, 2), device, sm_scale=0.3, logits_soft_cap=2.0, mask=matrix.data)
    exact = dense(q, k, v, matrix.entries, 0.3, 2.0)
    assert_exact(wrapper.run(q, k, v, return_lse=True), exact)
    bound = BOUNDS[torch.float32]
    assert relative_error(wrapper.forward(q, k, v, sm_scale=0.3, logits_soft_cap=2.0), exact[0]) < bound
    assert relative_error(wrapper.forward(q, k, v), dense(q, k, v, matrix.entries)[0]) < bound
    wrapper.end_forward()


@on_each
@pytest.mark.parametrize("pos_encoding", ["ROPE_LLAMA", "ALIBI"])
def test_block_sparse_positions_are_counted_within_a_row_of_blocks(device, pos_encoding):
    """One row of blocks with some columns left out is attention over the columns that are left."""
    columns = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    q, k, v = random_qkv(5, 20, (6, 2), device=device)
    kept = [x.unflatten(0, (5, 4))[columns.long()].flatten(0, 1) for x in (k, v)]
    layer = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim_qk": 64, "q_dtype": torch.float32, "causal": False}
    exact = attend(q, *kept, attention_spec(**layer, pos_encoding=pos_encoding))
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    tables = torch.tensor([0, 3], dtype=torch.int32, device=device), columns
    types = {"q_data_type": "float32", "o_data_type": "float32"}
    wrapper.plan(*tables, 5, 20, 5, 4, 6, 2, 64, pos_encoding_mode=pos_encoding, **types)
    assert_exact(wrapper.run(q, k, v, return_lse=True), exact)


def test_convert_bsr_mask_layout_gives_the_mask_of_rows(rng):
    """Blocks of no row are left out; the places after those that are taken say nothing."""
    matrix = Matrix(12, 20, 3, 4)
    flat = convert_bsr_mask_layout(torch.cat([matrix.data, matrix.data[:1]]), matrix.indptr)
    at = 0
    for i in range(4):
        columns = matrix.indices[matrix.indptr[i] : matrix.indptr[i + 1]].long()
        rows = matrix.entries[3 * i : 3 * i + 3].unflatten(1, (5, 4))[:, columns].flatten()
        assert torch.equal(flat[at : at + len(rows)], rows)
        at += len(rows)
    spare = Matrix(12, 20, 3, 4, density=1.1)
    spare.indices, spare.data = spare.indices.repeat(2), spare.data.repeat(2, 1, 1)
    q, k, v = random_qkv(12, 20, (2, 2))
    found = planned(spare, (2, 2), mask=spare.data).run(q, k, v, return_lse=True)
    assert_exact(found, dense(q, k, v, spare.entries))


@on_each
def test_convert_bsr_mask_layout_with_an_invalid_indptr_writes_inside_its_output(device):
    """On a device nobody looks at the values of indptr."""
    mask = torch.ones(6, 3, 4, dtype=torch.bool, device=device)
    for values in ([0, 9, 2], [-5, 3, 1 << 30], [1 << 30, 0, 4], [0], [4, 4, 4]):
        indptr = torch.tensor(values, dtype=torch.int32, device=device)
        assert len(convert_bsr_mask_layout(mask, indptr)) == 72
        assert len(pack_blocks(mask, indptr)) == 9 + len(values)


@pytest.mark.gpu
def test_block_sparse_plan_with_tables_on_the_host_does_not_wait():
    host, heads = Matrix(40, 64, 8, 16), (8, 2)
    q, k, v = random_qkv(40, 64, heads, device="cuda")
    for mask in (None, host.data, host.data.cuda()):
        seen = (host.blocks if mask is None else host.entries).cuda()
        run = planned(host, heads, "cuda", mask=mask).run
        assert_exact(run(q, k, v, return_lse=True), dense(q, k, v, seen))
    host.indptr, host.indices, mask = host.indptr.cuda(), host.indices.cuda(), host.data.cuda()
    planned(host, heads, "cuda", mask=mask)  # compiles what packs
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrapper = planned(host, heads, "cuda", mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_exact(wrapper.run(q, k, v, return_lse=True), dense(q, k, v, host.entries.cuda()))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": None}, "indptr and indices are needed"),
        ({"indptr": ints(0, 1)}, "indptr has 2 entries: 3 are needed"),
        ({"indptr": ints(0, 1, 4)}, r"indptr\[-1\] = 4 is beyond the number of indices = 3"),
        ({"indptr": ints(0, 2, 1)}, "indptr falls at request 1"),
        ({"indices": ints(0, 3, 1)}, r"indices\[1\] = 3 is out of range: 0 to N / C - 1 = 2"),
        ({"indices": ints(0, 1, -1)}, r"indices\[2\] = -1"),
        ({"indices": ints(0, 1, 2).short()}, "indices is torch.int16"),
        ({"N": 13}, "N = 13 .* a multiple of C = 4"),
        ({"M": -1}, "M = -1"),
        ({"R": 0}, "R = 0"),
        ({"C": 0}, "C = 0"),
        ({"mask": torch.ones(3, 4, 5).bool()}, r"mask = 'torch.bool \[3, 4, 5\]'.*\[3, 5, 4\]"),
        ({"mask": torch.ones(3, 5, 4)}, r"mask = 'torch.float32"),
        ({"packed_mask": torch.zeros(3, dtype=torch.uint8)}, "packed_custom_mask has 3 bytes: the requests need 6"),
        ({"num_qo_heads": 3}, "num_qo_heads = 3"),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode = 'ROPE'"),
        ({"block_mask": torch.ones(2, 2, 3).bool()}, "block_mask is not supported"),
        ({"kv_splits": "auto"}, "kv_splits is not supported"),
        ({"q_scale": torch.ones(1)}, "q_scale is not supported"),
    ],
)
def test_block_sparse_plan_with_wrong_arguments_is_refused(changes, message):
    given = {"indptr": ints(0, 1, 3), "indices": ints(0, 1, 2), "M": 8, "N": 12, "R": 5, "C": 4}
    given |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "q_data_type": "float32"}
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
    with pytest.raises(ValueError, match=message):
        wrapper.plan(**given | changes)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(*random_qkv(8, 12, (4, 2)))


def test_block_sparse_run_with_wrong_tensors_is_refused():
    wrapper = planned(Matrix(8, 12, 5, 4), (4, 2))
    q, k, v = random_qkv(8, 12, (4, 2))
    for given, message in (
        ((q[1:], k, v), r"q.shape = \[7, 4, 64\]"),
        ((q, k[4:], v), r"k.shape = \[8, 2, 64\]"),
        ((q, k, v[0]), r"v.shape = \[2, 64\]"),
        ((q.half(), k, v), "q is torch.float16"),
        ((q, k[:, :1], v), "k has shape"),
        ((q, k, v, None, None, None, q.half()), "out is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(*given)
    with pytest.raises(ValueError, match="backend = 'vsa'"):
        flashinfer.BlockSparseAttentionWrapper(workspace("cpu"), "vsa")
    assert flashinfer.BlockSparseAttentionWrapper(workspace("cpu"), "vsa_blackwell").device.type == "cpu"


class Maps:
    """Random matrices of blocks of random sizes, one per KV head, and the same as dense masks."""

    def __init__(self, rng, heads, M, N, device="cpu", dtype=torch.int32):
        self.heads, (_, kv) = heads, heads
        self.M, self.N = M, N
        rows, columns = rng.randrange(1, 7), rng.randrange(1, 9)
        self.map = torch.rand(kv, rows, columns, device=device) < 0.4
        self.row_sizes, self.col_sizes = (
            self.partition(kv, n, blocks).to(device, dtype) for n, blocks in ((M, rows), (N, columns))
        )
        self.mask = torch.stack(
            [
                there.repeat_interleave(high, 0).repeat_interleave(wide, 1)
                for there, high, wide in zip(self.map, self.row_sizes, self.col_sizes, strict=True)
            ]
        )

    @staticmethod
    def partition(kv, n, blocks):
        """Sizes that add up to n for each head, some 0."""
        cuts = torch.randint(0, n + 1, (kv, blocks - 1)).sort(1).values
        ends = torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=n)
        return ends.diff()

    def exact(self, q, k, v, mask=None, **layer):
        """The oracle's out and lse in the wrapper's layout, HND."""
        mask = (self.mask if mask is None else mask).repeat_interleave(self.heads[0] // self.heads[1], 0)
        out, lse = dense(*(x.transpose(0, 1) for x in (q, k, v)), mask, **layer)
        return out.transpose(0, 1), lse.T

    def qkv(self, dtype=torch.float32):
        shapes = zip((self.M, self.N, self.N), (*self.heads, self.heads[1]), strict=True)
        return [torch.randn(h, n, 64, device=self.map.device).to(dtype) for n, h in shapes]

    def planned(self, dtype=torch.float32, **options):
        wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(self.map.device))
        wrapper.plan(self.map, self.row_sizes, self.col_sizes, *self.heads, 64, q_data_type=dtype, **options)
        return wrapper


@on_each
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_variable_block_sparse_run_equals_dense_attention(device, heads, dtype, rng):
    maps = Maps(rng, heads, rng.randrange(1, 60), rng.randrange(1, 80), device, dtype)
    wrapper = maps.planned()
    q, k, v = maps.qkv()
    unread = ~maps.mask.any(1)
    k[unread], v[unread] = torch.nan, torch.nan
    exact = maps.exact(q, k.nan_to_num(), v)
    found = wrapper.run(q, k, v, return_lse=True)
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()
    assert_exact(found, exact)
    shape = (heads[1] * maps.M, heads[0] // heads[1], 64)
    out, lse = torch.full(shape, torch.nan, device=device), torch.full(shape[:2], torch.nan, device=device)
    assert torch.equal(wrapper.run(q, k, v, out, lse), found[0])
    by_head = [x.unflatten(0, (heads[1], maps.M)).transpose(1, 2).flatten(0, 1) for x in (out, lse)]
    assert_exact(by_head, exact)


@on_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_variable_block_sparse_run_in_16_bits_equals_dense_attention(device, dtype, rng):
    maps = Maps(rng, (8, 2), 50, 70, device)
    q, k, v = maps.qkv(dtype)
    assert_exact(maps.planned(dtype).run(q, k, v, return_lse=True), maps.exact(q, k, v))


@on_each
def test_variable_block_sparse_causal_run_and_forward_equal_dense_attention(device, rng):
    maps = Maps(rng, (4, 2), 30, 50, device)
    q, k, v = maps.qkv()
    seen = maps.mask.clone()
    for h, sizes in enumerate(maps.row_sizes.tolist()):
        lines = [(i, size) for size in sizes for i in range(size)]
        for m, (i, q_len) in enumerate(lines):
            rank = maps.mask[h, m].cumsum(0) - 1
            seen[h, m] &= rank <= i + int(maps.mask[h, m].sum()) - q_len
    wrapper = maps.planned(causal=True, sm_scale=0.2)
    exact = maps.exact(q, k, v, seen, sm_scale=0.2)
    assert_exact(wrapper.run(q, k, v, return_lse=True), exact)
    again = wrapper.forward(q, k, v, logits_soft_cap=3.0)
    assert relative_error(again, maps.exact(q, k, v, seen, cap=3.0)[0]) < BOUNDS[torch.float32]


def test_variable_block_sparse_run_without_blocks_is_zero(rng):
    maps = Maps(rng, (4, 2), 7, 9)
    maps.map[:] = False
    out, lse = maps.planned().run(*maps.qkv(), return_lse=True)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_row_sz": ints([4, 4], [4, 5])}, r"block_row_sz.sum\(1\) = \[8, 9\]"),
        ({"block_col_sz": ints([1, 2, 3], [1, 2, 2])}, r"block_col_sz.sum\(1\) = \[5, 6\]"),
        ({"block_col_sz": ints([1, 2, 3], [7, -3, 2])}, r"block_col_sz.min\(\) = -3"),
        ({"block_row_sz": ints([4, 4])}, r"block_row_sz.shape = \[1, 2\] .*\[2, 2\]"),
        ({"block_col_sz": torch.ones(2, 3)}, "block_col_sz.dtype = torch.float32"),
        ({"block_mask_map": torch.ones(2, 0, 3).bool()}, r"block_mask_map.shape = \[2, 0, 3\]"),
        ({"block_row_sz": ints([1 << 30] * 2, [1 << 30] * 2)}, r"block_row_sz.sum\(\) = 4294967296"),
        ({"num_kv_heads": 1}, r"len\(block_mask_map\) = 2 .* num_kv_heads = 1"),
        ({"num_qo_heads": 3}, "num_qo_heads = 3 .* a multiple of num_kv_heads = 2"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode = 'ALIBI'"),
    ],
)
def test_variable_block_sparse_plan_with_wrong_arguments_is_refused(changes, message):
    given = {"block_mask_map": torch.ones(2, 2, 3).bool(), "block_row_sz": ints([4, 4], [3, 5])}
    given |= {"block_col_sz": ints([1, 2, 3], [4, 0, 2]), "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    with pytest.raises(ValueError, match=message):
        wrapper.plan(**given | changes)
    q, k, v = torch.zeros(4, 8, 64).half(), torch.zeros(2, 6, 64).half(), torch.zeros(2, 6, 64).half()
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(q, k, v)
    wrapper.plan(**given)
    with pytest.raises(ValueError, match=r"q.shape = \[4, 7, 64\]"):
        wrapper.run(q[:, 1:], k, v)
    with pytest.raises(ValueError, match=r"k.shape = \[1, 6, 64\]"):
        wrapper.run(q, k[1:], v)


def test_variable_block_sparse_workspace_of_another_device_is_refused():
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.reset_workspace_buffer(workspace("cpu"), torch.empty(1 << 14, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"int_workspace_buffer.device = 'meta'"):
        wrapper.reset_workspace_buffer(workspace("cpu"), workspace("meta"))
