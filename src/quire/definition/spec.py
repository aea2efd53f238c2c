"""The settings of one attention layer, and the only validator of their combinations."""

from __future__ import annotations

import dataclasses
import math
from ast import literal_eval
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch

from quire.definition.checks import as_dtype, check, check_settings, is_finite, is_int, setting
from quire.definition.masks import MaskSpec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
LOG2E = math.log2(math.e)
_HEAD_DIMS = "a multiple of 8 up to 256, or of 64 up to 512 (MLA: 576 with 512 for v)"
_POSITIONS = " or ".join(POS_ENCODINGS)
_CAP = "0 for none, or a positive number"
MASK_FIELDS = frozenset(f.name for f in fields(MaskSpec))


def _is_count(value: Any) -> bool:
    return is_int(value) and value > 0


def _is_size(value: Any) -> bool:
    return is_int(value) and value > 0 and value % 8 == 0


def _is_positive(value: Any) -> bool:
    return is_finite(value) and value > 0


def _count() -> Any:
    return setting(MISSING, int, _is_count, "a positive int")


def _head_dim(default: Any) -> Any:
    return setting(default, int, _is_size, _HEAD_DIMS)


def _dtype(default: Any) -> Any:
    return setting(default, as_dtype, (FLOATS + FLOATS8).__contains__, "float32, bfloat16, float16 or an fp8 type")


