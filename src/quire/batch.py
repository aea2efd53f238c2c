"""`BatchAttention` and its kin under the name of module that they had first: see `quire.attention`."""

from quire.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
