"""One checked call of attention: what a kernel family is given, and what it may return so that the call can be
replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.definition.items import Items
from quire.definition.masks import PackedMask
from quire.definition.pages import LengthTable, PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec

# The addresses of q, q_pe, k, v, k_pe, out, lse and sinks; None where a call has none.
Addresses = tuple[int, int | None, int, int, int | None, int, int | None, int | None]
# Launches a computed call again, on a stream, with other tensors of equal shapes, strides, dtypes and devices. It
# returns False, and nothing is launched, if their addresses are not aligned.
Replay = Callable[[Addresses, int], bool]


@dataclass(slots=True, eq=False)
class Call:
    """One checked call of attention: what kernels need to know, except where outputs are written.

    Attributes:
        q: [tokens, num_qo_heads, head_dim_qk].
        k, v: [pages, page_size, num_kv_heads, head_dim] with a page table, [tokens, num_kv_heads, head_dim] with
            ragged rows; any strides with the last one 1.
        qo, kv: the query rows and the keys of each request.
        sinks: [num_qo_heads], one more logit per head in the softmax's denominator.
        q_scale, k_scale, v_scale: factors of the stored values; a number, or a tensor of one per head.
        q_pe, k_pe: with spec.latent, the rotary part of queries, [tokens, num_qo_heads, 64], and of keys, [pages,
            page_size, 1, 64]; q and k are then the latent part, and v is k. pe_gain: a factor of the rotary part alone,
            besides q_scale and k_scale, for fp8 caches.
        max_q_len: the most query tokens that a request has, 0 if it is not known.
        float_workspace: float32 workspace for partial states, as much as the family asks for; or None, and the kernels'
            host code allocates it.
        int_workspace: int32 workspace of 8 MiB or more, all zeros before a call and after it; or None, and the kernels'
            host code allocates it. No other call may use the workspaces at the same time.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qo: RaggedLayout
    kv: PageTable | RaggedLayout
    spec: AttentionSpec
    mask: PackedMask | None = None
    sinks: Tensor | None = None
    q_scale: float | Tensor = 1.0
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    items: Items | None = None
    q_pe: Tensor | None = None
    k_pe: Tensor | None = None
    pe_gain: float = 1.0
    max_q_len: int = 0
    float_workspace: Tensor | None = None
    int_workspace: Tensor | None = None

    def float_workspace_for(self, size: int) -> Tensor:
        """A float32 workspace of at least `size` elements: the caller's, or a new one."""
        if self.float_workspace is None or self.float_workspace.numel() < size:
            return torch.empty(size, dtype=torch.float32, device=self.q.device)
        return self.float_workspace

    def int_workspace_for(self, size: int, min_elements: int = 0) -> Tensor:
        """An int32 workspace of zeros: the caller's if it has at least `min_elements`, or a new one of `size`."""
        if self.int_workspace is None or self.int_workspace.numel() < min_elements:
            return torch.zeros(size, dtype=torch.int32, device=self.q.device)
        return self.int_workspace

    def table(self) -> tuple[int, Tensor, Tensor, bool, int]:
        """What kernels read of the page table: (page_size, indices, lengths, by_length, entries).

        `lengths` has the tokens in each request's last page or, with by_length, in each request. Kernels may read the
        first `entries` page ids of `indices`. Ragged rows have page_size 0 and no indices: kv.indptr counts rows of k.
        """
        kv, pool = self.kv, self.k.shape[0]
        if isinstance(kv, PageTable):
            by_length, entries = isinstance(kv, LengthTable), kv.indices.shape[0] if pool else 0
            return kv.page_size, kv.indices, kv.per_request, by_length, entries
        return 0, kv.indptr, kv.indptr, False, pool

    def paged(self) -> tuple[Tensor, Tensor, PageTable]:
        """k, v and their page table; ragged rows become pages of size 1."""
        if isinstance(self.kv, PageTable):
            return self.k, self.v, self.kv
        return self.k.unsqueeze(1), self.v.unsqueeze(1), PageTable.from_ragged(self.kv, len(self.k))

    def expanded(self) -> Call:
        """An equal call for kernels that know neither items, which become a custom mask, nor latent caches, of which
        both parts are copied into one tensor.
        """
        if self.items is None and self.q_pe is None:
            return self
        q, k = self.q, self.k
        spec, mask = self.spec, self.mask
        if self.items is not None:
            mask = self.items.packed(self.qo.lengths(), self.kv.lengths())
            spec = spec.replace(items=False, custom_mask=True)
        if self.q_pe is not None and self.k_pe is not None:
            q_pe = self.q_pe
            # In 16 bits, the product of q_pe and the gain would be rounded, as it is not in the oracle.
            if self.pe_gain != 1.0:
                q, q_pe = q.float(), q_pe.float() * self.pe_gain
            q, k = torch.cat([q, q_pe], -1), torch.cat([k, self.k_pe], -1)
            spec = spec.replace(latent=False, q_dtype=q.dtype)
        return Call(
            q,
            k,
            self.v,
            self.qo,
            self.kv,
            spec,
            mask=mask,
            sinks=self.sinks,
            q_scale=self.q_scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
