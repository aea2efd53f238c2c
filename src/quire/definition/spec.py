"""The settings of one attention layer, and the only validator of their combinations."""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Real
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
LOG2E = math.log2(math.e)


def check(ok: bool, name: str, value: object, allowed: str | Callable[[], str]) -> None:
    """Raise a ValueError that names an argument, its value and what is allowed, unless `ok`.

    `allowed` is a function where torch.compile may trace the check and the text contains sizes: sizes may be symbols
    then, which cannot be formatted, and the text is only needed if the check fails.
    """
    if not ok:
        raise ValueError(f"{name} = {value!r} is not supported: {allowed if isinstance(allowed, str) else allowed()}")


def is_int(value: object) -> bool:
    """Whether an argument is an int; booleans and NumPy integers are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether an argument is a finite number of Python or NumPy. A tensor is not: its value may change later."""
    return isinstance(value, Real) and math.isfinite(value)


def as_dtype(dtype: str | torch.dtype, name: str = "dtype") -> torch.dtype:
    """A torch dtype, from a torch dtype or its name ("float16", "bfloat16", "float8_e4m3fn", ...)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} = {dtype!r} is not supported: a torch.dtype or its name")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer: everything that does not change from batch to batch.

    Query token i of a request with q_len query and kv_len key tokens sees key j when

    - ``j <= i + kv_len - q_len`` if `causal` (aligned to the bottom right),
    - ``j >= i + kv_len - q_len - window_left`` if `window_left` >= 0,
    - ``j <= i + kv_len - q_len + window_right`` if `window_right` >= 0,
    - its bit in the custom mask is set, if `custom_mask`,
    - the items of its prompt allow it, if `items` (see `quire.definition.items`).

    A logit is ``sm_scale * q . k``. ALIBI adds ``slope(head) * (j - (i + kv_len - q_len))`` to it. A soft cap c > 0
    then maps it to ``c * tanh(logit / c)``. `sinks` adds a logit per head to the softmax's denominator alone.

    Attributes:
        num_qo_heads: query (and output) heads, a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim_qk: size of a query or key head; a multiple of 8 up to 256, of 64 up to 512, or 576 with head_dim_vo
            512 (MLA).
        head_dim_vo: size of a value or output head; head_dim_qk by default.
        q_dtype, kv_dtype, o_dtype: dtypes of queries, cache and output; kv_dtype and o_dtype are q_dtype by default.
        causal: whether queries see no later keys.
        window_left, window_right: how many keys before and after its own position a query sees; -1 or None: all.
        logits_soft_cap: the soft cap of logits; 0: none.
        sm_scale: the factor of logits; 1/sqrt(head_dim_qk) by default.
        pos_encoding: NONE, ROPE_LLAMA (q and k are rotated, halves paired, at positions i + kv_len - q_len and j by
            ``pos / rope_scale * rope_theta**(-2k/head_dim)``) or ALIBI.
        slopes: the ALIBI slopes, one per query head; those of `alibi_slopes` by default.
        custom_mask, items, sinks: whether calls pass a mask, the items of prompts, or a sink logit per head.
        latent: whether values are the first head_dim_vo elements of keys (MLA), 128, 256 or 512 elements. The other 64
            elements of keys, and of queries, are in tensors of their own. There is one KV head.
        batch_invariant: whether the bits of an output row depend on its own request alone, not on the batch.

    Raises:
        ValueError: a setting that is not supported, named with its value and what is allowed.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int = None  # type: ignore[assignment]  # __post_init__ replaces these Nones
    q_dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = None  # type: ignore[assignment]
    o_dtype: torch.dtype = None  # type: ignore[assignment]
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float = None  # type: ignore[assignment]
    pos_encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    custom_mask: bool = False
    items: bool = False
    sinks: bool = False
    latent: bool = False
    batch_invariant: bool = False
    slopes: tuple[float, ...] = ()
    text: str = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if self.head_dim_vo is None:
            set_field(self, "head_dim_vo", self.head_dim_qk)
        if self.kv_dtype is None:
            set_field(self, "kv_dtype", self.q_dtype)
        if self.o_dtype is None:
            set_field(self, "o_dtype", self.q_dtype)
        for name, value in _DEFAULTS.items():
            if getattr(self, name) is None:
                set_field(self, name, value)
        self._check_shape()
        if self.sm_scale is None:
            set_field(self, "sm_scale", 1.0 / math.sqrt(self.head_dim_qk))
        self._check_types()
        self._check_logits()
        for name, cast in _CASTS.items():  # so that equal layers have equal text, and compile once
            set_field(self, name, cast(getattr(self, name)))
        values = tuple(getattr(self, f.name) for f in fields(self) if f.init)
        texts = (str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x for x in values)
        set_field(self, "text", repr(tuple(texts)))
        set_field(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> AttentionSpec:
        """The layer with this `text`, in which form a spec is passed to torch operations."""
        names = [f.name for f in fields(AttentionSpec) if f.init]
        values = zip(names, literal_eval(text), strict=True)
        layer: dict[str, Any] = {k: as_dtype(x) if k.endswith("dtype") else x for k, x in values}
        return AttentionSpec(**layer)

    def _check_shape(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads"):
            value = getattr(self, name)
            check(is_int(value) and value > 0, name, value, "a positive int")
        fits = self.num_qo_heads % self.num_kv_heads == 0
        check(fits, "num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        mla = (self.head_dim_qk, self.head_dim_vo) == (576, 512)
        for name in ("head_dim_qk", "head_dim_vo"):
            value = getattr(self, name)
            whole = is_int(value) and value > 0 and value % 8 == 0
            fits = whole and (mla or value <= 256 or (value <= 512 and value % 64 == 0))
            check(fits, name, value, "a multiple of 8 up to 256, or of 64 up to 512 (MLA: 576 with 512 for v)")
        dims = (self.head_dim_qk - self.head_dim_vo, self.head_dim_vo, self.num_kv_heads)
        allowed = "head_dim_vo 128, 256 or 512, head_dim_qk 64 more, one KV head"
        check(not self.latent or dims in ((64, n, 1) for n in (128, 256, 512)), "latent", dims, allowed)

    def _check_types(self) -> None:
        check(self.q_dtype in FLOATS + FLOATS8, "q_dtype", self.q_dtype, "float32, bfloat16, float16 or an fp8 type")
        check(self.kv_dtype in FLOATS + FLOATS8, "kv_dtype", self.kv_dtype, "float32, bfloat16, float16 or an fp8 type")
        check(self.o_dtype in FLOATS + FLOATS8, "o_dtype", self.o_dtype, "float32, bfloat16, float16 or an fp8 type")
        same = self.kv_dtype == self.q_dtype or self.kv_dtype in FLOATS8
        check(same, "kv_dtype", self.kv_dtype, f"q_dtype = {self.q_dtype}, or fp8")

    def _check_logits(self) -> None:
        whole = is_int(self.window_left) and self.window_left >= -1
        allowed = "-1 or None for no window, or an int, the keys to the left that stay visible"
        check(whole, "window_left", self.window_left, allowed)
        whole = is_int(self.window_right) and self.window_right >= -1
        check(whole, "window_right", self.window_right, allowed.replace("left", "right"))
        cap = self.logits_soft_cap
        check(is_finite(cap) and cap >= 0, "logits_soft_cap", cap, "0 for none, or a positive number")
        check(is_finite(self.sm_scale), "sm_scale", self.sm_scale, "a finite number")
        check(self.pos_encoding in POS_ENCODINGS, "pos_encoding_mode", self.pos_encoding, " or ".join(POS_ENCODINGS))
        for name in ("rope_scale", "rope_theta"):
            value = getattr(self, name)
            check(is_finite(value) and value > 0, name, value, "a positive number")
        fits = len(self.slopes) == self.num_qo_heads and all(is_finite(x) for x in self.slopes)
        check(fits or not self.slopes, "alibi_slopes", self.slopes, f"{self.num_qo_heads} finite numbers, one per head")

    @property
    def group_size(self) -> int:
        """The number of query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def visible(self, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Which keys each query token of a request sees, by its position alone: bool [q_len, kv_len]."""
        i = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
        j = torch.arange(kv_len, device=device)[None, :]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
        if self.causal:
            seen &= j <= i
        if self.window_left >= 0:
            seen &= j >= i - self.window_left
        if self.window_right >= 0:
            seen &= j <= i + self.window_right
        return seen

    def but(self, **changes: Any) -> AttentionSpec:
        """A copy with some attributes replaced, and checked."""
        return replace(self, **changes) if changes else self

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


# The values of arguments that are None, as callers of FlashInfer may pass them.
_DEFAULTS = {"window_left": -1, "window_right": -1, "logits_soft_cap": 0.0, "rope_scale": 1.0, "rope_theta": 1e4}
_CASTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "window_left", "window_right"), int),
    **dict.fromkeys(("logits_soft_cap", "sm_scale", "rope_scale", "rope_theta"), float),
    **dict.fromkeys(("causal", "custom_mask", "items", "sinks", "latent", "batch_invariant"), bool),
    "slopes": lambda slopes: tuple(map(float, slopes)),
}
