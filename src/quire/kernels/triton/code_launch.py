"""Products with quantized weights on a GPU: which kernel computes them, and with which constants."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, has_hopper_kernels, num_sms
from quire.kernels.gpu.triton_internals import INTERPRETED
from quire.kernels.torch_internals import scaled_mm
from quire.kernels.triton.code_groups import CodeGroupConfig, multiply_code_groups
from quire.kernels.triton.code_numbers import NumberConfig, RoundConfig, round_rows, write_numbers
from quire.kernels.triton.code_product import CodeConfig, multiply_codes
from quire.kernels.triton.fp8 import storage

PACKED = ("int4", "mxfp4")
# Columns that are read at a time. Rows of x in fp8 have a scale for as many columns if the weight has block scales.
BLOCK = 128
# The most rows of x for which the kernel that multiplies decodes the codes in registers. For more rows, the weight is
# dequantized to memory, or torch multiplies in fp8.
MAX_ROWS = {"fp8": 64, "int8": 64, "int4": 128, "mxfp4": 128}
# Elements of a weight that are dequantized at a time, so few that they stay in the L2 cache until they are multiplied.
_CHUNK = 1 << 24
# Rows of x of the smallest tile.
_MIN_ROWS = 8

_HALVES = (torch.bfloat16, torch.float16)

_multiply, _multiply_groups = SmallLauncher(multiply_codes), SmallLauncher(multiply_code_groups)
_write, _round = SmallLauncher(write_numbers), SmallLauncher(round_rows)


def multiply(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor | None,
    kind: str,
    block: tuple[int, int],
) -> Tensor:
    """`quire.kernels.code_product.code_product` of x [rows, in_features] on a GPU."""
    out_features = codes.shape[1 if kind in PACKED else 0]
    x = x if x.stride(-1) == 1 else x.contiguous()
    if kind == "fp8" and not INTERPRETED and _multiplies_fp8(out_features, x, block):
        return _multiply_fp8(x, codes, scale, bias, block)
    out = x.new_empty(len(x), out_features)
    if len(x) == 0:
        return out
    if len(x) <= _MIN_ROWS and _has_few_codes(kind, block, out_features, x.shape[1], x.dtype, x.device):
        from quire.kernels.hopper.few_codes_launch import multiply as multiply_few

        multiply_few(out, x, _bytes_of(codes), scale, zero, bias, kind, block)
    elif INTERPRETED or len(x) <= MAX_ROWS[kind]:
        splittable = 0 if arrivals is None else len(arrivals)
        c = product_config(kind, block, len(x), out.shape[1], x.shape[1], x.dtype, x.device, splittable)
        launch(out, x, codes, scale, zero, bias, arrivals, c)
    else:
        _multiply_dequantized(out, x, codes, scale, zero, bias, kind, block)
    return out


def launch(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor | None,
    c: CodeConfig,
) -> None:
    """Launch `multiply_codes` with the constants c."""
    num_rows, out_features = out.shape
    tiles = triton.cdiv(out_features, c.block_n), triton.cdiv(num_rows, c.block_m)
    partials = _partials(c, tiles[0] * tiles[1], x)
    sizes = (out_features, x.shape[1], x.stride(0), scale.stride(1), scale.stride(0))
    tensors = (x, _stored(codes, c), scale, zero, bias, partials, arrivals if c.splits > 1 else None, out)
    _multiply((tiles[0], tiles[1] * c.splits), tensors, (num_rows,), sizes, c)


def _stored(codes: Tensor, c: CodeConfig | NumberConfig) -> Tensor:
    """Codes as kernels read them: fp8 codes are viewed as bytes where kernels decode them by integer operations."""
    return codes.view(torch.uint8) if c.kind == "fp8" and c.pairs else storage(codes) if c.kind == "fp8" else codes


def _bytes_of(codes: Tensor) -> Tensor:
    """Codes as kernels take them: fp8 codes are viewed as bytes."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


