"""Multi-head latent attention (MLA, of DeepSeek's models), its projections absorbed: all heads share one latent cache.

Names, parameters and meanings are those of `flashinfer.mla`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from quire.definition.mla_dimensions import (
    MLAHeadDimensions,
    MLALayerDimensions,
    deepseek_mla_dimensions,
    nope_mla_dimensions,
    smaller_mla_dimensions,
    supported_mla_head_dimensions,
    supported_mla_layer_dimensions,
)
from quire.definition.pages import LengthTable, PageTable, RaggedLayout, as_int32, table
from quire.definition.spec import FLOATS8, AttentionSpec, as_dtype, check, is_int
from quire.definition.tensors import check_tensor, check_tensors
from quire.kernels.latent import GROUP, widen
from quire.wrappers.arguments import DType, LayerArgs, RunArgs, refuse
from quire.wrappers.base import AttentionWrapper
from quire.wrappers.buffers import fitting, fixed_batch, same
from quire.wrappers.plan import longest_request

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "deepseek_mla_dimensions",
    "nope_mla_dimensions",
    "smaller_mla_dimensions",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
]

_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
_FOREIGN = [  # arguments of `run` for kernels of other machines
    *("profiler_buffer", "kv_len", "page_table", "o_scale"),
    *("skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"),
]
# Arguments of `plan` that have no default.
_NEEDED = (
    *("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"),
    *("causal", "sm_scale", "q_data_type", "kv_data_type"),
)
_FP8_QUERIES = "an fp8 cache needs q_data_type=torch.bfloat16"


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """Whose queries and pages, in one of two forms or both: see `BatchMLAPagedAttentionWrapper.plan`."""

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
        """Pages of all requests one after another."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """A row of pages for each request."""
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
        """Both, which say the same; the first is used."""
        return cls(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )  # fmt: skip

    def form(self) -> tuple[str, ...]:
        """The names of the form that is complete; ValueError if one is partial or none is there."""
        forms = [[name for name in form if getattr(self, name) is not None] for form in (_CSR, _DENSE)]
        for given, form in zip(forms, (_CSR, _DENSE), strict=True):
            if given and len(given) < len(form):
                missing = ", ".join(name for name in form if name not in given)
                raise ValueError(f"{missing} is needed, besides {', '.join(given)}")
        if not forms[0] and not forms[1]:
            raise ValueError(f"tables are needed: {', '.join(_CSR)}, or {', '.join(_DENSE)}")
        return _CSR if forms[0] else _DENSE


class BatchMLAPagedAttentionWrapper(AttentionWrapper):
    """MLA of a batch over a paged latent cache: `plan` once per batch, `run` once per layer.

    The cache has for each token a latent vector, ckv, and a rotated key, kpe, which all heads share. A query head has
    a part for each. Logits are ``sm_scale * (q_nope . ckv + q_pe . kpe)``, and ckv is also the value. Requests may have
    any number of query tokens.

    Args:
        float_workspace_buffer: any tensor on the device to compute on, or None (the first GPU, or the CPU).
        use_cuda_graph: keep the plan in the buffers below, so that captured graphs see later plans. The batch size is
            then fixed: the length of `kv_len_arr`.
        qo_indptr, kv_indptr: int32 [batch_size + 1].
        kv_indices: int32 [as many pages as a plan may have].
        kv_len_arr: int32 [batch_size].
        backend: "auto", a kernel family of Quire's, or any name of FlashInfer's (which all mean "auto").
    """

    _kv_buffers = ("_kv_indptr_buf", "_kv_indices_buf", "_kv_len_arr_buf")

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
        *,
        check: bool | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend, check, batch_invariant)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._lse_mode: str | None = None
        self._use_sinks = False

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: DType | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Record which query rows and pages belong to which request, and the layer that runs share.

        Args:
            qo_indptr: int32 [batch_size + 1], the requests' begins in q.
            kv_indptr: int32 [batch_size + 1], their begins in kv_indices; entries beyond are ignored.
            kv_indices: int32, page ids. kv_len_arr: int32 [batch_size], the requests' lengths in tokens.
            cum_seq_lens_q: int32 [batch_size + 1], block_tables: int32 [batch_size, max_pages], seq_lens: int32
                [batch_size]: the same in another form. With use_cuda_graph, kv_indices must then have room for the
                whole of block_tables.
            metadata: an `MLAPlanMetadata`, in place of the tables.
            num_heads: query heads. head_dim_ckv, head_dim_kpe: sizes of the parts, 512 and 64; also 128 or 256 with
                64, and no second part (0).
            causal: query i of a request sees keys up to i + kv_len - q_len.
            q_data_type, kv_data_type, output_dtype: dtypes, or their names. The cache's is the queries', or fp8 with
                bfloat16 queries.
            lse_mode, use_sinks: what `run` will be asked for: "none", "base2" or "basee", and whether it gets sinks.
                Plans from flat tables qo_indptr to kv_len_arr with "none" leave the former open.
            use_profiler, output_scale, scale_mode, skip_softmax: only as by default, and "kv-per-tensor" for an fp8
                cache's scale_mode, which it has anyway.
            max_q_len, query_layout, kv_cache_layout, enable_pdl: accepted: it makes no difference.

        The tables may lie on the host or on the device, which nobody waits for. On a GPU every run reads them as it
        finds them, kv_len_arr too, or the buffers that they were copied to for a graph.

        Raises:
            ValueError: an argument that does not fit, named with its value and what is allowed.
            TypeError: one that is missing.
        """
        self._capture.begin_plan(type(self).__name__)
        needed = (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type)
        if None in needed:
            missing = ", ".join(name for name, value in zip(_NEEDED, needed, strict=True) if value is None)
            raise TypeError(f"plan() needs {missing}")
        refuse(use_profiler=use_profiler, skip_softmax=skip_softmax)
        q_dtype, kv_dtype = as_dtype(q_data_type, "q_data_type"), as_dtype(kv_data_type, "kv_data_type")  # type: ignore[arg-type]
        fp8, whole = kv_dtype in FLOATS8, is_int(page_size) and page_size > 0  # type: ignore[operator]
        check(whole, "page_size", page_size, "a positive int")
        check(not fp8 or q_dtype == torch.bfloat16, "q_data_type", q_dtype, _FP8_QUERIES)
        check(head_dim_ckv in (128, 256, 512), "head_dim_ckv", head_dim_ckv, "128, 256 or 512")
        check(head_dim_kpe in (0, 64), "head_dim_kpe", head_dim_kpe, "64, or 0 for none")
        check(lse_mode in ("none", "base2", "basee"), "lse_mode", lse_mode, "none, base2 or basee")
        check(output_scale == "none", "output_scale", output_scale, "none")
        modes = ("default", "kv-per-tensor") if fp8 else ("default",)
        fits = scale_mode in modes
        check(fits, "scale_mode", scale_mode, lambda: f"{' or '.join(modes)} with kv_data_type = {kv_dtype}")
        flat = metadata is cum_seq_lens_q is block_tables is seq_lens is None
        self._lse_mode, self._use_sinks = None if flat and lse_mode == "none" else lse_mode, use_sinks
        # By position, in the order of LayerArgs: keywords would take a microsecond of the few that a plan takes.
        layer = LayerArgs(
            num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv, page_size, 0, q_dtype, kv_dtype, output_dtype,  # type: ignore[arg-type, operator]
            causal, -1, None, sm_scale, "NONE", None, None, (), self.invariant, head_dim_kpe != 0,  # type: ignore[arg-type]
        )  # fmt: skip
        if flat and self._plan_again(qo_indptr, kv_indptr, kv_indices, kv_len_arr, layer):
            return
        given = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )
        if metadata is None:
            metadata = given
        elif any(x is not None for x in vars(given).values()):
            raise ValueError("metadata and tables are given: one of the two is allowed")
        qo, pages = self._tables(metadata, page_size)  # type: ignore[arg-type]
        starts = getattr(metadata, metadata.form()[0])
        longest = longest_request(starts, None, self._use_cuda_graph, self.device)
        self._commit(layer, qo, pages, max_q_len=longest)

    def _plan_again(self, qo: Any, indptr: Any, indices: Any, lengths: Any, layer: Any) -> bool:
        """Plan what differs from the last plan in its pages and their lengths alone: True if that was so."""
        plan, pages = self._current, None
        if self._again(layer) and same(qo, plan.qo.indptr) and isinstance(plan.kv, LengthTable):  # type: ignore[union-attr]
            pages = plan.kv.like(indptr, indices, lengths)  # type: ignore[union-attr]
        if pages is None:
            return False
        self._move(pages)
        self._kv_indptr_buf, self._kv_indices_buf, self._kv_len_arr_buf = pages.indptr, pages.indices, pages.per_request
        return True

    def _tables(self, metadata: MLAPlanMetadata, page_size: int) -> tuple[RaggedLayout, PageTable]:
        """The requests' query rows and pages, checked where that is free or asked for."""
        form = metadata.form()
        qo, *given = (as_int32(getattr(metadata, name)) for name in form)
        check_tensors(**dict(zip(form, (qo, *given), strict=True)))
        batch = len(table(given[-1], form[-1]))
        check(len(table(qo, form[0])) > batch, f"len({form[0]})", len(qo), f"batch size + 1 = {batch + 1}")
        qo = qo if len(qo) == batch + 1 else qo[: batch + 1]  # the same object, for `same`
        if form is _CSR:
            indptr, indices, here = self._together(given)
            pages = PageTable.from_lengths(indptr[: batch + 1], indices, here, page_size, form[-1])
        else:
            block_tables, here = self._together(given)
            pages = PageTable.from_block_tables(block_tables, here, page_size)
        if self._use_cuda_graph:
            fixed_batch(self._qo_indptr_buf, "qo_indptr", batch, extra=1)
            fixed_batch(self._kv_indptr_buf, "kv_indptr", batch, extra=1)
            fixed_batch(self._kv_len_arr_buf, "kv_len_arr", batch)
            fitting(self._kv_indices_buf, pages.indices, "kv_indices")
        if self.device.type == "cpu":
            return self._rows(qo), pages
        return self._rows(qo), LengthTable.of(pages.indptr, pages.indices, here, page_size, form[-1])

    def _hold_keys(self, kv: PageTable | RaggedLayout, non_blocking: bool) -> PageTable | RaggedLayout:
        if isinstance(kv, LengthTable):
            return super()._hold_keys(kv, non_blocking)
        assert isinstance(kv, PageTable)  # CPU kernels read last_page_len, and the buffer has the requests' lengths
        indptr, indices, _lengths = (
            self._hold(name, x, non_blocking)
            for name, x in zip(self._kv_buffers, (kv.indptr, kv.indices, kv.lengths()), strict=True)
        )
        return PageTable(indptr, indices, kv.last_page_len, kv.page_size)

    begin_forward = plan

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q_nope: [tokens, num_heads, head_dim_ckv], and q_pe: [tokens, num_heads, head_dim_kpe]; rows beyond
                qo_indptr[-1] are padding, their output is 0.
            ckv_cache: [pages, page_size, head_dim_ckv], and kpe_cache: [pages, page_size, head_dim_kpe]. Any strides
                with the last one 1, so that both may be slices of one tensor.
            query, kv_cache: in their place, one tensor with both parts at the last dimension, or a pair.
            out: where to write, [tokens, num_heads, head_dim_ckv]. lse: float32 [tokens, num_heads].
            return_lse_base_on_e: whether lse is in base e, and not 2.
            ckv_scale, kpe_scale: what the numbers of an fp8 cache are to be multiplied by.
            ckv_scale_arr: float32 [pages, page_size, head_dim_ckv / 128], in place of ckv_scale, a factor for each
                token and 128 elements. The whole cache is then copied, as q_data_type, which is slow.
            sinks: float32 [num_heads], one more logit per head in the denominator.
            profiler_buffer, kv_len, page_table, o_scale, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale:
                of other machines' kernels; only None.

        Returns:
            out, or (out, lse) with return_lse; `lse` is also filled without.

        Raises:
            RuntimeError: nothing was planned.
            ValueError: an argument that does not fit, named with its value and what is allowed.
        """
        if self._current is None:
            raise RuntimeError(f"{type(self).__name__}: run() called before plan()")
        spec = self._current.spec
        if query is not None or q_nope is None or q_pe is None:
            q_nope, q_pe = _parts(query, (q_nope, q_pe), ("query", "q_nope", "q_pe"), spec.head_dim_vo)
        if kv_cache is not None or ckv_cache is None or kpe_cache is None:
            names = ("kv_cache", "ckv_cache", "kpe_cache")
            ckv_cache, kpe_cache = _parts(kv_cache, (ckv_cache, kpe_cache), names, spec.head_dim_vo)
        pe = (q_pe, kpe_cache) if spec.latent else (None, None)
        foreign = (profiler_buffer, kv_len, page_table, o_scale)
        foreign += (skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale)  # type: ignore[assignment]
        key = None
        if ckv_scale_arr is None:
            cache = (ckv_cache, ckv_cache)
            own = (return_lse_base_on_e, ckv_scale, kpe_scale, *foreign)
            key, done = self._replays.lookup(
                self._current, q_nope, cache, out, lse, sinks, return_lse, own, pe[0], pe[1]
            )
            if done is not None:
                return done
        refuse(**dict(zip(_FOREIGN, foreign, strict=True)))
        self._check_promises(return_lse or lse is not None, return_lse_base_on_e, sinks)
        self._check_inputs(spec, q_nope, q_pe, ckv_cache, kpe_cache)
        self._check_scales(spec, ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        if ckv_scale_arr is not None and kpe_scale is not None:
            ckv_cache, kpe_cache = (
                widen(ckv_cache, ckv_scale_arr, spec.q_dtype),
                widen(kpe_cache, kpe_scale, spec.q_dtype),
            )
            spec = spec.but(kv_dtype=spec.q_dtype)
        gain = 1.0 if ckv_scale is None or kpe_scale is None else kpe_scale / ckv_scale
        latent = (q_pe, kpe_cache.unsqueeze(2), gain) if spec.latent else None
        pages = ckv_cache.unsqueeze(2)
        given = RunArgs(
            k_scale=ckv_scale,
            v_scale=ckv_scale,
            sinks=sinks,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base="ln" if return_lse_base_on_e else "log2",
            latent=latent,
            spec=spec,
        )
        return self._compute(key, q_nope, pages, pages, given)

    def _check_promises(self, wanted: bool, base_e: bool, sinks: Tensor | None) -> None:
        """Refuse what was not planned."""
        mode = "basee" if base_e else "base2" if wanted else "none"
        if self._lse_mode not in (None, mode):
            raise ValueError(
                f"MLA planned run argument LSE mode mismatch: plan(lse_mode={self._lse_mode!r}), run needs {mode!r}"
            )
        if self._use_sinks != (sinks is not None):
            raise ValueError(f"sinks is {'missing' if sinks is None else 'given'}: plan(use_sinks={self._use_sinks})")

    def _check_inputs(self, spec: AttentionSpec, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> None:
        heads, size, dim = spec.num_qo_heads, self.require_plan().kv.page_size, spec.head_dim_vo  # type: ignore[union-attr]
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


def _parts(
    value: Any, pair: tuple[Tensor | None, Tensor | None], names: tuple[str, str, str], width: int
) -> tuple[Tensor, Tensor]:
    """Both parts of queries or keys: the pair, or, in its place, a tensor of both, a pair, or these two in a pair."""
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
