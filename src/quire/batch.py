"""`BatchAttention` and related wrappers under the older name of their module: see `quire.attention`."""

from quire.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
