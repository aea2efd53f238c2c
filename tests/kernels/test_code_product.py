"""Products with quantized weights against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from helpers.interpret import INTERPRETED
from quire.kernels.code_product import (
    PACKED,
    code_product,
    dequantize,
    grouped_code_product,
    pack_exponents,
    pack_words,
    unpack_exponents,
    unpack_words,
)
from quire.kernels.grouped_gemm import group_by_expert

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PRECISION = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Of each layout, the kind, the rows and columns of a block (0: all columns), and whether there are zero points.
LAYOUTS = {
    "fp8 rows": ("fp8", 1, 0, False),
    "fp8 blocks": ("fp8", 128, 128, False),
    "int8 rows": ("int8", 1, 0, False),
    "int8 groups": ("int8", 1, 128, True),
    "int4 rows": ("int4", 1, 0, False),
    "int4 groups of 128": ("int4", 1, 128, True),
    "int4 groups of 64": ("int4", 1, 64, False),
    "int4 groups of 32": ("int4", 1, 32, True),
    "mxfp4": ("mxfp4", 1, 32, False),
}


@dataclass
class Weight:
    """Codes on a device, and the numbers that they stand for, in float64."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    kind: str
    block: tuple[int, int]
    exact: torch.Tensor

    def product(self, x, bias=None):
        arrivals = torch.zeros(4096, dtype=torch.int32, device=x.device)
        out = code_product(x, self.codes, self.scale, self.zero, bias, arrivals, self.kind, *self.block)
        assert not arrivals.any()
        return out