def _positive(default: float) -> Any:
    return setting(default, float, _is_positive, "a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer: everything that does not change from batch to batch.

    Which keys query token i of a request with q_len query and kv_len key tokens sees is up to `mask`. A logit is
    ``sm_scale * q . k``. ALIBI adds ``slope(head) * (j - (i + kv_len - q_len))`` to it. A soft cap c > 0 then maps it
    to ``c * tanh(logit / c)``. `sinks` adds a logit per head to the softmax's denominator alone.

    Attributes:
        num_qo_heads: query (and output) heads, a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim_qk: size of a query or key head; a multiple of 8 up to 256, of 64 up to 512, or 576 with head_dim_vo
            512 (MLA).
        head_dim_vo: size of a value or output head; head_dim_qk by default.
        q_dtype, kv_dtype, o_dtype: dtypes of queries, cache and output; kv_dtype and o_dtype are q_dtype by default.
        mask: which keys queries see.
        logits_soft_cap: the soft cap of logits; 0: none.
        sm_scale: the factor of logits; 1/sqrt(head_dim_qk) by default.
        pos_encoding: NONE, ROPE_LLAMA (q and k are rotated, halves paired, at positions i + kv_len - q_len and j by
            ``pos / rope_scale * rope_theta**(-2k/head_dim)``) or ALIBI.
        slopes: the ALIBI slopes, one per query head; those of `alibi_slopes` by default.
        sinks: whether calls pass a sink logit per head.
        latent: whether values are the first head_dim_vo elements of keys (MLA), 128, 256 or 512 elements. The other 64
            elements of keys, and of queries, are in tensors of their own. There is one KV head.
        batch_invariant: whether the bits of an output row depend on its own request alone, not on the batch.

    Raises:
        ValueError: a setting that is not supported, named with its value and what is allowed.
    """

    num_qo_heads: int = _count()
    num_kv_heads: int = _count()
    head_dim_qk: int = _head_dim(MISSING)
    head_dim_vo: int = _head_dim(lambda spec: spec.head_dim_qk)
    q_dtype: torch.dtype = _dtype(torch.float16)
    kv_dtype: torch.dtype = _dtype(lambda spec: spec.q_dtype)
    o_dtype: torch.dtype = _dtype(lambda spec: spec.q_dtype)
    mask: MaskSpec = MaskSpec()
    logits_soft_cap: float = setting(0.0, float, lambda cap: is_finite(cap) and cap >= 0, _CAP)
    sm_scale: float = setting(lambda spec: 1.0 / math.sqrt(spec.head_dim_qk), float, is_finite, "a finite number")
    pos_encoding: str = setting("NONE", str, POS_ENCODINGS.__contains__, _POSITIONS, "pos_encoding_mode")
    rope_scale: float = _positive(1.0)
    rope_theta: float = _positive(1e4)
    sinks: bool = setting(False, bool)
    latent: bool = setting(False, bool)
    batch_invariant: bool = setting(False, bool)
    slopes: tuple[float, ...] = setting((), tuple)
    text: str = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_together()
        set_field = object.__setattr__
        set_field(self, "slopes", tuple(map(float, self.slopes)))
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        set_field(self, "_hash", hash(tuple(values.values())))
        values["mask"] = dataclasses.asdict(self.mask)
        texts = {k: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x for k, x in values.items()}
        set_field(self, "text", repr(texts))

    def _check_together(self) -> None:
        """Check the fields against each other."""
        fits = self.num_qo_heads % self.num_kv_heads == 0
        check(fits, "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        mla = (self.head_dim_qk, self.head_dim_vo) == (576, 512)
        for name, value in (("head_dim_qk", self.head_dim_qk), ("head_dim_vo", self.head_dim_vo)):
            check(mla or value <= 256 or (value <= 512 and value % 64 == 0), name, value, _HEAD_DIMS)
        dims = (self.head_dim_qk - self.head_dim_vo, self.head_dim_vo, self.num_kv_heads)
        allowed = "head_dim_vo 128, 256 or 512, head_dim_qk 64 more, one KV head"
        check(not self.latent or dims in ((64, n, 1) for n in (128, 256, 512)), "latent", dims, allowed)
        same = self.kv_dtype == self.q_dtype or self.kv_dtype in FLOATS8
        check(same, "kv_dtype", self.kv_dtype, f"q_dtype = {self.q_dtype}, or fp8")
        fits = len(self.slopes) == self.num_qo_heads and all(map(is_finite, self.slopes))
        check(fits or not self.slopes, "alibi_slopes", self.slopes, f"{self.num_qo_heads} finite numbers, one per head")

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> AttentionSpec:
        """The layer with this `text`, the form in which a spec is passed to torch operations."""
        given = literal_eval(text)
        given |= {name: as_dtype(x) for name, x in given.items() if name.endswith("dtype")}
        return AttentionSpec(**{**given, "mask": MaskSpec(**given["mask"])})

    @property
    def group_size(self) -> int:
        """The number of query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some attributes replaced, those of `mask` by their own names too, and checked."""
        if not changes:
            return self
        mask = {name: changes.pop(name) for name in MASK_FIELDS & changes.keys()}
        if mask:
            changes["mask"] = dataclasses.replace(changes.get("mask", self.mask), **mask)
        return dataclasses.replace(self, **changes)

    def alibi_slopes(self) -> torch.Tensor:
        """`slopes`, or by default (Press et al., 2022) a geometric series over the largest power of two n of heads, and
        for further heads the odd steps of the series for 2n heads: float32 [num_qo_heads].
        """
        if self.slopes:
            return torch.tensor(self.slopes, dtype=torch.float32)
        n = 1 << (self.num_qo_heads.bit_length() - 1)
        heads = torch.arange(self.num_qo_heads, dtype=torch.float64)
        exponent = torch.where(heads < n, -8.0 * (heads + 1) / n, -4.0 * (2 * (heads - n) + 1) / n)
        return torch.exp2(exponent).float()


@lru_cache(maxsize=1024, typed=True)
def _cached_spec(**settings: Any) -> AttentionSpec:
    mask = {name: settings.pop(name) for name in MASK_FIELDS & settings.keys()}
    return AttentionSpec(mask=MaskSpec(**mask), **settings)


def attention_spec(**settings: Any) -> AttentionSpec:
    """The layer of these settings, those of `AttentionSpec.mask` by their own names. Equal settings of equal types
    give the same object, so that plans compare layers by identity; 8.0 and 8 differ, so that 8.0 is checked.

    Raises:
        ValueError: a setting that is not supported, named with its value and what is allowed.
    """
    try:
        return _cached_spec(**settings)
    except TypeError:
        # A setting has no hash, so that it cannot be looked up.
        return _cached_spec.__wrapped__(**settings)
