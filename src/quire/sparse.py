"""Attention with block-sparse masks, computed by paged prefill: each row of blocks is a request, its blocks are pages.

Names, parameters and meanings are those of `flashinfer.sparse`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.definition.block_sparse import VariableBlocks, as_pages, fixed_blocks, mask_by_rows
from quire.definition.checks import check, is_int
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.tensors import check_optional, check_tensors
from quire.kernels.pack import pack_blocks
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.wrappers.arguments import DType, Scale, refuse
from quire.wrappers.composite import CompositeWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]

# FlashInfer's names of backends for block-sparse attention alone, which mean "auto" here.
_BACKENDS = {"cake", "cake_cute", "vsa_blackwell", "vsa_blackwell_blk64"}
_BACKENDS |= {"vsa_sm100_blk128", "vsa_sm100_blk64", "vsa_sm120_blk64"}


def convert_bsr_mask_layout(mask: Tensor, indptr: Tensor) -> Tensor:
    """Reorder a mask stored block by block into a flat custom mask: the rows of blocks in order, each row-major.

    Args:
        mask: [blocks, R, C], any dtype.
        indptr: int32 or int64 [rows of blocks + 1], the offset of each row's blocks.

    Returns:
        [blocks * R * C], of mask's dtype.

    Raises:
        ValueError: an argument that is no tensor.
    """
    check_tensors(mask=mask, indptr=indptr)
    return mask_by_rows(mask, indptr.to(mask.device))


class _BlockSparseWrapper(CompositeWrapper):
    """A prefill wrapper over the rows of blocks, and its latest plan."""

    def __init__(self, float_workspace_buffer: Tensor | None, backend: str = "auto") -> None:
        backend = "auto" if backend in _BACKENDS else backend
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, backend=backend)
        self._wrappers = (self._prefill,)
        self.device = self._prefill.device
        self._plan: Callable[..., None] | None = None

    @property
    def backend(self) -> str:
        """The kernel family that computes the planned layer."""
        return self._prefill.backend

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the workspace buffers; both must be on the wrapper's device."""
        self._prefill.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _plan_blocks(self, qo: RaggedLayout, kv: PageTable, **layer: Any) -> None:
        tables = (qo.indptr, kv.indptr, kv.indices, kv.last_page_len)
        plan = partial(self._prefill.plan, *tables, page_size=kv.page_size, **layer)
        plan()
        self._plan = plan

    def _planned(self) -> Callable[..., None]:
        if self._plan is None:
            raise RuntimeError(f"{type(self).__name__}: plan() must be called before this")
        return self._plan