def make_weight(layout, rows, columns, device):
    """A random weight; the scales of its blocks differ by powers of two."""
    kind, block_rows, block_columns, has_zero = LAYOUTS[layout]
    block = block_rows, block_columns or columns
    blocks = tuple(-(-size // part) for size, part in zip((rows, columns), block, strict=True))
    zero = None
    if kind == "fp8":
        # torch before 2.13 converts numbers above 448 to NaN.
        codes = torch.randn(rows, columns).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        zero = torch.randint(-128, 128, blocks, dtype=torch.int8) if has_zero else None
    else:
        codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
        zero = torch.randint(16, blocks, dtype=torch.uint8) if has_zero else None
    scale = torch.rand(blocks).add(0.5) * 2.0 ** torch.randint(-9, 0, blocks)
    scale = torch.randint(115, 125, blocks, dtype=torch.uint8) if kind == "mxfp4" else scale
    exact = dequantize(codes, scale, zero, kind, block, torch.float64)
    codes = pack_words(codes) if kind in PACKED else codes
    scale = pack_exponents(scale) if kind == "mxfp4" else scale
    # Groups of a row of codes are far from each other in memory.
    scale, zero = (None if x is None else x.T.contiguous().to(device).T for x in (scale, zero))
    return Weight(codes.to(device), scale, zero, kind, block, exact)


def test_unpack_words_of_packed_codes_returns_them():
    codes = torch.randint(16, (2, 5, 200), dtype=torch.uint8)
    words = pack_words(codes)
    assert words.shape == (2, 2, 5, 32)
    assert torch.equal(unpack_words(words, 200), codes)
    word, code = 7, 3
    assert words[0, 0, 4, word] >> 4 * code & 15 == codes[0, 4, 32 * code + word]


def test_unpack_exponents_of_packed_exponents_returns_them():
    exponents = torch.randint(256, (2, 5, 7), dtype=torch.uint8)
    words = pack_exponents(exponents)
    assert words.shape == (2, 5, 2)
    assert torch.equal(unpack_exponents(words, 7 * 32 - 8), exponents)
    assert words[0, 4, 1] >> 16 & 255 == exponents[0, 4, 6]


def check(weight, x, bias, bound):
    out = weight.product(x, bias)
    assert (out.shape, out.dtype) == ((*x.shape[:-1], len(weight.exact)), x.dtype)
    row, added = x.double().cpu(), torch.zeros(()) if bias is None else bias.double().cpu()
    size_of_terms = row.abs() @ weight.exact.abs().T + added.abs()
    assert ((out.double().cpu() - (row @ weight.exact.T + added)).abs() <= bound * size_of_terms).all()


@pytest.mark.interpret(dtype=[torch.float16, torch.float32])  # the interpreter cannot multiply bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_of_few_rows_matches_float64(layout, dtype, device, rng):
    """The memory between the rows of x is NaN."""
    columns = 256 if "128" in layout or "blocks" in layout else rng.choice((128, 192, 352))
    for num_rows in (1, rng.choice((3, 8, 20))):
        rows, columns = rng.choice((64, 72, 200)), rng.choice((columns, 640))
        weight = make_weight(layout, rows, columns, device)
        x = torch.full((num_rows, columns + 8), torch.nan).to(device, dtype)[:, :columns]
        x.copy_(torch.randn(num_rows, columns))
        bias = rng.choice((None, torch.randn(rows).to(device, dtype)))
        check(weight, x, bias, PRECISION[dtype] if INTERPRETED or device == "cuda" else 2 * PRECISION[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_of_many_rows_matches_float64(layout, dtype, rng):
    """fp8 rows of x have an error of at most 2**-4 in each term, the numbers of other weights that of the dtype."""
    rows, columns = rng.choice((208, 512)), rng.choice((512, 1024))
    weight = make_weight(layout, rows, columns, "cuda")
    bias = rng.choice((None, torch.randn(rows).to("cuda", dtype)))
    bound = 2**-4 if layout.startswith("fp8") else 2 * PRECISION[dtype]
    for num_rows in (65, rng.randint(129, 300), 400):
        check(weight, torch.randn(num_rows, columns).to("cuda", dtype), bias, bound)


@pytest.mark.interpret(dtype=[torch.float32])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("layout", ["fp8 blocks", "int8 groups", "int4 groups of 128", "mxfp4"])
def test_product_of_experts_matches_float64(layout, dtype, device, rng):
    columns = rng.choice((128, 256)) if layout != "mxfp4" else rng.choice((160, 256))
    for tokens, top_k, num_experts in ((1, 2, 8), (rng.randint(2, 12), 2, 4), (rng.randint(20, 40), 1, 3)):
        rows = rng.choice((64, 72, 200))
        weights = [make_weight(layout, rows, columns, device) for _ in range(num_experts)]
        stacked = [torch.stack([getattr(w, part) for w in weights]) for part in ("codes", "scale")]
        zero = None if weights[0].zero is None else torch.stack([w.zero for w in weights])
        # Groups of a row of codes are far from each other in memory, as in `make_weight`.
        scale, zero = (None if x is None else x.mT.contiguous().mT for x in (stacked[1], zero))
        chosen = torch.cat([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).to(device)
        order, position, ends = group_by_expert(chosen, num_experts)
        x = torch.randn(tokens, columns).to(device, dtype)
        arrivals = torch.zeros(4096, dtype=torch.int32, device=device)
        kind, block = weights[0].kind, weights[0].block
        rest = (ends, stacked[0], scale, zero, arrivals, kind, *block)
        each = x.repeat_interleave(top_k, 0)
        exact, size = (
            torch.stack([f(weights[e].exact) @ f(row.double().cpu()) for e, row in zip(chosen, each, strict=True)])
            for f in (lambda t: t, torch.abs)
        )
        for out in (grouped_code_product(x, order, *rest), grouped_code_product(each[order.long()], None, *rest)):
            assert (out.shape, out.dtype) == ((len(chosen), rows), dtype)
            bound = PRECISION[dtype] if INTERPRETED or device == "cuda" else 2 * PRECISION[dtype]
            assert ((out[position].double().cpu() - exact).abs() <= bound * size).all()
        assert not arrivals.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_of_a_batch_keeps_its_dimensions(layout):
    weight = make_weight(layout, 24, 256, "cpu")
    check(weight, torch.randn(2, 3, 256), None, 1e-5)
    assert weight.product(torch.randn(0, 256)).shape == (0, 24)


@pytest.mark.interpret
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_rows_of_each_layout_dequantizes_the_codes(layout, device, rng):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("there is no GPU")
    from quire.kernels.triton.code_launch import write_rows

    rows, columns = 200, 256 if "128" in layout or "blocks" in layout else rng.choice((192, 256, 352))
    weight = make_weight(layout, rows, columns, device)
    written = torch.full((70, columns), torch.nan, device=device)
    write_rows(written, weight.codes, weight.scale, weight.zero, weight.kind, weight.block, 130, rows)
    assert torch.allclose(written.cpu().double(), weight.exact[130:200], rtol=1e-6, atol=0)


@pytest.mark.interpret
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("group", [0, 128])
def test_quantize_rows_rounds_to_fp8_with_a_scale_for_each_group(group, device, rng):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("there is no GPU")
    from quire.kernels.triton.code_launch import quantize_rows

    num_rows, columns = rng.randint(1, 9), rng.choice((256, 272, 400))
    x = torch.randn(num_rows, columns).mul(torch.rand(num_rows, 1).exp2()).to(device)
    x[0] = 0
    rows, scales = quantize_rows(x, group)
    assert rows.dtype == torch.float8_e4m3fn
    assert len(rows) == (-(-num_rows // 4) * 4 if group else num_rows)
    assert scales.stride() == ((1, len(rows)) if group else (1, 1))
    spread = scales.repeat_interleave(group or columns, 1)[:, :columns]
    back = (rows.float() * spread)[:num_rows]
    assert ((back - x).abs() <= 2**-4 * x.abs() + spread[:num_rows] * 2**-9).all()
    for g in range(1 if group == 0 else -(-columns // group)):
        part = slice(g * group, g * group + group) if group else slice(None)
        assert torch.allclose(scales[1:num_rows, g], x[1:, part].abs().amax(1) / 448)
    assert not rows[num_rows:].float().any()
