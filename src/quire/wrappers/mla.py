"""The base of the wrappers of latent attention (MLA)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.definition.checks import as_dtype, check, is_int
from quire.definition.pages import LengthTable, PageTable, RaggedLayout, as_int32, table
from quire.definition.spec import FLOATS8, AttentionSpec
from quire.definition.tensors import check_tensor, check_tensors
from quire.kernels.latent import GROUP
from quire.wrappers.arguments import LayerArgs
from quire.wrappers.base import AttentionWrapper
from quire.wrappers.buffers import fitting, fixed_batch

_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
FP8_QUERIES = "an fp8 cache needs q_data_type=torch.bfloat16"


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """The tables of a plan, in one of two forms or in both: see `BatchMLAPagedAttentionWrapper.plan`."""

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        """The first form: one list of the pages of all requests, in their order."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """The second form: a block table with one row of pages for each request."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        *,
        cum_seq_lens_q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Both forms, which must describe the same batch. The first one is used."""
        return cls(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )  # fmt: skip

    def form(self) -> tuple[str, ...]:
        """The names of the tables of the form that is used; ValueError if a form is incomplete or both are missing."""
        forms = [[name for name in form if getattr(self, name) is not None] for form in (_CSR, _DENSE)]
        for given, form in zip(forms, (_CSR, _DENSE), strict=True):
            if given and len(given) < len(form):
                missing = ", ".join(name for name in form if name not in given)
                raise ValueError(f"{missing} is needed, besides {', '.join(given)}")
        if not forms[0] and not forms[1]:
            raise ValueError(f"tables are needed: {', '.join(_CSR)}, or {', '.join(_DENSE)}")
        return _CSR if forms[0] else _DENSE


class LatentWrapper(AttentionWrapper):
    """The tables of a plan of latent attention, and the checks of its runs."""

    _kv_buffers: ClassVar[tuple[str, ...]] = ("_kv_indptr_buf", "_kv_indices_buf", "_kv_len_arr_buf")
    _kv_indptr_buf: Tensor | None
    _kv_indices_buf: Tensor | None
    _kv_len_arr_buf: Tensor | None

    _lse_mode: str | None
    _use_sinks: bool

    def _check_options(self, layer: LayerArgs, lse_mode: str, output_scale: str, scale_mode: str) -> None:
        """Refuse arguments of a plan that latent attention does not have."""
        q_dtype = as_dtype(layer.q_data_type, "q_data_type")
        kv_dtype = as_dtype(layer.kv_data_type or q_dtype, "kv_data_type")
        fp8, whole = kv_dtype in FLOATS8, is_int(layer.page_size) and layer.page_size > 0
        check(whole, "page_size", layer.page_size, "a positive int")
        check(not fp8 or q_dtype == torch.bfloat16, "q_data_type", q_dtype, FP8_QUERIES)
        check(lse_mode in ("none", "base2", "basee"), "lse_mode", lse_mode, "none, base2 or basee")
        check(output_scale == "none", "output_scale", output_scale, "none")
        modes = ("default", "kv-per-tensor") if fp8 else ("default",)
        check(scale_mode in modes, "scale_mode", scale_mode, f"{' or '.join(modes)} with kv_data_type = {kv_dtype}")

    def _tables(self, metadata: MLAPlanMetadata, page_size: int) -> tuple[RaggedLayout, PageTable]:
        """The requests' query rows and pages, checked where that is free, and in checked mode."""
        form = metadata.form()
        qo, *given = (as_int32(getattr(metadata, name)) for name in form)
        check_tensors(**dict(zip(form, (qo, *given), strict=True)))
        batch = len(table(given[-1], form[-1]))
        check(len(table(qo, form[0])) > batch, f"len({form[0]})", len(qo), f"batch size + 1 = {batch + 1}")
        qo = qo[: batch + 1]
        if form is _CSR:
            indptr, indices, lengths = given
            pages = self._pages_of_lengths(indptr[: batch + 1], indices, lengths, page_size, form[-1])
        else:
            block_tables, here = self._together(given)
            pages = PageTable.from_block_tables(block_tables, here, page_size)
            if self.device.type != "cpu":
                pages = LengthTable.of(pages.indptr, pages.indices, here, page_size, form[-1])
        if self._use_cuda_graph:
            fixed_batch(self._qo_indptr_buf, "qo_indptr", batch, extra=1)
            fixed_batch(self._kv_indptr_buf, "kv_indptr", batch, extra=1)
            fixed_batch(self._kv_len_arr_buf, "kv_len_arr", batch)
            fitting(self._kv_indices_buf, pages.indices, "kv_indices")
        return self._rows(qo), pages

    def _copy_keys_to_buffers(self, kv: PageTable | RaggedLayout, non_blocking: bool) -> PageTable | RaggedLayout:
        if isinstance(kv, LengthTable):
            return super()._copy_keys_to_buffers(kv, non_blocking)
        # CPU kernels read last_page_len, where this buffer has the requests' lengths.
        assert isinstance(kv, PageTable)
        indptr, indices, _lengths = (
            self._copy_to_buffer(name, x, non_blocking)
            for name, x in zip(self._kv_buffers, (kv.indptr, kv.indices, kv.lengths()), strict=True)
        )
        return PageTable(indptr, indices, kv.last_page_len, kv.page_size)

    def _check_promises(self, wanted: bool, base_e: bool, sinks: Tensor | None) -> None:
        """Refuse an LSE or sinks that contradict the `lse_mode` and `use_sinks` of the plan."""
        mode = "basee" if base_e else "base2" if wanted else "none"
        if self._lse_mode not in (None, mode):
            raise ValueError(
                f"MLA planned run argument LSE mode mismatch: plan(lse_mode={self._lse_mode!r}), run needs {mode!r}"
            )
        if self._use_sinks != (sinks is not None):
            raise ValueError(f"sinks is {'missing' if sinks is None else 'given'}: plan(use_sinks={self._use_sinks})")

    def _check_inputs(self, spec: AttentionSpec, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> None:
        heads, dim = spec.num_qo_heads, spec.head_dim_vo
        size = self.require_plan().kv.page_size  # type: ignore[union-attr]
        rest = spec.head_dim_qk - dim
        for x, name, dtype in (
            (q_nope, "q_nope", spec.q_dtype),
            (q_pe, "q_pe", spec.q_dtype),
            (ckv, "ckv_cache", spec.kv_dtype),
            (kpe, "kpe_cache", spec.kv_dtype),
        ):
            check(isinstance(x, Tensor), name, type(x).__name__, "a tensor")
            check(x.dtype == dtype, f"{name}.dtype", x.dtype, f"{dtype}, as planned")
        check_tensor(q_nope, "q_nope", (None, heads, dim), spec.q_dtype, self.device)
        check_tensor(q_pe, "q_pe", (len(q_nope), heads, rest), spec.q_dtype, self.device)
        check_tensor(ckv, "ckv_cache", (None, size, dim), spec.kv_dtype, self.device)
        check_tensor(kpe, "kpe_cache", (len(ckv), size, rest), spec.kv_dtype, self.device)

    def _check_scales(
        self,
        spec: AttentionSpec,
        ckv: Tensor,
        ckv_scale: float | None,
        ckv_scale_arr: Tensor | None,
        kpe_scale: float | None,
    ) -> None:
        given = {"ckv_scale": ckv_scale, "ckv_scale_arr": ckv_scale_arr, "kpe_scale": kpe_scale}
        if spec.kv_dtype not in FLOATS8:
            for name, scale in given.items():
                check(scale is None, name, scale, f"none, since kv_data_type = {spec.kv_dtype} is not fp8")
            return
        if (ckv_scale is None) == (ckv_scale_arr is None):
            raise ValueError("Exactly one of ckv_scale or ckv_scale_arr is needed, since kv_data_type is fp8")
        if kpe_scale is None:
            raise ValueError("kpe_scale is needed, since kv_data_type is fp8")
        for name in ("ckv_scale", "kpe_scale"):
            scale = given[name]
            if scale is not None:
                number = isinstance(scale, Real) and math.isfinite(scale) and scale > 0
                check(number, name, scale, "a positive number")
        if ckv_scale_arr is not None:
            check_tensors(ckv_scale_arr=ckv_scale_arr)
            shape = (*ckv.shape[:2], spec.head_dim_vo // GROUP)
            if tuple(ckv_scale_arr.shape) != shape:
                raise ValueError(f"Invalid shape of ckv_scale_arr: {list(ckv_scale_arr.shape)} is not {list(shape)}")
            check_tensor(ckv_scale_arr, "ckv_scale_arr", shape, torch.float32, self.device)


def split_parts(
    value: Any, pair: tuple[Tensor | None, Tensor | None], names: tuple[str, str, str], width: int
) -> tuple[Tensor, Tensor]:
    """The two parts of queries or keys, from `pair`, or from `value`: one tensor of both, or a pair of tensors."""
    name, left, right = names
    if value is None:
        if pair[0] is None and pair[1] is None:
            raise TypeError(f"run() needs {name}, or {left} and {right}")
        value = pair
    elif pair[0] is not None or pair[1] is not None:
        raise TypeError(f"{name} is given besides {left} or {right}")
    if isinstance(value, tuple):
        value = next((x for x in value if isinstance(x, tuple)), value)
    if isinstance(value, Tensor):
        return value[..., :width], value[..., width:]
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(x, Tensor) for x in value):
        raise ValueError(f"{name} must be a tensor of both parts, or a pair: {left} and {right}")
    return value