@lru_cache
def _has_few_codes(
    kind: str, block: tuple[int, int], out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether there is a kernel of Hopper GPUs for few rows of a dtype and codes of a kind."""
    if out_features % 16 or in_features % 16 or not has_hopper_kernels(device):
        return False
    if kind == "int4":
        return dtype in _HALVES and (block[1] >= in_features or block[1] % BLOCK == 0)
    return dtype == torch.bfloat16 and kind in ("fp8", "mxfp4")


@lru_cache
def _has_pairs(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=4096)
def product_config(
    kind: str,
    block: tuple[int, int],
    num_rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    splittable: int,
) -> CodeConfig:
    """The constants of `multiply_codes`.

    Args:
        kind, block: of the codes.
        num_rows: of x.
        out_features, in_features: of the weight.
        dtype: of x.
        splittable: tiles that several programs may share.
    """
    block_m = min(max(triton.next_power_of_2(num_rows), _MIN_ROWS), 128)
    return _config(
        kind, block, block_m, triton.cdiv(num_rows, block_m), out_features, in_features, dtype, device, splittable
    )


@lru_cache(maxsize=4096)
def group_config(
    kind: str,
    block: tuple[int, int],
    num_rows: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    splittable: int,
) -> CodeGroupConfig:
    """The constants of `multiply_code_groups`: those of `product_config`, and the number of experts. Most experts have
    at most twice as many rows as the mean, which is one tile.
    """
    mean = triton.cdiv(num_rows, num_experts)
    block_m = min(max(triton.next_power_of_2(2 * mean), _MIN_ROWS), 128)
    c = _config(kind, block, block_m, min(num_rows, num_experts), out_features, in_features, dtype, device, splittable)
    return CodeGroupConfig(**vars(c), padded_groups=triton.next_power_of_2(num_experts))


def _config(
    kind: str,
    block: tuple[int, int],
    block_m: int,
    tiles_m: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    splittable: int,
) -> CodeConfig:
    """The constants for `tiles_m` tiles of block_m rows of x."""
    wide = block_m == 128 or (kind in PACKED and out_features > 64 * num_sms(device))
    block_n, num_warps = 128 if wide else 64, 8 if block_m == 128 or (wide and block_m == 64) else 4
    tiles, blocks = triton.cdiv(out_features, block_n) * tiles_m, triton.cdiv(in_features, BLOCK)
    splits = 1
    if tiles <= splittable:
        # Sums of larger tiles take longer to write and to add up.
        resident = 4 if block_m == _MIN_ROWS else 2
        splits = min(max(resident * num_sms(device) // tiles, 1), triton.cdiv(blocks, 2), 16)
        # This leaves out programs that would have no blocks.
        splits = triton.cdiv(blocks, triton.cdiv(blocks, splits))
    pairs = _has_pairs(device) and kind != "int8" and dtype in (_HALVES if kind == "int4" else _HALVES[:1])
    return CodeConfig(
        kind=kind,
        group=0 if block[1] >= in_features else block[1],
        scale_rows=block[0],
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        num_stages=_num_stages(kind, block_m),
        num_warps=num_warps,
        launch_pdl=has_dependent_launch(device),
        pairs=pairs,
        even=in_features % BLOCK == 0,
    )


def _num_stages(kind: str, block_m: int) -> int:
    if torch.version.hip:
        return 2
    if block_m == _MIN_ROWS and kind not in PACKED:
        return 6
    return 4 if block_m < 128 else 3


def multiply_groups(
    out: Tensor,
    x: Tensor,
    order: Tensor | None,
    ends: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    arrivals: Tensor | None,
    kind: str,
    block: tuple[int, int],
) -> None:
    """`quire.kernels.code_product.grouped_code_product` into out on a GPU."""
    (num_rows, out_features), (num_tokens, in_features), num_experts = out.shape, x.shape, len(ends)
    if num_rows == 0:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    few = 2 * triton.cdiv(num_rows, num_experts) <= _MIN_ROWS
    if few and _has_few_codes(kind, block, out_features, in_features, x.dtype, x.device):
        from quire.kernels.hopper.few_codes_launch import multiply_groups as multiply_few_groups

        multiply_few_groups(out, x, order, ends, _bytes_of(codes), scale, zero, kind, block)
        return
    splittable = 0 if arrivals is None else len(arrivals)
    c = group_config(
        kind, block, num_rows, num_experts, out_features, in_features, x.dtype, x.device, splittable
    )  # fmt: skip
    tiles = min(num_rows, min(num_experts, num_rows) + num_rows // c.block_m)
    tiles_n = triton.cdiv(out_features, c.block_n)
    partials = _partials(c, tiles * tiles_n, x)
    strides = (codes.stride(0), scale.stride(0), scale.stride(2), scale.stride(1))
    tensors = (x, order, ends, _stored(codes, c), scale, zero, partials, arrivals if c.splits > 1 else None, out)
    sizes = (out_features, in_features, x.stride(0), *strides)
    _multiply_groups((tiles_n, tiles * c.splits), tensors, (num_rows // num_tokens, num_experts), sizes, c)


def _partials(c: CodeConfig, tiles: int, x: Tensor) -> Tensor | None:
    """Memory for the partial sums of programs that share tiles; None if none do."""
    if c.splits == 1:
        return None
    return torch.empty(tiles * c.splits * c.block_n * c.block_m, dtype=torch.float32, device=x.device)


def _multiply_dequantized(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    block: tuple[int, int],
) -> None:
    """The product with the weight's numbers, of some rows of the weight at a time."""
    out_features, in_features = out.shape[1], x.shape[1]
    step = min(max(_CHUNK // in_features // BLOCK, 1) * BLOCK, out_features)
    for start in range(0, out_features, step):
        rows = range(start, min(start + step, out_features))
        weight = x.new_empty(len(rows), in_features)
        write_rows(weight, codes, scale, zero, kind, block, start, out_features)
        part = out[:, rows.start : rows.stop]
        if bias is None:
            torch.mm(x, weight.T, out=part)
        else:
            torch.addmm(bias[rows.start : rows.stop], x, weight.T, out=part)


def write_rows(
    weight: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    block: tuple[int, int],
    start: int,
    out_features: int,
) -> None:
    """Write the numbers of the weight's rows from `start` on to `weight` [rows, in_features]."""
    rows, in_features = weight.shape
    group = 0 if block[1] >= in_features else block[1]
    c = NumberConfig(kind, group, block[0], 64, 4, False, in_features % BLOCK == 0)
    sizes = (out_features, in_features, scale.stride(1), scale.stride(0))
    grid = (triton.cdiv(rows, c.block_n), triton.cdiv(in_features, BLOCK))
    _write(grid, (_stored(codes, c), scale, zero, weight), (start, rows), sizes, c)


def _multiplies_fp8(out_features: int, x: Tensor, block: tuple[int, int]) -> bool:
    """Whether torch has an fp8 product for weights with scales for these blocks, and is faster than Quire's kernels.
    Torch does not divide a tile's columns among programs, so for few rows it is slow unless the tiles fill the GPU.
    """
    fills = out_features >= 2 * 64 * num_sms(x.device)
    if len(x) <= (_MIN_ROWS if fills else MAX_ROWS["fp8"]):
        return False
    by_row = block[0] == 1 and block[1] >= x.shape[1]
    # torch reads the scales of blocks four at a time.
    if x.shape[1] % (16 if by_row else 4 * BLOCK) or out_features % 16:
        return False
    if x.dtype not in _HALVES or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(x.device)
    return capability >= (8, 9) if by_row else capability[0] == 9 and block == (BLOCK, BLOCK) and _has_block_scales()


@lru_cache
def _has_block_scales() -> bool:
    version = tuple(int(part) for part in str(torch.version.cuda).split(".")[:2])
    return version >= (12, 9) and hasattr(F, "scaled_mm")


def _multiply_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, block: tuple[int, int]) -> Tensor:
    """The product with rows of x that are rounded to fp8."""
    by_row = block[0] == 1
    rows, scales = quantize_rows(x, 0 if by_row else BLOCK)
    if by_row:
        product = scaled_mm(
            rows, codes.T, scale_a=scales, scale_b=scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        # torch takes scales of blocks in one memory order, in which the engine has them anyway.
        scale = scale.contiguous().T
        product = F.scaled_mm(rows, codes.T, scales, kinds[0], scale, kinds[1], output_dtype=torch.bfloat16)
    product = product[: len(x)].to(x.dtype)
    return product if bias is None else product.add_(bias)


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows as fp8, and what to multiply them by.

    Args:
        x: [rows, columns].
        group: columns that share a scale; 0: all of them.

    Returns:
        float8_e4m3fn [rows, columns], and float32 [rows, groups]. With groups, there are up to 3 rows more, so that
        their number is a multiple of 4, and the scales of a group are contiguous.
    """
    num_rows, columns = x.shape
    padded = -(-num_rows // 4) * 4 if group else num_rows
    rows = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    if group:
        scales = torch.empty(triton.cdiv(columns, group), padded, dtype=torch.float32, device=x.device).T
    else:
        scales = torch.empty(padded, 1, dtype=torch.float32, device=x.device)
    c = RoundConfig(columns, group, has_dependent_launch(x.device))
    _round((padded, 1), (x, storage(rows), scales), (num_rows,), (x.stride(0), *scales.stride()), c)
    return rows, scales
