"""The launches that compute a step's attention, whatever layer they are for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.attention import BlockTableAttention

# The most query rows (query tokens times query heads of one KV head) of a request that decode kernels compute.
DECODE_ROWS = 64


class LayerKind(NamedTuple):
    """What layers must have in common to share a plan: the arguments of `BlockTableAttention.plan` except its tables.

    Attributes:
        window: keys to the left of the query that it sees, -1 for all.
        kv_dtype: the dtype of the cache as kernels read it.
        slopes: those of ALiBi; none without.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int
    soft_cap: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    slopes: tuple[float, ...]


class Wrappers:
    """The wrappers of a group of layers, one for each kind of layer and of launch, which run one after another."""

    def __init__(self, device: torch.device, batch_invariant: bool) -> None:
        self._device, self._batch_invariant = device, batch_invariant
        self._wrappers: dict[tuple[str, LayerKind], BlockTableAttention] = {}

    def get(self, role: str, kind: LayerKind) -> BlockTableAttention:
        """The wrapper for launches of a role: decode, extend, prefix or suffix. The first two are made together, before
        any launch is captured: a workspace that is made during a capture is not zero before the graph is replayed.
        """
        if (role, kind) not in self._wrappers:
            for name in ("decode", "extend") if role in ("decode", "extend") else (role,):
                empty = torch.empty(0, device=self._device)
                made = BlockTableAttention(empty, batch_invariant=self._batch_invariant or None)
                self._wrappers[name, kind] = made
        return self._wrappers[role, kind]


class AttentionLaunch:
    """One launch of attention for some requests of a step. It is planned once for each kind of layer, when the first
    layer of that kind calls it: a step that replays a CUDA graph plans nothing.

    Args:
        wrappers: those of the group of layers.
        role: "decode" for requests with few query tokens, "extend" for others, "prefix" for a prefix that requests
            share, and "suffix" for what follows it.
        tables: block table and lengths of the requests, on the device.
        qo_indptr: int32 [requests + 1], their offsets among the step's tokens.
        max_q_len: the most query tokens of a request; None: it is not known.
        end: the launch gets only the first `end` tokens of the step; None: all tokens. Rows of the output that belong
            to none of the requests may be cleared.
        causal: whether query tokens see no later ones.
    """

    def __init__(
        self,
        wrappers: Wrappers,
        role: str,
        tables: tuple[Tensor, Tensor],
        qo_indptr: Tensor,
        max_q_len: int | None,
        end: int | None = None,
        causal: bool = True,
    ) -> None:
        self._wrappers, self._role = wrappers, role
        self._tables, self._qo_indptr = tables, qo_indptr
        self._max_q_len, self._end = max_q_len, end
        self._causal = causal
        self._plans: dict[LayerKind, Any] = {}

    def run(self, kind: LayerKind, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, **options: Any) -> Any:
        """Attend to the cache, and write to `out`; `options` are those of `BlockTableAttention.run`.

        Args:
            q, out: [tokens, num_heads, head_size] of the whole step.
            cache: k and v, [blocks, block_size, num_kv_heads, head_size].
        """
        wrapper = self._wrappers.get(self._role, kind)
        plan = self._plans.get(kind)
        if plan is None:
            self._plan(wrapper, kind, cache[0].shape[1])
            self._plans[kind] = wrapper.planned
        elif plan is not wrapper.planned:
            wrapper.planned = plan
        if self._end is not None:
            q, out = q[: self._end], out[: self._end]
        return wrapper.run(q, cache, out=out, **options)

    def _plan(self, wrapper: BlockTableAttention, kind: LayerKind, page_size: int) -> None:
        wrapper.plan(
            *self._tables, kind.num_heads, kind.num_kv_heads, kind.head_size, page_size, self._qo_indptr,
            max_q_len=self._few_tokens(kind), causal=self._causal, window_left=kind.window,
            # Windows of layers that see later tokens, too, reach as far to the right.
            window_right=-1 if self._causal else kind.window, logits_soft_cap=kind.soft_cap, sm_scale=kind.scale,
            q_data_type=kind.q_dtype, kv_data_type=kind.kv_dtype, alibi_slopes=kind.slopes or None,
        )  # fmt: skip

    def _few_tokens(self, kind: LayerKind) -> int | None:
        """The most query tokens of a request if kernels for decode may compute the launch. Larger numbers make no
        difference, and None lets plans of steps differ in their tables alone.
        """
        max_decoded = DECODE_ROWS // (kind.num_heads // kind.num_kv_heads)
        if self._max_q_len is None or self._max_q_len > max_decoded:
            return None
        if self._role == "decode":
            return self._max_q_len
        # Prompts have any length, and kernels are compiled for the bound.
        return min(1 << (self._max_q_len - 1).bit_length(), max_decoded)