class BlockSparseAttentionWrapper(_BlockSparseWrapper):
    """Attention with a mask of [R, C] blocks in the format of SciPy's `bsr_matrix`. All heads have the mask in common.

    Args:
        float_workspace_buffer: any tensor on the device to compute on; None: the first GPU, or the CPU.
        backend: "auto", a kernel family of Quire, or a backend of FlashInfer, all of which mean "auto".
    """

    def plan(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType = "float16",
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
        kv_block_lens: Tensor | None = None,
        q2k_indices: Tensor | None = None,
        q2k_num: Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Record the block mask and the layer for later runs. Never waits for a device.

        Args:
            indptr: int32 or int64 [ceil(M / R) + 1], the offset of each row's blocks in `indices`.
            indices: int32 or int64 [blocks], the column of each block, 0 to N / C - 1.
            M, N: the numbers of queries and keys. N is a multiple of C; if M is not a multiple of R, the last row of
                blocks has fewer rows.
            R, C: rows and columns of a block.
            num_qo_heads, num_kv_heads, head_dim: heads of q, heads of k and v, and the elements of a head.
            mask: bool [blocks, R, C], the visible entries of each block; None: all.
            packed_mask: uint8, for each row of blocks the visible entries [rows, its blocks * C], bit-packed, lowest
                bit first, each row of blocks on a new byte. If it is given, `mask` is not used.
            causal: without a mask, query i of a row of blocks sees the first i + 1 + (keys of the row) - (its queries)
                keys of the row. Positions of ROPE_LLAMA and ALIBI are counted among the keys of the row, too.
            o_data_type: dtype of the output; float16 by default, whatever q_data_type is.
            use_fp16_qk_reduction: accepted, without effect; accumulation is float32.
            block_mask, kv_block_lens, q2k_indices, q2k_num, kv_splits, use_clc, q_scale, k_scale, v_scale: refused;
                FlashInfer has them for kernels that run on Blackwell only.

        The other arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed; for tables on the host
                also a column out of range.
        """
        refuse(block_mask=block_mask, kv_block_lens=kv_block_lens, q2k_indices=q2k_indices, q2k_num=q2k_num)
        refuse(kv_splits=kv_splits, use_clc=use_clc, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        if indptr is None or indices is None:
            raise ValueError("indptr and indices are needed")
        check_optional(mask=mask, packed_mask=packed_mask)
        qo, kv = fixed_blocks(indptr, indices, M, N, R, C)
        if packed_mask is None and mask is not None:
            shape = (len(indices), R, C)
            fits = mask.shape == shape and mask.dtype == torch.bool
            check(fits, "mask", f"{mask.dtype} {list(mask.shape)}", f"bool {list(shape)}, blocks and R and C")
            packed_mask = pack_blocks(mask, kv.indptr)
        if packed_mask is not None:
            packed_mask = packed_mask.to(self.device, non_blocking=non_blocking)
        self._plan_blocks(
            qo, kv, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim,
            packed_custom_mask=packed_mask, causal=causal, pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type, non_blocking=non_blocking,
        )  # fmt: skip
        self.M, self.N = M, N
        self.R, self.C = R, C

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Scale | None = None,
        scale_k: Scale | None = None,
        scale_v: Scale | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: [M, num_qo_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            scale_q, scale_k, scale_v: factors of q, k and v, each a number or one per head.
            out: [M, num_qo_heads, head_dim] of o_data_type, and lse: float32 [M, num_qo_heads], to write to.
            enable_pdl: accepted, without effect.

        Returns:
            out, or (out, lse) with lse in base 2. Rows that see no key are 0 and -inf.

        Raises:
            ValueError: a tensor that does not fit the plan.
            RuntimeError: nothing has been planned.
        """
        self._planned()
        check_tensors(q=q, k=k, v=v)
        for name, x, length in (("q", q, self.M), ("k", k, self.N), ("v", v, self.N)):
            fits = x.ndim == 3 and len(x) == length
            check(fits, f"{name}.shape", list(x.shape), partial("[{}, heads, head_dim]".format, length))
        cache = as_pages(k, self.C), as_pages(v, self.C)
        return self._prefill.run(q, cache, scale_q, scale_k, scale_v, return_lse=return_lse, out=out, lse=lse)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Scale | None = None,
        scale_k: Scale | None = None,
        scale_v: Scale | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Deprecated: plan again with these settings of the layer, then `run`."""
        self._planned()(
            pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(_BlockSparseWrapper):
    """Attention with a mask of blocks of variable sizes for each KV head.

    Args:
        float_workspace_buffer: any tensor on the device to compute on; None: the first GPU, or the CPU.
        backend: "auto", a kernel family of Quire, or a backend of FlashInfer, all of which mean "auto".
    """

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Record the block masks and the layer for later runs. Waits once for the device of block_mask_map, because the
        number of visible keys determines the size of the tables.

        Args:
            block_mask_map: bool [num_kv_heads, rows of blocks, columns of blocks], the visible blocks.
            block_row_sz: int32 or int64 [num_kv_heads, rows of blocks], the queries of each row of blocks. Each KV
                head's add up to the number of queries.
            block_col_sz: int32 or int64 [num_kv_heads, columns of blocks], the keys of each column of blocks. Each KV
                head's add up to the number of keys.
            num_qo_heads: a multiple of num_kv_heads; query heads that share a KV head share its mask.
            pos_encoding_mode: NONE or ROPE_LLAMA.
            q_data_type: dtype of q and of the output.

        The other arguments are those of `BlockSparseAttentionWrapper.plan`.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        check_tensors(block_mask_map=block_mask_map, block_row_sz=block_row_sz, block_col_sz=block_col_sz)
        for name, heads in (("num_kv_heads", num_kv_heads), ("num_qo_heads", num_qo_heads)):
            check(is_int(heads) and heads > 0, name, heads, "a positive int")
        fits = num_qo_heads % num_kv_heads == 0
        check(fits, "num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
        heads = len(block_mask_map)
        check(heads == num_kv_heads, "len(block_mask_map)", heads, f"num_kv_heads = {num_kv_heads}")
        self._refuse_alibi(pos_encoding_mode)
        blocks = VariableBlocks.from_map(block_mask_map, block_row_sz, block_col_sz)
        self._plan_blocks(
            blocks.qo, blocks.kv, num_qo_heads=num_qo_heads // num_kv_heads, num_kv_heads=1, head_dim_qk=head_dim,
            causal=causal, pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type,
            kv_data_type=kv_data_type, non_blocking=non_blocking,
        )  # fmt: skip
        self._blocks, self._num_kv_heads = blocks, num_kv_heads
        self._num_qo_heads = num_qo_heads

    begin_forward = plan

    @staticmethod
    def _refuse_alibi(pos_encoding_mode: str) -> None:
        """Refuse ALIBI: prefill is planned with the heads of one group, so all groups would get the same slopes."""
        check(pos_encoding_mode != "ALIBI", "pos_encoding_mode", pos_encoding_mode, "NONE or ROPE_LLAMA")

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: [num_qo_heads, queries, head_dim].
            k, v: [num_kv_heads, keys, head_dim].
            out: where to write, of q's dtype, [num_kv_heads * queries, num_qo_heads / num_kv_heads, head_dim].
            lse: where to write, float32 [num_kv_heads * queries, num_qo_heads / num_kv_heads].
            enable_pdl: accepted, without effect.

        Returns:
            out [num_qo_heads, queries, head_dim], or (out, lse) with lse float32 [num_qo_heads, queries], in base 2.
            Rows that see no key are 0 and -inf.

        Raises:
            ValueError: a tensor that does not fit the plan.
            RuntimeError: nothing has been planned.
        """
        self._planned()
        check_tensors(q=q, k=k, v=v)
        blocks, num_kv_heads = self._blocks, self._num_kv_heads
        queries, keys = (self._num_qo_heads, blocks.num_rows), (num_kv_heads, blocks.num_keys)
        for name, x, shape in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
            fits = x.ndim == 3 and x.shape[:2] == shape
            check(fits, f"{name}.shape", list(x.shape), partial("[{}, {}, head_dim]".format, *shape))
        cache = as_pages(k.flatten(0, 1)[:, None], 1), as_pages(v.flatten(0, 1)[:, None], 1)
        rows = blocks.flatten_queries(q, num_kv_heads)
        found = self._prefill.run(rows, cache, return_lse=return_lse, out=out, lse=lse)
        if isinstance(found, Tensor):
            return blocks.unflatten_outputs(found, num_kv_heads)
        return blocks.unflatten_outputs(found[0], num_kv_heads), blocks.unflatten_outputs(found[1], num_kv_heads)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Deprecated: plan again with these settings of the layer, then `run`."""
        self._refuse_alibi(pos_encoding_mode)
        self._planned()(
            pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, k, v)
