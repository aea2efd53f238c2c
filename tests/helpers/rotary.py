"""Rotary embeddings as defined, in float64."""

from __future__ import annotations

import torch


def turned(x, angles, interleave):
    """x [tokens, heads, head_dim] with pairs rotated by angles [tokens, rotary_dim / 2]; float64."""
    out, rotary_dim = x.double().cpu().clone(), 2 * angles.shape[1]
    pairs = out[..., :rotary_dim].unflatten(-1, (-1, 2) if interleave else (2, -1))
    pairs = torch.view_as_complex(pairs if interleave else pairs.transpose(-1, -2).contiguous())
    pairs = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    out[..., :rotary_dim] = (pairs if interleave else pairs.transpose(-1, -2)).flatten(-2)
    return out
