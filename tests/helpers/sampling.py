"""The definition of `quire.sampling` in float64, one row at a time, and statistics of draws."""

from __future__ import annotations

import torch
from torch import Tensor

ALARM = 1e-7  # a p-value below which draws are taken to have another distribution


def weights(x: Tensor, logits: bool, temperature: float = 1.0) -> Tensor:
    """Float64 probabilities of a row on the host."""
    x = x.detach().cpu().double()
    return torch.softmax(x / temperature, -1) if logits else x.clamp(min=0)


def exact(x: Tensor, logits: bool, k=0, p=1.0, min_p=0.0, temperature=1.0, joint=True) -> Tensor:
    """The distribution of a row after its filters, element by element as they are defined."""
    w, x = weights(x, logits, temperature), x.detach().cpu().double()
    order = x.argsort(descending=True)
    sorted_x, before = x[order], torch.cat([torch.zeros(1).double(), w[order].cumsum(0)[:-1]])
    first = torch.searchsorted(-sorted_x, -x)  # how many elements are larger
    kept = (first < k) if 0 < k < len(x) else torch.ones_like(x, dtype=torch.bool)
    if p < 1:
        whole = w[kept].sum() if not joint else 1.0
        kept &= (before[first] < p * whole) | (x == x.max())
    kept &= w >= min_p * w.max()
    result = torch.where(kept, w, 0)
    return result / result.sum()


def p_value(tokens: Tensor, expected: Tensor) -> float:
    """The p-value of draws from a distribution: of the chi-square statistic, with rare tokens put together."""
    count = len(tokens)
    seen = torch.bincount(tokens.long().cpu(), minlength=len(expected)).double()
    assert seen[expected == 0].sum() == 0, "a token without probability was drawn"
    mean = expected * count
    order = mean.argsort(descending=True)
    mean, seen = mean[order], seen[order]
    group = torch.where(mean >= 10, torch.arange(len(mean)), -1)
    rare = group < 0
    common = int((~rare).sum())
    # Rare tokens, in descending order, are put together in groups of at least 10 expected draws.
    group[rare] = common + (mean[rare].cumsum(0) / 20).long()
    groups = int(group.max()) + 1
    mean = torch.zeros(groups).double().index_add(0, group, mean)
    seen = torch.zeros(groups).double().index_add(0, group, seen)
    large = mean >= 5
    if large.sum() < 2:
        return 1.0
    # The rest counts with a large group: one draw of what hardly ever is drawn would be far from its mean.
    rest = [x[~large].sum() for x in (mean, seen)]
    mean, seen = mean[large], seen[large]
    mean[-1] += rest[0]
    seen[-1] += rest[1]
    statistic = ((seen - mean) ** 2 / mean).sum()
    freedom = torch.tensor((len(mean) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def rows(kind: str, count: int, vocab: int) -> Tensor:
    """Logits [count, vocab] as models give them ("peaked"), all alike ("flat"), or with many ties ("ties")."""
    x = torch.randn(count, vocab)
    if kind == "peaked":
        return x * 3 + 6 * (torch.rand(count, vocab) < 20 / vocab)
    return x if kind == "flat" else (x * 2).round()
