"""Products of segments against float64, and what `SegmentGEMMWrapper` refuses."""

from __future__ import annotations

import pytest
import torch

import quire
from helpers.interpret import INTERPRETED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PRECISION = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def make(rng, dtype, device, column_major, lengths=None):
    """Segments of x, of which some are empty, and weights, of which those without rows are NaN."""
    lengths = lengths or [rng.choice((0, 1, rng.randint(2, 30))) for _ in range(rng.randint(1, 9))] + [3]
    num_weights, d_in, d_out = rng.randint(1, 5), rng.choice((9, 64, 200)), rng.choice((5, 96, 130))
    indices = [rng.randrange(num_weights) for _ in lengths]
    used = {index for index, length in zip(indices, lengths, strict=True) if length > 0}
    weights = torch.full((num_weights, d_out, d_in), torch.nan)
    for index in used:
        weights[index] = torch.randn(d_out, d_in)
    x = torch.randn(sum(lengths), d_in)
    given = (weights if column_major else weights.mT.contiguous()).to(device, dtype)
    return x.to(device, dtype), given, torch.tensor(lengths), torch.tensor(indices)


def check_products(out, x, weights, lengths, indices, column_major):
    exact, size = [], []
    for rows, index in zip(x.double().cpu().split(lengths.tolist()), indices.tolist(), strict=True):
        matrix = weights[index].double().cpu()
        matrix = matrix.T if column_major else matrix
        exact.append(rows @ matrix if len(rows) else rows.new_zeros(0, matrix.shape[1]))
        size.append(rows.abs() @ matrix.abs() if len(rows) else exact[-1])
    assert out.dtype == x.dtype
    bound = PRECISION[x.dtype] * (1 if INTERPRETED or out.is_cuda else 2)
    assert ((out.double().cpu() - torch.cat(exact)).abs() <= bound * torch.cat(size)).all()


@pytest.mark.interpret(dtype=[torch.float16, torch.float32])  # the interpreter cannot multiply bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_segment_gemm_of_random_segments_matches_float64(dtype, column_major, device, rng):
    x, weights, lengths, indices = make(rng, dtype, device, column_major)
    wrapper = quire.SegmentGEMMWrapper(torch.empty(16, dtype=torch.uint8, device=device), rng.choice(("auto", "sm90")))
    kind = rng.choice((torch.int32, torch.int64))
    sizes = lengths.to(device, kind)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, kind)
    around = torch.full((len(x) + 2, weights.shape[1 if column_major else 2] + 8), torch.nan).to(device, dtype)
    for options in ({"seg_lens": sizes}, {"seg_indptr": indptr}, {"seg_indptr": indptr, "out": around[1:-1, 4:-4]}):
        given = {"weight_indices": indices.to(device, kind), **options}
        out = wrapper.run(x, weights, len(lengths), column_major, **given)
        check_products(out, x, weights, lengths, indices, column_major)
        assert out is options.get("out", out)
    around[1:-1, 4:-4] = torch.nan
    assert around.isnan().all()


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_segment_gemm_without_indices_takes_the_weights_in_order(device, rng):
    lengths = torch.tensor([2, 0, 5])
    x, weights = torch.randn(9, 24, device=device), torch.randn(4, 24, 40, device=device)
    out = quire.SegmentGEMMWrapper().forward(x, weights, 3, False, seg_lens=lengths.to(device))
    check_products(out[:7], x[:7], weights, lengths, torch.arange(3), False)
    assert (out[7:] == 0).all()
    kept = torch.full_like(out, torch.nan)
    quire.SegmentGEMMWrapper().run(x, weights, 3, False, kept, seg_lens=lengths.to(device))
    assert torch.equal(kept[:7], out[:7])
    assert kept[7:].isnan().all()
    for rows, segments in ((0, 0), (0, 2), (5, 0)):
        none = torch.zeros(segments, dtype=torch.int32, device=device)
        out = quire.SegmentGEMMWrapper().run(x[:rows], weights, segments, False, seg_lens=none)
        assert (out.shape, int(out.count_nonzero())) == ((rows, 40), 0)


@pytest.mark.gpu
def test_segment_gemm_in_a_cuda_graph_reads_the_tables_of_each_replay(rng):
    x, weights, lengths, indices = make(rng, torch.float16, "cuda", True, [3, 40, 0, 21])
    weights = torch.randn_like(weights)
    sizes, which = lengths.cuda(), indices.cuda()
    wrapper = quire.SegmentGEMMWrapper()
    run = lambda: wrapper.run(x, weights, 4, True, seg_lens=sizes, weight_indices=which)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(5):
        cuts = sorted(rng.randint(0, 64) for _ in range(3))
        lengths = torch.tensor([end - start for start, end in zip([0, *cuts], [*cuts, 64], strict=True)])
        indices = torch.tensor([rng.randrange(len(weights)) for _ in range(4)])
        sizes.copy_(lengths)
        which.copy_(indices)
        graph.replay()
        check_products(out, x, weights, lengths, indices, True)


def test_segment_gemm_of_arguments_that_do_not_fit_is_refused():
    x, weights, lens = torch.randn(5, 8), torch.randn(2, 8, 6), torch.tensor([2, 3])
    wrapper = quire.SegmentGEMMWrapper()
    good = {"x": x, "weights": weights, "batch_size": 2, "weight_column_major": False, "seg_lens": lens}
    for message, change in (
        ("seg_lens and seg_indptr are None", {"seg_lens": None}),
        ("weights has shape .*any, any, 8", {"weight_column_major": True}),
        ("weights is torch.float16", {"weights": weights.half()}),
        ("x.dtype = torch.float64", {"x": x.double()}),
        ("seg_lens is a list", {"seg_lens": [2, 3]}),
        ("weights = .*each of 3 segments", {"batch_size": 3, "seg_lens": torch.tensor([1, 1, 1])}),
        ("batch_size = -1", {"batch_size": -1}),
        (r"seg_lens has shape \[2\]: it must be \[3\]", {"batch_size": 3}),
        ("seg_lens is torch.float32", {"seg_lens": lens.float()}),
        (r"seg_lens\[1\] = -1", {"seg_lens": torch.tensor([2, -1])}),
        (r"seg_lens.sum\(\) = 6 .*at most 5", {"seg_lens": torch.tensor([2, 4])}),
        (r"seg_indptr\[0\] = 1", {"seg_indptr": torch.tensor([1, 2, 3])}),
        (r"seg_indptr\[-1\] = 6 is beyond", {"seg_indptr": torch.tensor([0, 2, 6])}),
        (r"weight_indices\[0\] = 2 .*0 to 1", {"weight_indices": torch.tensor([2, 0])}),
        ("out has shape", {"out": torch.empty(5, 5)}),
        ("x requires grad", {"x": x.clone().requires_grad_()}),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(**{**good, **change})
    with pytest.raises(ValueError, match="backend = 'cutlass'"):
        quire.SegmentGEMMWrapper(torch.empty(1), backend="cutlass")
    wrapper.reset_workspace_buffer(torch.empty(1), torch.empty(1))
    check_products(wrapper.run(**good), x, weights, lens, torch.arange(2), False)
