"""The tokens of requests on the device, for penalties and for bad words of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire.engine.request import Request
from quire.steps import upload

# How many tokens a list has room for, at least, beyond those that are put into it.
_SPARE = 64


class TokenLists:
    """Prompt and output of requests, each in a row of a table on the device.

    A request keeps its row as long as it is in every batch. Sampled tokens are appended on the device, so only requests
    that are new in a batch need tokens from the host.

    Args:
        device: where the table is.
        rows: the most requests of a batch.

    Attributes:
        tokens: int32 [rows, width]; entries beyond the tokens of a request are undefined.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.tokens = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self._device, self._rows = device, rows
        self._slots: dict[Request, int] = {}
        # How many tokens of each request the table has.
        self._lens: dict[Request, int] = {}

    def invalidate(self) -> None:
        """Write the tokens of all requests in the next batch, because the table is undefined."""
        self._slots, self._lens = {}, {}

    def hold(self, requests: Sequence[Request]) -> list[int]:
        """Bring the rows of a batch's requests up to date, and give up those of other requests. A request whose last
        token is in flight must have been in the last batch, which has appended that token.

        Returns:
            the row of each request.
        """
        lens = {r: r.num_total_tokens for r in requests}
        self._slots = {r: slot for r, slot in self._slots.items() if r in lens}
        free = iter(sorted(set(range(self._rows)).difference(self._slots.values())))
        new = [r for r in requests if r not in self._slots or self._lens[r] != lens[r]]
        for request in new:
            if request not in self._slots:
                self._slots[request] = next(free)
        self._lens = lens
        self._widen(max(lens.values()))
        if new:
            self._write(new)
        return [self._slots[r] for r in requests]

    def append(self, slots: Tensor, ends: Tensor, tokens: Tensor) -> None:
        """Add one token to the row of each request of the batch. On the device: slots int64; ends int64, the number of
        tokens before it; tokens int32.
        """
        self._lens = {r: length + 1 for r, length in self._lens.items()}
        longest = max(self._lens.values())
        self._widen(longest)
        self.tokens.view(-1).scatter_(0, slots * self.tokens.shape[1] + ends, tokens.int())

    def _write(self, requests: Sequence[Request]) -> None:
        """Write all tokens of requests."""
        assert not any(r.num_inflight_tokens for r in requests), "the host does not know a token in flight"
        width = self.tokens.shape[1]
        at = [np.arange(len(r.tokens)) + self._slots[r] * width for r in requests]
        known = np.fromiter(chain.from_iterable(r.tokens for r in requests), dtype=np.int64)
        index, values = upload(np.stack([np.concatenate(at), known]), self._device)
        self.tokens.view(-1).scatter_(0, index, values.int())

    def _widen(self, longest: int) -> None:
        """Make room for `longest` tokens of each request."""
        width = self.tokens.shape[1]
        if longest > width:
            wider = self.tokens.new_zeros(self._rows, max(longest + _SPARE, longest * 5 // 4))
            wider[:, :width] = self.tokens
            self.tokens = wider
